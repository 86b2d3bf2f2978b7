"""A process that measures when it is asked to: each request is a line of JSON, and so is each answer."""

import json
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress


class WorkerError(Exception):
    """A contestant could not go on; the message says why."""


class Worker:
    """The process of one contestant, `worker.py` with the class `where` ("module:class") and the model. It loads the
    model as soon as it is made; the first `answer` tells of it."""

    def __init__(self, where: str, model: str):
        # -P: a file of the current folder must not take the place of a library with its name
        self.start([sys.executable, "-P", "-m", "kvcourse.bench.worker", where, model])

    def start(self, command: list[str], env: dict[str, str] | None = None) -> None:
        """Run `command`, which answers lines on its standard input; what it says besides goes to `messages`."""
        self.messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            encoding="utf-8",
            errors="replace",
            env=env,
        )

    def ask(self, **request) -> dict:
        with suppress(OSError):  # it has ended; `answer` finds out why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self.cause_of_death())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerError(f"its process said something that is no answer: {textwrap.shorten(line, 80)}")
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def cause_of_death(self) -> str:
        code = self.process.wait()
        if code == -9:
            return "its process was killed, most often for want of memory"
        self.messages.seek(0)
        last = self.messages.read().strip().split("\n")[-1]
        return f"its process ended with exit code {code}" + (f": {last}" if last else "")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.messages):
            with suppress(OSError):  # a request that was never read
                stream.close()
