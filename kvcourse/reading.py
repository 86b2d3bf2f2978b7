"""Somebody reads the answer while it arrives: when is each word there, and when do they have to wait?

Tokens are not words, so gaps between tokens cannot be held against a reading speed; these functions can.
"""


def word_times(pieces: list[str], arrivals: list[float]) -> list[float]:
    """When each word was complete on the screen: the arrival of its last piece that is not blank.

    `pieces` and `arrivals` belong together, one of each for each token; times are in seconds.
    """
    times, unfinished = [], False
    for piece, arrival in zip(pieces, arrivals, strict=True):
        if unfinished and piece[:1].strip():
            times.pop()  # the piece goes on with the word before, which was not complete yet
        times += [arrival] * len(piece.split())
        if piece:
            unfinished = not piece[-1].isspace()
    return times


def read_times(times: list[float], words_per_second: float) -> list[float]:
    """When a reader begins each word: once it is there, and not before the word before it is read (seconds)."""
    begun = list(times[:1])
    for time in times[1:]:
        begun.append(max(time, begun[-1] + 1 / words_per_second))
    return begun


def waits(times: list[float], words_per_second: float) -> dict[int, float]:
    """How long the reader waits for each word after the first: {index of the word: seconds}, 0 left out."""
    free = [begun + 1 / words_per_second for begun in read_times(times, words_per_second)]
    late = {index: time - free[index - 1] for index, time in enumerate(times) if index}
    return {index: wait for index, wait in late.items() if wait > 0}
