import os
import random
import subprocess
import sys

import filelock
import numpy as np
import pytest
import torch

import kvcourse.check
from kvcourse import results
from kvcourse.check import catalog, framework
from kvcourse.check.catalog import CATALOG, Effort
from kvcourse.check.diagnosis import NotAttempted, diagnose, snapshot
from kvcourse.check.framework import compare, error_of, exercise, normal, told


@pytest.fixture(autouse=True)
def separate(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "results"))
    dir(kvcourse.check)  # registers the exercises of the course, for good
    monkeypatch.setattr(framework, "EXERCISES", dict(framework.EXERCISES))


def learner(source: str, name: str = "answer"):
    """A function as a notebook defines it: in a namespace of its own."""
    namespace = {}
    exec(compile("import numpy as np, torch\n" + source, "<cell>", "exec"), namespace)
    return namespace[name]


@pytest.fixture
def softmax_rows():
    @exercise
    def softmax_rows(answer):
        def right(scores):
            return torch.softmax(scores, dim=-1)

        return compare(
            answer,
            right,
            cases=[torch.tensor([[0.0, 1.0], [2.0, 2.0]]), normal(3, 5), 1000 * normal(3, 5)],
            mistakes={
                "the columns sum to 1, the rows should": lambda scores: torch.softmax(scores, 0),
                "divide by the sum": torch.exp,
            },
        )

    return softmax_rows


RIGHT = {
    "library": "def answer(s): return torch.softmax(s, -1)",
    "loop": """
def answer(s):
    rows = []
    for row in s.tolist():
        e = [np.exp(x - max(row)) for x in row]
        rows.append([x / sum(e) for x in e])
    return rows""",
    "float64": "def answer(s): return torch.softmax(s.double(), -1)",
    "numpy": """
def answer(s):
    s = s.numpy(); s -= s.max(-1, keepdims=True)  # changes its input
    e = np.exp(s)
    return e / e.sum(-1, keepdims=True)""",
    "in place": "def answer(s):\n    s -= s.amax(-1, keepdim=True); s.exp_(); s /= s.sum(-1, keepdim=True); return s",
    "requires grad": "def answer(s): return torch.softmax(s.requires_grad_(), -1)",
    "list of tensors": "def answer(s): return [torch.softmax(row, -1) for row in s]",
    "instance": "class A:\n    def __call__(self, s): return torch.softmax(s, -1)\nanswer = A()",
}


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_every_right_way_is_right(softmax_rows, capsys, source):
    verdict = softmax_rows(learner(source))
    assert (verdict.status, verdict.message) == ("right", "")
    assert capsys.readouterr().out == "softmax_rows is right.\n"
    assert results.progress() == {"softmax_rows": "right"}


WRONG = {
    "def answer(s): return torch.softmax(s, 0)": "the columns sum to 1, the rows should",
    "def answer(s): return s.exp()": "divide by the sum",
    # right for small numbers; the mistakes do not explain the first two answers, so none is named
    "def answer(s): return s.exp() / s.exp().sum(-1, keepdim=True)": "NaN at [0, 0]",
    "def answer(s): return torch.softmax(s, -1).T if s.shape[0] == 3 else torch.softmax(s, -1)": "(it is transposed)",
    "def answer(s): return torch.softmax(s, -1).sum(-1)": "expected the shape (2, 2), yours is (2,)",
    "def answer(s): return torch.softmax(s, -1) * 2": "2 times the right value everywhere",
    "def answer(s): return torch.softmax(s, -1) > 0.5": "dtype bool",
    "def answer(s): return 'softmax'": "the str 'softmax'",
    "def answer(s): return (row for row in s)": "yours is a generator",
    "def answer(s): return {'rows': s}": "yours is a dict",
    "def answer(s): return [[1], [1, 2]]": "yours is a list",
    "def answer(s): return 1 / 0": "it raises ZeroDivisionError: division by zero, in line 2",
    "def answer(): return 1": "it raises TypeError",
    "def answer(s): return torch.softmax(s, -1)[:, :1]": "expected the shape (2, 2), yours is (2, 1)",
    "def answer(s): return 2j * torch.softmax(s, -1)": "yours is 0+0.53788j",
    "answer = 3": "pass the function itself, without calling it; the int 3 was given",
    "answer = [1.0]": "pass the function itself, without calling it; a list was given",
}


@pytest.mark.parametrize("source, said", WRONG.items())
def test_a_wrong_answer_is_told_what_is_wrong(softmax_rows, capsys, source, said):
    verdict = softmax_rows(learner(source))
    assert verdict.status == "wrong"
    assert said in verdict.message
    assert capsys.readouterr().out == f"softmax_rows is not right yet: {verdict.message}\n"


def test_the_place_and_both_values_are_named(softmax_rows):
    fix_one = "def answer(s):\n    s = torch.softmax(s, -1); s[1, 0] += 0.25; return s"
    assert softmax_rows(learner(fix_one)).message == (
        "with scores of shape (2, 2), first difference at [1, 0]: expected 0.5, yours is 0.75 (1 of 4 values differ)"
    )


@pytest.mark.parametrize(
    "source",
    [
        'def answer(s): raise NotImplementedError("your turn")',
        "def answer(s): ...",
        "def answer(s): return ...",
        "answer = None",
        "answer = ...",
    ],
)
def test_a_stub_is_not_attempted(softmax_rows, source):
    assert softmax_rows(learner(source)).status == "not attempted"
    assert results.progress() == {"softmax_rows": "not attempted"}


def test_a_forgotten_return_is_hinted_at(softmax_rows):
    assert "is the return missing?" in softmax_rows(learner("def answer(s): s.exp()")).message


def test_none_after_a_case_with_an_answer_is_wrong():
    @exercise
    def half(answer):
        return compare(answer, lambda n: n / 2, cases=[4, 5, 6], mistakes={"rounded": lambda n: n // 2})

    for ending in ("", "\n    return ...", "\n    return None"):
        verdict = half(learner("def answer(n):\n    if n % 2 == 0: return n / 2" + ending))
        returned = "Ellipsis" if "..." in ending else "None"
        assert (verdict.status, verdict.message.split(":")[0]) == ("wrong", f"with n = 5, it returns {returned}")
    assert half(learner("def answer(n):\n    if n > 4: return n / 2")).status == "not attempted"  # none before it
    assert half(learner("def answer(n): return n / 2")).status == "right"


def test_what_gives_its_parts_in_order_is_taken_for_a_list():
    @exercise
    def squares(answer):
        def right(n):
            return [i * i for i in range(n)]

        wrong = {"the last is missing": lambda n: right(n - 1), "one too many": lambda n: right(n + 1)}
        return compare(answer, right, cases=[3, 0, 4], mistakes=wrong)

    for way in (
        "return (i * i for i in range(n))",
        "yield from [i * i for i in range(n)]",
        "return {i: i * i for i in range(n)}.values()",
        "return {i * i: i for i in range(n)}.keys()",
        "return map(lambda i: i * i, range(n))",
    ):
        assert squares(learner("def answer(n): " + way)).status == "right"
        worse = squares(learner("def answer(n): " + way.replace("range(n)", "range(n + 1)")))
        assert (worse.status, worse.message) == ("wrong", "one too many")  # also for what can be read only once

    @exercise
    def apart(answer):
        return compare(answer, lambda n: (n, list(range(n))), cases=[3], mistakes={"from 1": lambda n: (n, [1, 2, 3])})

    assert apart(learner("def answer(n): return n, map(int, range(n))")).status == "right"
    assert apart(learner("def answer(n): return n, map(int, range(1, n + 1))")).message == "from 1"
    failing = squares(learner("def answer(n):\n    yield 0\n    yield n.nothing"))
    assert failing.status == "wrong" and failing.message.startswith("it raises AttributeError")
    for way, kind in (("{i: 1 for i in range(n)}", "a dict"), ("{i * i for i in range(n)}", "a set"), ("'014'", "str")):
        assert kind in squares(learner("def answer(n): return " + way)).message


def test_a_not_implemented_error_from_a_library_is_not_a_stub(softmax_rows):
    source = "def answer(s): return torch.nn.Module()(s)"  # torch raises NotImplementedError: no forward
    verdict = softmax_rows(learner(source))
    assert verdict.status == "wrong" and "NotImplementedError" in verdict.message


def test_an_exception_without_a_text_ends_with_its_name():
    assert told(ValueError("full")) == "ValueError: full"
    assert told(ValueError()) == "ValueError"


def test_bytes_are_told_so_that_they_can_be_given_again():
    @exercise
    def first(answer):
        return compare(answer, lambda block: block[0], cases=[bytes(range(1, 19))])

    said = "with block = bytes.fromhex('0102030405060708090a0b0c0d0e0f101112'), expected 1, yours is 5"
    assert first(learner("def answer(block): return 5")).message.startswith(said)


def test_line_and_source_of_an_exception_in_a_helper_are_shown(softmax_rows, tmp_path):
    path = tmp_path / "cell.py"
    path.write_text("def helper(s):\n    return s.nothing\n\ndef answer(s):\n    return helper(s)\n")
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    message = softmax_rows(namespace["answer"]).message
    assert message.startswith("it raises AttributeError") and message.endswith("in line 2: return s.nothing")


def test_one_case_that_fits_a_mistake_by_chance_does_not_name_it():
    @exercise
    def area(answer):
        return compare(answer, lambda a, b: a * b, cases=[(2, 2), (3, 5)], mistakes={"you added": lambda a, b: a + b})

    assert area(learner("def answer(a, b): return a + b")).message == "you added"
    # 2 * 2 = 2 + 2, so only the second case tells; a constant 4 fits both operations in the first
    assert area(learner("def answer(a, b): return 4")).message == "with a = 3, b = 5, expected 15, yours is 4"
    assert area(learner("def answer(a, b): return 0")).message == "with a = 2, b = 2, expected 4, yours is 0"


def test_a_mistake_that_is_not_defined_for_a_case_explains_nothing():
    @exercise
    def inverse(answer):
        return compare(answer, lambda x: 0.0 if x == 0 else 1 / x, cases=[0, 4], mistakes={"no": lambda x: 1 / x})

    assert inverse(learner("def answer(x): return 7.0")).message == "with x = 0, expected 0, yours is 7"


def test_the_answers_are_compared_as_they_were_returned():
    @exercise
    def double(answer):
        return compare(answer, lambda x: 2 * x, cases=[normal(3), normal(4)])

    reuse = "kept = torch.zeros(9)\ndef answer(x):\n    out = kept[:len(x)]; out.copy_(2 * x); return out"
    assert double(learner(reuse)).status == "right"


def test_a_case_can_make_its_arguments_anew():
    made = []

    @exercise
    def first(answer):
        return compare(answer, lambda box: box["x"], cases=[lambda: made.append(1) or ({"x": 5},)])

    assert first(learner("def answer(box): return box.pop('x')")).status == "right"
    assert len(made) == 2


def test_the_global_random_state_is_left_alone_and_answers_repeat(softmax_rows):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    source = "import random\ndef answer(s):\n    random.random(); np.random.rand(); return torch.randn(2, 2)"
    first, second = softmax_rows(learner(source)), softmax_rows(learner(source))
    assert first == second and first.status == "wrong"
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_an_answer_can_be_a_class_and_its_methods_may_fail():
    @exercise
    def counter(answer):
        box = answer(3)
        box.add(4)
        return diagnose(box.total, 7, mistakes={"add must keep what was there": 4})

    good = "class answer:\n    def __init__(self, n): self.total = n\n    def add(self, n): self.total += n"
    assert counter(learner(good)).status == "right"
    assert counter(learner(good.replace("+= n", "= n"))).message == "add must keep what was there"
    assert "it raises NameError" in counter(learner(good.replace("+= n", "+= m"))).message
    stub = good.replace("self.total += n", "raise NotImplementedError('your turn')")
    assert counter(learner(stub)).status == "not attempted"


def test_a_fault_of_the_checker_itself_is_raised():
    @exercise
    def broken(answer):
        answer(1)
        return [][0]

    with pytest.raises(IndexError):
        broken(learner("def answer(x): return x"))


def test_a_value_in_place_of_a_function_never_reaches_the_checker():
    @exercise
    def calls_at_once(answer):
        return None if answer(1.0) == 2.0 else "no"

    assert calls_at_once(3.0).message.startswith("pass the function itself")
    assert calls_at_once(lambda x: 2 * x).status == "right"


def test_an_exercise_can_ask_for_a_value():
    @exercise(value=True)
    def two(answer):
        return diagnose(answer, 2)

    assert two(2).status == "right"
    assert two(3).message.startswith("expected 2, yours is 3")


def test_an_exercise_can_ask_for_an_error():
    @exercise
    def refuses(answer):
        if not isinstance(error_of(answer, -1), ValueError):
            return "a negative length must raise ValueError"

    assert refuses(learner("def answer(n):\n    if n < 0: raise ValueError('n')")).status == "right"
    assert refuses(learner("def answer(n): return n")).message == "a negative length must raise ValueError"
    assert refuses(learner("def answer(n): raise KeyError(n)")).status == "wrong"


@pytest.mark.parametrize(
    "got, right",
    [
        (3, 3),
        (3.0, 3),
        (torch.tensor([3]), 3),
        (np.float32(0.1), 0.1),
        ([1, 2], torch.tensor([1, 2])),
        ((1, 2), [1, 2]),
        (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2])),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        ([True, False], torch.tensor([True, False])),
        ("yes", "yes"),
        (b"\xff", b"\xff"),
        ([torch.ones(2), torch.zeros(1)], (torch.ones(2), torch.zeros(1))),
        (np.array([1, 2]), (1, 2)),
        (torch.tensor([0.5, 2.0], requires_grad=True), (0.5, 2)),
        ({"k": [1.0]}, {"k": torch.tensor([1.00001])}),
        (torch.tensor([[-torch.inf, 0.0]]), np.array([[-np.inf, 0.0]])),
        (1e-9 * (1 + 1e-6), 1e-9),
        (torch.ones(0, 3), torch.ones(0, 3)),
        ([], torch.ones(0, 3)),  # an empty list has no shape to tell
        ((), torch.ones(0, 4, 2)),
        ([], torch.zeros(0, dtype=torch.int64)),
    ],
)
def test_same_values_in_another_form_are_right(got, right):
    assert diagnose(got, right) is None


@pytest.mark.parametrize(
    "got, right, said",
    [
        (4, 3, "expected 3, yours is 4"),
        (1_000_001, 1_000_000, "expected 1000000, yours is 1000001"),  # whole numbers are compared exactly
        (1_000_001.0, 1_000_000, "expected 1000000, yours is 1000001"),
        (2e-9, 1e-9, "yours is 2 times the right value"),  # small numbers are not all equal to 0
        ([1.0, 2.0], torch.tensor([1, 2]), "expected whole numbers (int64), yours holds floats"),
        (torch.tensor([1.5, 2]), [1, 2], "expected whole numbers (int64), yours has the dtype float32"),
        ([1, 0], [True, False], "expected True or False in the shape (2,), yours holds whole numbers"),
        (1, True, "expected True or False, yours is the int 1"),
        (torch.tensor([True, False]), [1.5, 0.5], "expected numbers in the shape (2,), yours has the dtype bool"),
        (torch.ones(3), torch.ones(3, 1), "expected the shape (3, 1), yours is (3,)"),
        ([], torch.ones(2, 3), "expected the shape (2, 3), yours is (0,)"),
        ([], torch.ones(2, 0), "expected the shape (2, 0), yours is (0,)"),
        (torch.ones(0), torch.ones(0, 3), "expected the shape (0, 3), yours is (0,)"),
        ("no", "yes", "expected 'yes', yours is the str 'no'"),
        (b"\xfe", b"\xff", r"expected b'\xff', yours is the bytes b'\xfe'"),
        ([255], b"\xff", r"expected b'\xff', yours is a list"),
        (b"a", "a", "expected 'a', yours is the bytes b'a'"),
        ((-8) ** (1 / 3), -2.0, "expected -2, yours is 1+1.7321j"),
        (1.0, (1.0, 2.0), "expected 2 values"),
        (np.ones(3), (1.0, 1.0), "expected 2 values, yours is 3"),
        (np.ones((2, 1)), (1.0, 1.0), "expected 2 values"),
        (torch.tensor([1.0, 3.0]), (1.0, 2.0), "value 2 of 2: expected 2, yours is 3"),
        (552960, 511488.0, "expected 511488, yours is 552960"),  # one format for both, not 5.1149e+05
        (0.5, 1_680_000, "expected 1680000, yours is 0.5"),
        (1e30, 2e6, "expected 2000000, yours is 1e+30"),
        ((1.0, None), (1.0, 2.0), "value 2 of 2 is None"),
        ((1.0, 3.0), (1.0, 2.0), "value 2 of 2: expected 2, yours is 3"),
        ({"v": 1}, {"k": 1}, "expected a dict with the keys ['k'], yours is ['v']"),
        ({"k": 2}, {"k": 1}, "under 'k': expected 1, yours is 2"),
        ([0.0, torch.nan], [0.0, 1.0], "yours is NaN at [1] (1 of 2 values differ)"),
        ([torch.inf, 1.0], [1.0, 1.0], "expected 1, yours is inf"),
        ([True, True], [True, False], "first difference at [1]: expected False, yours is True"),
        ([0.5, 1.0, 1.5], [1.0, 2.0, 3.0], "yours is 0.5 times the right value everywhere"),
        (np.array([1, 2], dtype=np.uint8), np.array([2, 1], dtype=np.uint8), "first difference at [0]"),
        (object(), 1.0, "expected a number, yours is an object"),
    ],
)
def test_the_difference_is_put_in_words(got, right, said):
    assert said in diagnose(got, right)


@pytest.mark.parametrize(
    "got, right, said",
    [
        (torch.ones(2), [True, False], "dtype float32; `.bool()` makes True and False of it"),
        (torch.ones(2, dtype=torch.bfloat16), [True, False], "dtype bfloat16; `.bool()` makes True and False of it"),
        (np.ones(2, np.float32), [True, False], "dtype float32; `.astype(bool)` makes True and False of it"),
        (torch.tensor([1.0, 2.0]), [1, 3], "dtype float32; `.long()` makes whole numbers of it"),
        (np.array([1.0, 2.0]), [1, 3], "dtype float64; `.astype(int)` makes whole numbers of it"),
        (torch.tensor([0.0, -torch.inf]), [True, False], "dtype float32"),  # .bool() would turn it around
        (torch.tensor([1.5, 2.0]), [1, 3], "dtype float32"),
        (torch.tensor([1.0, torch.inf]), [1, 3], "dtype float32"),
    ],
)
def test_a_dtype_is_the_learners_own_and_the_way_out_is_named_where_there_is_one(got, right, said):
    assert diagnose(got, right).endswith(said)


def test_numbers_are_told_with_enough_digits_to_differ():
    assert diagnose(1.0000001, 1.0, tolerance=1e-9) == "expected 1, yours is 1.0000001"


def test_tolerance_is_a_part_of_the_largest_value():
    right = [1000.0, 1.0]
    assert diagnose([1000.0, 1.05], right) is None  # 0.05 of 1000 is below 1e-4
    assert diagnose([1000.0, 1.05], right, tolerance=1e-5)
    assert diagnose(101, 100) and diagnose(101, 100, tolerance=0.02) is None
    assert diagnose(np.uint8(101), np.uint8(100), tolerance=0.02) is None


def test_mistakes_are_named_unless_they_give_the_right_answer():
    mistakes = {"the same": 6, "you added": 5, "wrong shape": torch.ones(2)}
    assert diagnose(5, 6, mistakes) == "you added"
    assert diagnose(6, 6, mistakes) is None
    assert diagnose([1.0, 1.0], 6, mistakes) == "wrong shape"
    assert diagnose(7, 6, mistakes) == "expected 6, yours is 7"


@pytest.mark.parametrize("stub", [None, ...])
def test_diagnose_knows_a_stub(stub):
    with pytest.raises(NotAttempted):
        diagnose(stub, 1)


def test_a_snapshot_shares_no_memory():
    original = {"a": [torch.ones(2), (np.ones(2), 3)]}
    copy = snapshot(original)
    copy["a"][0].zero_()
    copy["a"][1][0][:] = 0
    assert original["a"][0].sum() == 2 and original["a"][1][0].sum() == 2


def test_seeded_inputs_are_the_same_everywhere():
    assert torch.equal(normal(2, 3), normal(2, 3)) and not torch.equal(normal(3), normal(3, seed=1))
    assert normal(2).tolist() == pytest.approx(np.random.default_rng(0).standard_normal(2).tolist())


def test_exercises_are_found_by_name(softmax_rows):
    assert kvcourse.check.softmax_rows is softmax_rows
    assert "softmax_rows" in dir(kvcourse.check)
    with pytest.raises(AttributeError, match="did you mean softmax_rows"):
        kvcourse.check.softmax_row  # noqa: B018
    with pytest.raises(AttributeError, match="there are"):
        kvcourse.check.xyzzy  # noqa: B018


def test_every_exercise_of_the_course_is_reachable_by_its_name():
    for name in dir(kvcourse.check):
        if name not in ("progress", "reset"):  # no module of the folder may hide an exercise of the same name
            assert getattr(kvcourse.check, name) is framework.EXERCISES[name]


def test_two_exercises_of_one_name_are_refused(softmax_rows):
    def again(answer):
        return None

    again.__name__, again.__module__ = "softmax_rows", "kvcourse.check"
    with pytest.raises(ValueError, match="two exercises are called 'softmax_rows'"):
        exercise(again)


@pytest.fixture
def short_catalog(monkeypatch):
    part = {"softmax_rows": Effort(2, 7), "mask": Effort(1, 4)}
    monkeypatch.setattr(catalog, "CATALOG", {"97_attention": part, "98_cache": {"append": Effort(3, 10)}})


def test_progress_tells_what_is_done_and_how_long_the_rest_takes(softmax_rows, short_catalog, capsys):
    softmax_rows(learner(RIGHT["library"]))
    results.record_exercise("append", "wrong")
    capsys.readouterr()
    kvcourse.check.progress()
    assert capsys.readouterr().out.splitlines() == [
        "97_attention: 1 of 2 right, about 4 minutes left",
        "  ●●○  7 min  softmax_rows         right",
        "  ●○○  4 min  mask                 not attempted",
        "98_cache: 0 of 1 right, about 10 minutes left",
        "  ●●● 10 min  append               wrong",
        "In all: 1 of 3 right, about 14 minutes left",
    ]
    results.record_exercise("append", "right")
    kvcourse.check.progress("98")
    assert capsys.readouterr().out == "98_cache: 1 of 1 right\n  ●●● 10 min  append               right\n"


def test_what_was_right_once_stays_done(softmax_rows, short_catalog, capsys):
    for code, stands in (
        (RIGHT["library"], "right"),
        ("def answer(s): return s", "right (last try: wrong)"),
        ("def answer(s): ...", "right (last try: wrong)"),
        ("def answer(s): return s", "right (last try: wrong)"),
        (RIGHT["loop"], "right"),
    ):
        softmax_rows(learner(code))
        capsys.readouterr()
        kvcourse.check.progress("97")
        assert capsys.readouterr().out.splitlines()[:2] == [
            "97_attention: 1 of 2 right, about 4 minutes left",
            f"  ●●○  7 min  softmax_rows         {stands}",
        ]


@pytest.mark.parametrize("ask", [kvcourse.check.progress, kvcourse.check.reset])
def test_a_notebook_that_is_none_is_refused(ask):
    results.record_exercise("append", "right")
    with pytest.raises(
        ValueError, match="notebook='99' must be a number such as \"02\", or one of: 00_start_here, 01_n"
    ):
        ask("99")
    assert results.progress() == {"append": "right"}


def test_reset_forgets_the_exercises_of_a_notebook_or_all_and_nothing_else(short_catalog, capsys):
    results.predict("98.a", 3)
    for name in ("softmax_rows", "append"):
        results.record_exercise(name, "right")
    capsys.readouterr()
    kvcourse.check.reset("97")
    said = "Forgotten: how 1 of 2 exercises stood. Guesses and measurements stay.\n"
    assert capsys.readouterr().out == said
    assert results.progress() == {"append": "right"} and results.get("98.a").guess == 3
    kvcourse.check.reset()
    assert results.progress() == {} and results.get("98.a").guess == 3


def test_progress_survives_a_restart_and_needs_no_notebooks():
    kvcourse.check.append(learner("def answer(keys, new, length): return keys"))
    code = (
        "import sys, kvcourse as kv; kv.check.progress('02'); print('kvcourse.notebooks' in sys.modules); "
        "kv.check.reset('02')"
    )
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *lines, notebooks, forgotten = done.stdout.splitlines()
    assert first.startswith(f"02_kv_cache: 0 of {len(CATALOG['02_kv_cache'])} right, about ")
    assert [line.split()[3:] for line in lines[:2]] == [["append", "wrong"], ["bytes_copied", "not", "attempted"]]
    assert notebooks == "False" and forgotten.startswith("Forgotten: how 1 of 5 exercises stood.")
    assert results.progress() == {}


def test_a_damaged_file_is_kept_and_progress_begins_anew(short_catalog, capsys, tmp_path):
    results.record_exercise("append", "right")
    file = tmp_path / "results" / "results.json"
    file.write_text("{", encoding="utf-8")
    kvcourse.check.progress("98")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "results.json is damaged. It is kept as results.damaged-1.json, and a new one is begun." in first
    assert second == "98_cache: 0 of 1 right, about 10 minutes left"


def test_where_nothing_can_be_kept_verdicts_and_progress_are_told_all_the_same(
    softmax_rows, short_catalog, monkeypatch, capsys, tmp_path
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "file" / "results"))
    kvcourse.check.progress("98")
    assert capsys.readouterr().out.startswith("98_cache: 0 of 1 right")
    softmax_rows(learner(RIGHT["library"]))
    verdict, notice = capsys.readouterr().out.splitlines()
    assert verdict == "softmax_rows is right."
    assert notice.startswith("Results cannot be kept in ") and "set KVCOURSE_RESULTS to a folder" in notice
    kvcourse.check.progress("97")  # until the kernel ends
    assert capsys.readouterr().out.startswith("97_attention: 1 of 2 right")
    kvcourse.check.reset("97")
    kvcourse.check.progress("97")
    assert "97_attention: 0 of 2 right" in capsys.readouterr().out


def test_a_file_that_may_only_be_read_is_read_and_left_as_it_is(short_catalog, monkeypatch, capsys, tmp_path):
    results.record_exercise("append", "right")

    def forbidden(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(filelock.FileLock, "acquire", forbidden)
    kvcourse.check.progress("98")
    assert capsys.readouterr().out.startswith("98_cache: 1 of 1 right\n")
    kvcourse.check.reset("98")
    assert "Results cannot be kept in" in capsys.readouterr().out
    kvcourse.check.progress("98")
    assert capsys.readouterr().out.startswith("98_cache: 0 of 1 right")
    assert '"append": "right"' in (tmp_path / "results" / "results.json").read_text(encoding="utf-8")
