"""Pre-flight for one seat: everything that a class will ask of this computer, tried for real in under a minute."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from queue import Empty

from kvcourse import __version__
from kvcourse.cli.doctor import Line, examine
from kvcourse.notebooks.build import has_been_run
from kvcourse.paths import results_folder
from kvcourse.workshop.learner_copy import learner_notebooks

KIND = "kvcourse seat"  # what marks the JSON that `collect` finds among others
DISK_NEEDED = 1e9  # bytes for results, files that notebooks write for a moment, and compiled code
PATIENCE = 120  # seconds for one piece of code in the kernel: a slow disk may need one to read PyTorch
COMPUTES = "import kvcourse as kv, torch; print(int(torch.arange(7.0).sum()), kv.__version__)"
TOKENS = """
import time
lm = kv.load_model("smollm2-135m")
begun = time.perf_counter()
text = "".join(lm.stream("Say hello.", max_new_tokens=8))
print(lm.name, round(time.perf_counter() - begun, 1), sep="|")
"""


def check(course: Path) -> list[Line]:
    """What `kvcourse doctor` finds, and then what only a trial shows. A trial whose tools are missing is left out: the
    lines before say what to put right."""
    lines = [*examine(), notebooks(course), disk_for_work()]
    fix = {line.topic for line in lines if line.status == "fix"}
    if not fix & {"python", "packages", "kernel"}:
        lines += kernel_and_tokens(tokens="model" not in fix)  # asked for a model that is absent, it would download one
    return lines


def ready(lines: list[Line]) -> bool:
    return not any(line.status == "fix" for line in lines)


def last_line(lines: list[Line]) -> str:
    """`ready`, or which lines say what to do."""
    read = [line.topic for line in lines if line.status == "look"]
    fix = [line.topic for line in lines if line.status == "fix"]
    if fix:
        return f"not ready: do what the lines say that begin with fix ({', '.join(fix)}), and check again"
    return f"ready; read what is said about {', '.join(read)}" if read else "ready"


def as_json(lines: list[Line]) -> dict:
    """For collecting from thirty computers: write it to a file with the seat's name."""
    date = datetime.now().astimezone().isoformat(timespec="minutes")
    found = [line._asdict() for line in lines]
    return {"kind": KIND, "kvcourse": __version__, "date": date, "ready": ready(lines), "lines": found}


def notebooks(course: Path) -> Line:
    """Whether nobody has worked in the learner's notebooks: somebody else's answers spoil the exercises. From outside
    the learner's folder it is the package's own that is found, which says nothing of theirs."""
    paths = learner_notebooks(course)
    if not Path.cwd().is_relative_to(course.resolve()):
        text = f"looked at {course / 'notebooks'}: for the learner's own, go to the learner's folder and check again"
        return Line("look", "notebooks", text)
    worked_in = [path.stem for path in paths if has_been_run(path)]
    if not worked_in:
        return Line("ok", "notebooks", f"{len(paths)} in {course / 'notebooks'}, none worked in")
    where = f"{', '.join(worked_in)} of {course / 'notebooks'}"
    text = f"somebody has worked in {where}: lay down a fresh copy, unless it is this learner"
    return Line("look", "notebooks", text)


def disk_for_work() -> Line:
    """Whether results can be kept, and notebooks have room for what they write."""
    folder = results_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"nothing can be written in {folder} ({error.strerror}): set KVCOURSE_RESULTS to another folder"
        return Line("fix", "results", text)
    short = [place for place in (folder, Path(tempfile.gettempdir())) if shutil.disk_usage(place).free < DISK_NEEDED]
    if short:
        return Line("fix", "results", f"less than {DISK_NEEDED / 1e9:.0f} GB is free at {short[0]}: make room there")
    return Line("ok", "results", f"kept in {folder}; {DISK_NEEDED / 1e9:.0f} GB and more is free there")


def kernel_and_tokens(tokens: bool = True) -> Iterator[Line]:
    """Start the kernel that notebooks get, let it compute, and wait for the first tokens of the chat model."""
    from jupyter_client.manager import start_new_kernel

    begun = time.perf_counter()
    try:
        manager, client = start_new_kernel(PATIENCE, "python3", extra_arguments=["--IPKernelApp.log_level=50"])
    except Exception as error:  # whatever the reason is, this seat cannot open a notebook
        yield Line("fix", "computes", f"the notebook kernel did not start ({error}): install the course again")
        return
    try:
        said, error = run(client, COMPUTES)
        if said != f"21 {__version__}":
            text = f"the kernel says {error or repr(said)}, not 21 {__version__}: install the course again"
            yield Line("fix", "computes", text)
            return
        yield Line("ok", "computes", f"a kernel started and computed in {time.perf_counter() - begun:.1f} s")
        if not tokens:
            return
        said, error = run(client, TOKENS)
        if error:
            yield Line("fix", "tokens", f"the model wrote nothing: {error}")
        else:
            name, seconds = said.splitlines()[-1].split("|")
            yield Line("ok", "tokens", f"{name} wrote its first tokens in {seconds} s")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client, code: str, patience: float = PATIENCE) -> tuple[str, str]:
    """What the code printed in the kernel, and its error (empty when there was none)."""
    said = []

    def keep(message):
        if message["header"]["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            said.append(message["content"]["text"])

    try:
        reply = client.execute_interactive(code, timeout=patience, output_hook=keep, allow_stdin=False)["content"]
    except (TimeoutError, Empty):
        return "".join(said).strip(), f"no answer within {patience} s"
    error = "" if reply["status"] == "ok" else f"{reply['ename']}: {reply['evalue']}"
    return "".join(said).strip(), error
