"""The exercises of notebook 00: worked answers and other right ways pass, the usual mistakes are named."""

from exercises import shared_tests, solution

NOTEBOOK = "00_start_here"

RIGHT = {
    "latencies": [
        """
        def latencies(arrivals):
            gaps = [after - before for before, after in zip(arrivals, arrivals[1:])]
            tpot = (arrivals[-1] - arrivals[0]) / len(gaps) if gaps else None
            return arrivals[0], gaps, tpot
        """,
        """
        def latencies(arrivals):
            gaps = np.diff(arrivals)
            return arrivals[0], gaps, gaps.mean() if len(gaps) else None
        """,
        """
        def latencies(arrivals):
            gaps = []
            for i in range(1, len(arrivals)):
                gaps.append(arrivals[i] - arrivals[i - 1])
            if len(arrivals) == 1:
                return [arrivals[0], gaps, None]
            return [arrivals[0], gaps, (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)]
        """,
        """
        def latencies(arrivals):
            times = torch.tensor(arrivals, dtype=torch.float64)
            return times[0], times.diff(), times.diff().mean() if len(arrivals) > 1 else None
        """,
    ],
    "word_times": [
        """
        def word_times(pieces, arrivals):
            text, times = "", {}
            for piece, arrival in zip(pieces, arrivals):
                text += piece
                word = len(text.split())
                if piece.strip():
                    times[word] = arrival
            return list(times.values())
        """,
        """
        def word_times(pieces, arrivals):
            text, times = "", {}
            for piece, arrival in zip(pieces, arrivals):
                text += piece
                if piece.strip():
                    times[len(text.split())] = arrival
            return times.values()
        """,
        """
        def word_times(pieces, arrivals):
            text, complete = "", None
            for piece, arrival in zip(pieces, arrivals):
                if complete is not None and piece.strip() and len((text + piece).split()) > len(text.split()):
                    yield complete
                text += piece
                complete = arrival if piece.strip() else complete
            if complete is not None:
                yield complete
        """,
        """
        def word_times(pieces, arrivals):  # from the end: the first piece seen of a word is its last
            times, seen = [], set()
            for end in range(len(pieces), 0, -1):
                word = len("".join(pieces[:end]).split())
                if pieces[end - 1].strip() and word not in seen:
                    seen.add(word)
                    times.append(arrivals[end - 1])
            return np.array(times[::-1])
        """,
        """
        def word_times(pieces, arrivals):  # a word ends where a blank stands before the next piece that shows something
            shown = [i for i, piece in enumerate(pieces) if piece.strip()]
            times = []
            for i, following in zip(shown, [*shown[1:], None]):
                between = "" if following is None else "".join(pieces[i : following + 1])
                if following is None or len(between.split()) > len(pieces[i].split()):
                    times.append(torch.tensor(arrivals[i]))
            return torch.stack(times)
        """,
    ],
    "first_wait": [
        """
        def first_wait(times, words_per_second):
            for i in range(1, len(times)):
                if times[i] > times[0] + i / words_per_second:
                    return i
            return len(times)
        """,
        """
        def first_wait(times, words_per_second):  # moves the reader word by word
            wanted = times[0]
            for i in range(1, len(times)):
                wanted += 1 / words_per_second
                if times[i] - wanted > 1e-9:
                    return i
            return len(times)
        """,
        """
        def first_wait(times, words_per_second):
            times = np.array(times)
            late = times > times[0] + np.arange(len(times)) / words_per_second
            return np.argmax(late) if late.any() else len(times)
        """,
    ],
    "hold_back": [
        """
        import codecs

        def hold_back(held, new):
            decoder = codecs.getincrementaldecoder("utf-8")()
            text, rest = decoder.decode(held + new), decoder.getstate()[0]
            return text, rest
        """,
        """
        def hold_back(held, new):  # looks for the last byte that begins a character
            data = held + new
            for back in range(1, min(4, len(data)) + 1):
                byte = data[-back]
                if byte & 0xC0 != 0x80:
                    length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                    cut = len(data) - back if length > back else len(data)
                    return data[:cut].decode(), data[cut:]
            return data.decode(), b""
        """,
    ],
}

DECODE = "text, rest = decoder.decode(held + new), decoder.getstate()[0]"

MISTAKES = {
    "latencies": [
        (
            (
                "zip(arrivals, arrivals[1:])]\n    tpot = (arrivals[-1] - arrivals[0])",
                "zip([0.0, *arrivals], arrivals)]\n    tpot = sum(gaps)",
            ),
            "is counted as a gap",
        ),
        (("zip(arrivals, arrivals[1:])", "zip([0.0, *arrivals], arrivals)"), "so TPOT divides by one too many"),
        (
            (
                "return arrivals[0], gaps, tpot",
                "return arrivals[0], [arrivals[0], *gaps], tpot",
            ),
            "is counted as a gap; n tokens have n - 1 gaps, the first wait is TTFT (TPOT is right)",
        ),
        (("/ len(gaps) if gaps", "/ len(arrivals) if gaps"), "divides by the number of tokens"),
        (("(arrivals[-1] - arrivals[0]) / len(gaps)", "arrivals[-1] / len(arrivals)"), "counts the wait for the first"),
        (("(arrivals[-1] - arrivals[0]) / len(gaps)", "arrivals[-1] / len(gaps)"), "take ttft off the total"),
        (("arrivals[0], gaps, tpot", "arrivals[0], [time - arrivals[0] for time in arrivals[1:]], tpot"), "begins at"),
        ((" if gaps else None", ""), "return None for it"),
        (("if gaps else None", "if gaps else 0.0"), "yours is 0.0"),
        (("return arrivals[0], gaps, tpot", "return arrivals[0], gaps"), "expected 3 values"),
        (("arrivals[0], gaps, tpot", "arrivals[0], gaps or None, tpot"), "is an empty list"),
    ],
    "word_times": [
        (("return list(times.values())", "return arrivals"), "one time for each token"),
        (("if piece.strip():", "if piece.strip() and word not in times:"), "first piece"),
        (("if piece.strip():", "if True:"), "blank or empty piece"),
        (
            (
                "return list(times.values())",
                "return [time for piece, time in zip(pieces, arrivals) if piece[:1] == ' ']",
            ),
            "begins with a space",
        ),
        (("text.split()", "text.split(' ')"), "a line break ends a word too"),
        (("return list(times.values())", "return len(text.split())"), "expected"),
    ],
    "first_wait": [
        (("times[i] > times[0] + i / words_per_second", "times[i] - times[i - 1] > 1 / words_per_second"), "each gap"),
        (("times[0] + i / words_per_second", "i / words_per_second"), "clock starts at 0"),
        (("i / words_per_second", "(i + 1) / words_per_second"), "one word too slow"),
        (("i / words_per_second", "(i - 1) / words_per_second"), "one word too quick"),
        (("times[i] >", "times[i] >="), ">, not >="),
        (
            ("return i\n    return len(times)", "return i + 1\n    return len(times) + 1"),
            "starts at 0",
        ),
        (("    return len(times)", "    return None"), "returns None"),
        (("    return len(times)", "    return -1"), "returns -1"),
        (("    return len(times)", "    return -2"), "yours is -2"),
        (("i / words_per_second", "i * words_per_second"), "multiplies by the speed"),
        (("return i\n", "continue\n"), "finds no word that is late"),
    ],
    "hold_back": [
        ((DECODE, "text, rest = (held + new).decode(errors='replace'), b''"), "replacement character"),
        ((DECODE, "text, rest = (held + new).decode(errors='ignore'), b''"), "throws the unfinished bytes away"),
        (("decoder.getstate()[0]", "b''"), "throws the unfinished bytes away"),
        (
            """
            def hold_back(held, new):
                try:
                    return (held + new).decode(), b""
                except UnicodeDecodeError:
                    return "", held + new
            """,
            "shows nothing at all",
        ),
        ((DECODE, "text, rest = (held + new).decode('latin-1'), b''"), "each byte became a character"),
        (
            """
            def hold_back(held, new):
                data = held + new
                try:
                    return data.decode(), b""
                except UnicodeDecodeError:
                    return data[:-1].decode(errors="replace"), data[-1:]
            """,
            "at most one byte",
        ),
        ((DECODE, "text, rest = (held + new).decode(), b''"), "UnicodeDecodeError"),
        (("return text, rest", "return text, list(rest)"), "as bytes"),
        (("return text, rest", "return text, bytearray(rest)"), "or a bytearray"),
        (("return text, rest", "return text"), "expected 2 values"),
        (("decoder.decode(held + new)", "decoder.decode(new)"), "forgets the bytes held from before"),
        (
            """
            def hold_back(held, new):
                if new[0] & 0xC0 == 0x80:
                    return new.decode(errors="ignore"), b""
                text = new.decode(errors="ignore")
                return text, new[len(text.encode()) :]
            """,
            "expected|first difference",
        ),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


def test_worked_answers_by_hand():
    ttft, gaps, tpot = solution(NOTEBOOK, "latencies")([1.0, 1.25, 1.75])
    assert (ttft, gaps, tpot) == (1.0, [0.25, 0.5], 0.375)
    assert solution(NOTEBOOK, "latencies")([0.5]) == (0.5, [], None)
    assert solution(NOTEBOOK, "word_times")(["A", " lo", "af", "\n", "!"], [1, 2, 3, 4, 5]) == [1, 3, 5]
    assert solution(NOTEBOOK, "first_wait")([1.0, 1.4, 2.1], 2.0) == 2  # wanted at 1.0, 1.5 and 2.0
    assert solution(NOTEBOOK, "hold_back")(b"\xc3", b"\xa9t\xe2\x82") == ("ét", b"\xe2\x82")
