"""What a streaming endpoint sends: server-sent events, and the piece of an answer in each.

The format of the events is that of the HTML Standard, section "Server-sent events"; what is in them is that of OpenAI's
API, with what llama.cpp, vLLM and SGLang add to it.
"""

import json
import re
from dataclasses import dataclass, field

LINE_END = re.compile(rb"\r\n|\n|\r")
DONE = "[DONE]"
LONGEST = 2**24  # bytes of a line


class EndpointError(RuntimeError):
    """What went wrong between this computer and the endpoint, in one sentence."""


class EventReader:
    """Turns bytes, cut anywhere, into the data of whole events. A line is decoded once it is complete, so that a letter
    of several bytes may come in two packets. Comments, which servers send to keep a connection alive, are no events."""

    def __init__(self):
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of the events that `received` completes."""
        whole = self._rest + received
        held = whole[-1:] if whole.endswith(b"\r") else b""  # "\n" may follow in the next packet
        *lines, rest = LINE_END.split(whole[: len(whole) - len(held)])
        self._rest = rest + held
        if len(rest) > LONGEST:
            raise EndpointError(f"The server sent a malformed event, with more than {LONGEST:,} bytes in a line.")
        return [event for line in lines if (event := self._take(line)) is not None]

    def close(self) -> list[str]:
        """The data of a last event that no empty line ended."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes) -> str | None:
        if not line:
            event, self._data = "\n".join(self._data), []
            return event or None
        name, _, value = line.partition(b":")
        if name in (b"data", b"error"):  # older llama.cpp servers name the field "error" when that is what they send
            try:
                self._data.append(value.removeprefix(b" ").decode())
            except UnicodeDecodeError:
                raise EndpointError(f"The server sent a malformed event, which is not UTF-8: {line[:80]!r}.") from None
        return None


@dataclass
class Chunk:
    """One event: a piece of text, with as many tokens as `count` says (None: the server does not tell). `calls` tells
    a piece of a tool call, which is made of tokens too, and is no text."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    count: int | None = None
    calls: bool = False
    finish_reason: str | None = None
    usage: dict | None = None

    @property
    def carries(self) -> bool:
        """Whether tokens came with it: the event that names the role, or brings the usage, has none."""
        return bool(self.text or self.count or self.calls)


def parse_chunk(data: str) -> Chunk:
    """The chunk in the data of an event. Raises `EndpointError` for what is none, and for the server's own error."""
    try:
        content = json.loads(data)
        if content.get("error") or content.get("object") == "error":
            raise EndpointError(f"The server reported an error in its stream: {error_message(content)}")
        chunk, choices = Chunk(usage=_usage(content.get("usage"))), content.get("choices") or []
        for choice in [choice for choice in choices if not choice.get("index")][:1]:  # one answer was asked for
            chunk.finish_reason = choice.get("finish_reason")
            chunk.text = _text(choice)
            chunk.count, chunk.ids = _tokens(choice)
            chunk.calls = bool((choice.get("delta") or {}).get("tool_calls"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise EndpointError(f"The server sent a malformed event: {shortened(data)}") from None
    return chunk


def _text(choice: dict) -> str:
    """Of a completion, or of a chat; a model that thinks first writes its thoughts beside the answer."""
    delta = choice.get("delta") or {}
    pieces = [choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    return "".join(piece for piece in pieces if piece is not None)


def _tokens(choice: dict) -> tuple[int | None, list[int]]:
    """How many tokens the chunk has and their ids, as far as it says: vLLM's `token_ids`, or one entry a token in the
    log-probabilities, where llama.cpp writes the ids too."""
    if (ids := choice.get("token_ids")) is not None:
        return len(ids), [int(id) for id in ids]
    logprobs = choice.get("logprobs") or {}
    entries = logprobs.get("content")
    if entries is None:
        tokens = logprobs.get("tokens")
        return (None if tokens is None else len(tokens)), []
    ids = [int(entry["id"]) for entry in entries if "id" in entry]
    return len(entries), ids if len(ids) == len(entries) else []


def _usage(usage: dict | None) -> dict | None:
    """The three counts, checked: `completion`, `prompt`, and `cached` of the prompt; None for what is not told."""
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counts = {"completion": usage.get("completion_tokens"), "prompt": usage.get("prompt_tokens"), "cached": cached}
    if any(type(count) is not int or count < 0 for count in counts.values() if count is not None):
        raise ValueError("a count of tokens is no whole number")
    return counts


def error_message(content) -> str:
    """The words for people in an error that a server sent as JSON, in whichever of the usual places."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            return error_message(content[key])
    return shortened(content if isinstance(content, str) else json.dumps(content))


def shortened(text: str, length: int = 200) -> str:
    """`text` on one line, ending with a full stop."""
    text = " ".join(text.split())
    return f"{text[:length]} ..." if len(text) > length else f"{text.rstrip('.')}."
