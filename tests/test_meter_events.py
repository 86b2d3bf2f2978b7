"""What an endpoint sends, cut anywhere, and what the numbers of one request mean."""

import json

import pytest

from kvcourse.endpoint.events import EndpointError, EventReader, error_message, parse_chunk
from kvcourse.endpoint.record import Record


def read(*packets: bytes) -> list[str]:
    reader = EventReader()
    events = [event for packet in packets for event in reader.feed(packet)]
    return events + reader.close()


STREAM = 'data: {"a": "Käse 🧀"}\n\n: ping\n\ndata: 2\n\ndata: [DONE]\n\n'
EVENTS = ['{"a": "Käse 🧀"}', "2", "[DONE]"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_are_the_same_wherever_the_packets_are_cut(end):
    whole = STREAM.replace("\n", end).encode()
    for cut in range(len(whole) + 1):
        assert read(whole[:cut], whole[cut:]) == EVENTS
    assert read(*(whole[i : i + 1] for i in range(len(whole)))) == EVENTS


def test_cutting_before_decoding_would_break_a_letter():
    first = STREAM.encode()[: STREAM.encode().index("ä".encode()) + 1]
    with pytest.raises(UnicodeDecodeError):
        first.decode()


@pytest.mark.parametrize(
    ("sent", "events"),
    [
        (b"data:1\n\n", ["1"]),  # one space after the colon may be there
        (b"data:  1\n\n", [" 1"]),
        (b"data: 1\ndata: 2\n\n", ["1\n2"]),
        (b"event: x\nid: 7\nretry: 3\ndata: 1\n\n", ["1"]),
        (b": alive\n\n\n\n:\n", []),
        (b"data: 1", ["1"]),  # the stream ends without the empty line
        (b"data: 1\n", ["1"]),
        (b"data\n\n", []),
        (b"error: {}\n\n", ["{}"]),
    ],
)
def test_fields_of_an_event(sent, events):
    assert read(sent) == events


def test_an_event_is_given_as_soon_as_it_is_whole():
    reader = EventReader()
    assert reader.feed(b"data: 1\n") == []
    assert reader.feed(b"\nda") == ["1"]
    assert reader.feed(b"ta: 2\r\n\r") == []
    assert reader.feed(b"\n") == ["2"]


def test_what_is_no_text_or_never_ends(monkeypatch):
    with pytest.raises(EndpointError, match="not UTF-8"):
        read(b"data: \xff\n\n")
    monkeypatch.setattr("kvcourse.endpoint.events.LONGEST", 100)
    with pytest.raises(EndpointError, match="more than 100 bytes in a line"):
        read(*[b"data: aaaaaaaaaaaaa"] * 9)


def choice(**content) -> str:
    return json.dumps({"choices": [{"index": 0, **content}]})


@pytest.mark.parametrize(
    ("data", "text", "count", "ids", "carries"),
    [
        (choice(text=" a", logprobs=None), " a", None, [], True),
        (choice(text="", finish_reason="stop"), "", None, [], False),
        (choice(delta={"role": "assistant", "content": ""}), "", None, [], False),
        (choice(delta={"role": "assistant", "content": None}), "", None, [], False),
        (choice(delta={"content": "hi"}), "hi", None, [], True),
        (choice(delta={"reasoning_content": "hm"}), "hm", None, [], True),
        (choice(text=" a b", token_ids=[3, 4]), " a b", 2, [3, 4], True),
        (choice(text="", token_ids=[3]), "", 1, [3], True),  # half a letter: no text yet, and a token all the same
        (choice(text="a", logprobs={"content": [{"id": 9, "token": "a"}]}), "a", 1, [9], True),
        (choice(delta={"content": "a"}, logprobs={"content": [{"token": "a"}] * 2}), "a", 2, [], True),
        (choice(text="ab", logprobs={"tokens": ["a", "b"], "top_logprobs": None}), "ab", 2, [], True),
        (json.dumps({"choices": []}), "", None, [], False),
        (json.dumps({"choices": [{"text": "a"}]}), "a", None, [], True),  # without an index there is one answer
        (json.dumps({"choices": [{"index": 1, "text": "b"}]}), "", None, [], False),
        (choice(delta={"content": None, "tool_calls": [{"index": 0}]}), "", None, [], True),
        (choice(delta={"content": "", "tool_calls": []}), "", None, [], False),
    ],
)
def test_a_chunk(data, text, count, ids, carries):
    chunk = parse_chunk(data)
    assert (chunk.text, chunk.count, chunk.ids, chunk.carries) == (text, count, ids, carries)


def test_the_answer_is_the_choice_of_index_0_wherever_it_stands():
    other, answer = {"index": 1, "text": "b"}, {"index": 0, "text": "a", "finish_reason": "length"}
    for choices in ([other, answer], [answer, other]):
        chunk = parse_chunk(json.dumps({"choices": choices}))
        assert (chunk.text, chunk.finish_reason) == ("a", "length")


def test_usage():
    counts = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    chunk = parse_chunk(json.dumps({"choices": [], "usage": counts}))
    assert chunk.usage == {"completion": 3, "prompt": 9, "cached": 8} and not chunk.carries
    counts["prompt_tokens_details"] = None
    assert parse_chunk(json.dumps({"usage": counts})).usage == {"completion": 3, "prompt": 9, "cached": None}
    assert parse_chunk(json.dumps({"usage": None})).usage is None


MALFORMED = [
    "no json",
    "[1]",
    '"text"',
    "{",
    '{"choices": 7}',
    '{"choices": [7]}',
    '{"choices": [{"text": 7}]}',
    '{"choices": [{"delta": "x"}]}',
    '{"choices": [{"text": "a", "token_ids": ["x"]}]}',
    '{"usage": {"completion_tokens": -1}}',
    '{"usage": {"completion_tokens": "3"}}',
    '{"usage": 3}',
    "[" * 100_000,
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: data[:40])
def test_a_malformed_event_is_shown(data):
    with pytest.raises(EndpointError, match="The server sent a malformed event: ") as error:
        parse_chunk(data)
    assert data[:20] in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"error": {"message": "too long.", "code": 400}}, "too long."),
        ({"error": "broken"}, "broken."),
        ({"object": "error", "message": "no such model"}, "no such model."),
        ({"detail": [{"msg": "field required"}]}, '[{"msg": "field required"}].'),
    ],
)
def test_the_words_of_an_error(content, said):
    assert error_message(content) == said
    if "detail" not in content:
        with pytest.raises(EndpointError, match=f"reported an error in its stream: {said}"):
            parse_chunk(json.dumps(content))


def test_what_the_times_of_a_request_mean():
    """By hand: sent at 0.5, tokens at 1.5, 1.6 and 1.8."""
    record = Record(0.5, 0.5, 8, [1.5, 1.6, 1.8], end=1.9, tokens=3)
    assert record.ttft == 1.0
    assert record.itl == pytest.approx([0.1, 0.2])
    assert record.tpot == pytest.approx(0.15)
    assert record.finished and not record.in_one_piece
    five = Record(0.5, 0.5, 8, [1.5, 1.6, 1.8], end=1.9, tokens=5)  # two gaps, four intervals between tokens
    assert len(five.itl) == 2 and five.tpot == pytest.approx(0.3 / 4)


@pytest.mark.parametrize(("arrivals", "tokens"), [([], 0), ([], 3), ([1.5], 1), ([1.5], 4), ([1.5, 1.6], None)])
def test_where_there_is_no_time_per_token(arrivals, tokens):
    assert Record(0.0, 0.0, 8, arrivals, 2.0, tokens).tpot is None
