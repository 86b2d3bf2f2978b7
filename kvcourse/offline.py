"""Whether the network may be used: one switch of the reader's, for a room without wifi."""

import os


def offline() -> bool:
    """Whether `KVCOURSE_OFFLINE` is 1: then nothing is downloaded. Raises `ValueError` unless it is 1, 0 or empty."""
    value = os.environ.get("KVCOURSE_OFFLINE", "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"KVCOURSE_OFFLINE={value!r} must be 1 (use no network), or 0 or unset (use it).")
    return value == "1"
