"""Which requests are sent, and when: made from a seed, and refused before anything is sent."""

from random import Random

import pytest

import kvcourse as kv
from kvcourse.endpoint.client import base_url
from kvcourse.endpoint.plan import make_plan
from kvcourse.endpoint.prompts import LONG, SHORT, WORDS, Ruler, make_prompts
from kvcourse.serving.workload import Arrival

TWO = Ruler.from_counts(2 * SHORT + 5, 2 * LONG + 5)  # two tokens a word, five added
DEFAULTS = dict(new_tokens=4, prompt_tokens=None, shared_prefix=0, concurrency=None, rate=None, requests=None)
DEFAULTS |= dict(seconds=60, seed=0, chat=False)


def plan(prompts=None, **changes):
    return make_plan(prompts, **(DEFAULTS | changes))


def test_words_for_a_length():
    assert (TWO.per_word, TWO.added, TWO.measured) == (2, 5, True)
    assert TWO.words(105) == 50
    assert Ruler.from_counts(None, None) == Ruler.from_counts(9, 9) == Ruler(1.0, 0.0, False)
    with pytest.raises(ValueError, match="A prompt of 5 tokens is too short: the server adds 5 to each"):
        TWO.words(5)


def test_prompts_share_what_was_asked_and_nothing_else():
    prompts = [prompt.split() for prompt in make_prompts(Random(0), [105] * 40, TWO, shared_prefix=60)]
    assert {len(words) for words in prompts} == {50}  # 105 tokens
    assert len({tuple(words[:30]) for words in prompts}) == 1  # 60 tokens
    assert all(a[30] != b[30] for a, b in zip(prompts, prompts[1:], strict=False))
    assert len({tuple(words[30:33]) for words in prompts}) == 40
    alone = [prompt.split() for prompt in make_prompts(Random(0), [105] * 40, TWO)]
    assert all(a[0] != b[0] for a, b in zip(alone, alone[1:], strict=False))
    assert len(WORDS) == len(set(WORDS)) > 200


def test_jobs_come_from_the_seed():
    wanted = plan(prompt_tokens=(50, 90), requests=200)
    lengths = {2 * len(job.prompt.split()) + 5 for job in wanted.jobs(TWO)}
    assert min(lengths) >= 49 and max(lengths) <= 91 and len(lengths) > 15
    assert wanted.jobs(TWO) == plan(prompt_tokens=(50, 90), requests=200).jobs(TWO)
    assert wanted.jobs(TWO) != plan(prompt_tokens=(50, 90), requests=200, seed=1).jobs(TWO)
    assert plan(seed=None).seed != plan(seed=None).seed  # a prefix cache that knows the last run is of no use


def test_poisson_arrivals():
    """Gaps of a Poisson process at rate 50: mean and standard deviation 1 / 50, within five standard errors."""
    times = [job.at for job in plan(rate=50, requests=4000).jobs(Ruler())]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.02, rel=0.08) and deviation == pytest.approx(0.02, rel=0.12)
    assert [job.at for job in plan(concurrency=3).jobs(Ruler())] == [None] * 32


def test_prompts_of_the_callers_own():
    assert [job.prompt for job in plan(["a", "b"]).jobs(Ruler())] == ["a", "b"]
    assert [job.prompt for job in plan([[1, 2]]).jobs(Ruler())] == [[1, 2]]
    message = [{"role": "user", "content": "hi"}]
    assert plan([message], chat=True).jobs(Ruler())[0].prompt == message
    trace = [Arrival(0.1, [1, 2], 3), Arrival(0.4, [5], 7)]
    assert plan(trace).jobs(Ruler()) == [([1, 2], 3, 0.1), ([5], 7, 0.4)] and plan(trace).open_loop


REFUSED = [
    (dict(concurrency=0), "concurrency=0 must be a whole number of at least 1"),
    (dict(concurrency=1.5), "concurrency=1.5 must be a whole number"),
    (dict(rate=0), "rate=0 must be a number greater than 0"),
    (dict(rate=float("nan")), "rate=nan must be a number"),
    (dict(rate=3, concurrency=2), "Give concurrency .* or rate .*, not both"),
    (dict(requests=0), "requests=0 must be"),
    (dict(seconds=float("inf")), "seconds=inf must be a number greater than 0, and finite"),
    (dict(seconds=0), "seconds=0 must be"),
    (dict(timeout=-1), "timeout=-1 must be"),
    (dict(new_tokens=0), "new_tokens=0 must be"),
    (dict(prompt_tokens=0), "prompt_tokens=0 must be"),
    (dict(prompt_tokens=(9, 3)), "must have the lower number first"),
    (dict(prompt_tokens=(1, 2, 3)), "one number, or the least and the most"),
    (dict(shared_prefix=-1), "shared_prefix=-1 must be a whole number of at least 0"),
    (dict(shared_prefix=256), "shared_prefix=256 must be less than the shortest prompt, 256 tokens"),
    (dict(seed=-1), "seed=-1 must be"),
    (dict(chat="yes"), "chat='yes' must be True or False"),
    (dict(ignore_eos=1), "ignore_eos=1 must be True or False"),
    (dict(extra=[1]), "extra=.* must be a dict"),
    (dict(extra={"max_tokens": 9}), "extra cannot have 'max_tokens', .*: give new_tokens=... instead"),
    (dict(extra={"max_completion_tokens": 9}), "'max_completion_tokens', .*: give new_tokens=... instead"),
    (dict(extra={"n_predict": 9}), "'n_predict', .*: give new_tokens=... instead"),
    (dict(extra={"top_k": 1, "max_tokens": None}), "extra cannot have 'max_tokens'"),
    (dict(extra={"stream": False}), "'stream', .*: only streamed answers can be timed, so leave it out"),
    (dict(extra={"stream_options": {"include_usage": False}}), "'stream_options', .* so leave it out"),
    (dict(extra={"n": 2}), "'n', .*: each request has one answer, so give requests=... or concurrency=..."),
    (dict(extra={"prompt": "x"}), "'prompt', .*: give prompts="),
    (dict(extra={"messages": []}), "'messages', .*: give prompts=.* with chat=True"),
    (dict(extra={"model": "x"}), "'model', .*: give model="),
    (dict(extra={"x": float("nan")}), "must be what JSON in UTF-8 can hold"),
    (dict(extra={"x": object}), "must be what JSON in UTF-8 can hold"),
    (dict(prompts=["\ud800"]), "must be what JSON in UTF-8 can hold"),
    (dict(model=""), "model='' must be the name of a model"),
    (dict(api_key="a\nb"), "The API key must be letters"),
    (dict(api_key=""), "The API key must be letters"),
    (dict(prompts=[]), "There are no prompts"),
    (dict(prompts="hello"), "prompts is a single text and must be a list: give prompts="),
    (dict(prompts=b"hello"), "prompts is of type bytes and must be a list"),
    (dict(prompts={"role": "user", "content": "hi"}), "prompts is of type dict and must be a list"),
    (dict(prompts=5), "prompts is of type int and must be a list"),
    (dict(prompts=["a", [1]]), "must all be texts"),
    (dict(prompts=[""]), "must all be texts"),
    (dict(prompts=[[-1]]), "must all be texts"),
    (dict(prompts=[[1]], chat=True), "A chat takes texts or lists of messages"),
    (dict(prompts=[[{"role": "user"}]]), "Lists of messages need chat=True"),
    (dict(prompts=["a"], requests=3), "leave them out"),
    (dict(prompts=["a"], prompt_tokens=3), "leave them out"),
    (dict(prompts=[Arrival(0, [1], 1)], rate=3), "A trace of arrivals has its own times"),
    (dict(prompts=[Arrival(0, [1], 1), Arrival(0, [1], 1, after=0)]), "goes on from another's answer"),
    (dict(prompts=[Arrival(2, [1], 1), Arrival(1, [1], 1)]), "in the order of their times"),
    (dict(url="127.0.0.1:8080"), "is no URL of a server"),
    (dict(url="ftp://host"), "is no URL of a server"),
    (dict(url=""), "is no URL of a server"),
    (dict(url=None), "is no URL of a server"),
    (dict(url="http://"), "is no URL of a server"),
    (dict(url="http://me:secret@host"), "leave it out, and give an API key instead"),
    (dict(url="http://host/v1/chat/completions"), "is more than a base: the URL should be the base"),
    (dict(url="http://host/v1?x=1"), "is more than a base"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[str(wrong)[:50] for wrong, _ in REFUSED])
def test_wrong_arguments_are_refused_before_anything_is_sent(wrong, message, monkeypatch):
    monkeypatch.setattr("kvcourse.endpoint.load.Run.watch", lambda *args: pytest.fail("something was sent"))
    arguments = {"url": "http://127.0.0.1:9"} | wrong
    with pytest.raises(ValueError, match=message) as error:
        kv.meter(**arguments)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080/v1"),
        ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080/v1"),
        (" http://127.0.0.1:8080/v1/ ", "http://127.0.0.1:8080/v1"),
        ("https://host/openai", "https://host/openai/v1"),
        ("http://[::1]:80", "http://[::1]/v1"),
    ],
)
def test_the_base_of_a_url(url, base):
    assert base_url(url) == base
