"""`kvcourse bench`: its numbers by hand, its turns by workers that only pretend, the whole command once for real."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from gguf_files import random_state, tiny_config, write_model

import kvcourse as kv
from kvcourse.bench import files, memory, race, report, rows, vllm_row
from kvcourse.bench.contestants import Dense
from kvcourse.bench.process import WorkerError
from kvcourse.bench.race import Race, Row, Sample, learn_facts
from kvcourse.cli import bench
from kvcourse.cli.main import main as kvcourse
from kvcourse.cli.main import make_parser
from kvcourse.roof import Ceilings

CEILINGS = Ceilings(flops_per_second=1e9, bytes_per_second=4000.0, device="cpu", dtype="float32")
PROMPT = list(range(5))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model file with room for all contexts: 2 layers, random weights."""
    config = tiny_config(max_seq_len=2048)
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", config, random_state(config)))


@pytest.fixture(autouse=True)
def no_long_work(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("kvcourse.roof.measure_ceilings", lambda: CEILINGS)
    yield
    signal.signal(signal.SIGTERM, before)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_peak_memory_sees_what_was_held_and_given_back():
    cpu = torch.device("cpu")
    memory.forget_peak(cpu)  # of the tests that this process ran before
    before = memory.peak_memory(cpu)
    held = torch.ones(100_000_000)  # 400 MB
    peak = memory.peak_memory(cpu)
    assert peak >= held.nbytes and peak > before
    del held
    assert memory.peak_memory(cpu) > peak - 50e6  # the system counts in lots
    if memory.forget_peak(cpu):
        assert memory.peak_memory(cpu) < peak - 300e6


# --- one worker --------------------------------------------------------------------------------------------------

STRANGE = """
import os, signal
from kvcourse.bench.contestants import Dense

class Chatty(Dense):
    title = "chatty"
    def generate(self, prompt, new_tokens):
        print("Setting pad_token_id")
        os.system("echo from a child")
        return super().generate(prompt, new_tokens)

class Wrong(Dense):
    title = "wrong"
    def generate(self, prompt, new_tokens):
        made = super().generate(prompt, new_tokens)
        if len(prompt) == 512:
            made.ids[1] = (made.ids[1] + 1) % 97
        return made

class Killed(Dense):
    title = "killed"
    def generate(self, prompt, new_tokens):
        os.kill(os.getpid(), signal.SIGKILL)

class Leaving(Dense):
    title = "leaving"
    def generate(self, prompt, new_tokens):
        os.system("echo the last words >&2")
        os._exit(7)

class Hungry(Dense):
    title = "hungry"
    def generate(self, prompt, new_tokens):
        raise MemoryError("cannot allocate\\nat line 5")

class Warming(Dense):
    title = "warming"  # it compiles something in each of its first two runs of a prompt of 5 tokens
    compilations, compile_seconds, left = 0, 0.0, 2
    def generate(self, prompt, new_tokens):
        if len(prompt) == 5 and self.left:
            self.left -= 1
            self.compilations += 1
            self.compile_seconds += 1.5
        return super().generate(prompt, new_tokens)

class Restless(Warming):
    title = "restless"
    left = 10**9

class Lossy(Wrong):
    title = "lossy"
    exact = False

class Absent(Dense):
    title = "absent"
    def __init__(self, name):
        raise RuntimeError("it is not installed: pip install it")
"""


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """Contestants that misbehave, where the processes of workers find them too."""
    folder = tmp_path_factory.mktemp("strange")
    (folder / "strange_contestants.py").write_text(STRANGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)
        import strange_contestants

        yield strange_contestants


@pytest.fixture
def worker(tiny, strange):
    started = []

    def start(contestant):
        started.append(contestant.start(tiny))
        return started[-1]

    yield start
    for one in started:
        one.close()
        assert one.process.returncode is not None


def test_a_worker_answers_and_what_libraries_print_does_not_disturb(worker, strange, tiny):
    chatty = worker(strange.Chatty)
    about = chatty.answer()
    assert (about["program"], about["weights"], about["device"]) == ("kvcourse", "float32", "cpu")
    assert about["reason"] is None
    answer = chatty.ask(measure="speed", prompt=PROMPT, most_gaps=4)
    model = kv.load_model(tiny).model
    assert answer["tokens"] == kv.generate(model, PROMPT, 5).ids and len(answer["arrivals"]) == 5
    assert answer["step_bytes"] == kv.bytes_moved(model.config, 1, 5, bits=32).total
    assert answer["peak_bytes"] > 1e6 and answer["compilations"] == 0
    assert chatty.ask(measure="lead", prompt=PROMPT)["lead"] > 0
    assert chatty.ask(measure="perplexity") == {"perplexity": None}  # it has no tokenizer


def test_facts_are_the_models_numbers_and_a_text(tiny):
    facts = learn_facts(tiny)
    assert (facts["vocab_size"], facts["max_seq_len"]) == (97, 2048)
    assert (facts["device"], facts["dtype"], facts["rounded"]) == ("cpu", "float32", None)
    assert len(facts["text"]) == 2000 and len(set(facts["text"])) == 97
    assert learn_facts(tiny) == facts
    lm = kv.load_model("tiny-gqa")
    assert learn_facts("tiny-gqa")["text"] == lm.encode(kv.evaluation_text())[:2000]


def test_a_run_in_which_something_is_compiled_is_no_measurement(worker, strange):
    warming = worker(strange.Warming)
    warming.answer()
    first, second = (warming.ask(measure="speed", prompt=PROMPT, most_gaps=4) for _ in range(2))
    assert [answer["compilations"] for answer in (first, second)] == [2, 2]  # all in runs before the measured one
    assert second["compile_seconds"] == 3.0 and first["tokens"] == second["tokens"]
    restless = worker(strange.Restless)
    restless.answer()
    with pytest.raises(WorkerError, match="it compiled something in each of 4 runs of the same text"):
        restless.ask(measure="speed", prompt=PROMPT, most_gaps=4)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Killed", r"its process was killed, most often for want of memory"),
        ("Leaving", r"its process ended with exit code 7: the last words"),
        ("Hungry", r"^MemoryError: cannot allocate$"),
        ("Absent", r"^it is not installed: pip install it$"),
    ],
)
def test_why_a_worker_could_not_go_on(worker, strange, name, cause):
    one = worker(getattr(strange, name))
    with pytest.raises(WorkerError, match=cause):
        one.answer()
        one.ask(measure="speed", prompt=PROMPT, most_gaps=4)
    with pytest.raises(WorkerError):
        one.ask(measure="speed", prompt=PROMPT, most_gaps=4)


def test_a_file_of_the_current_folder_is_not_taken_for_a_library(worker, tmp_path, monkeypatch):
    (tmp_path / "tokenizers.py").write_text('print("hello")')
    monkeypatch.chdir(tmp_path)
    assert worker(Dense).answer()["program"] == "kvcourse"


def test_a_library_that_prints_when_imported_does_not_disturb(worker, tmp_path, monkeypatch):
    (tmp_path / "safetensors.py").write_text('print("hello")\nraise ImportError("nothing in here")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerError, match="^ImportError: nothing in here$"):
        worker(Dense).answer()


@pytest.mark.parametrize("said", ["hello", "3", r"\xff\xfe"])
def test_what_is_no_answer_is_the_end_of_one_row_only(worker, tmp_path, monkeypatch, said):
    """Before anything of the course runs, `sitecustomize` of the learner's own Python may print."""
    (tmp_path / "sitecustomize.py").write_text(f"import os; os.write(1, b'{said}\\n')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerError, match="^its process said something that is no answer: ."):
        worker(Dense).answer()


def test_a_worker_ends_with_the_one_who_started_it(worker):
    one = worker(Dense)
    one.answer()
    one.process.stdin.close()
    assert one.process.wait(timeout=60) == 0


# --- turns, by workers that only pretend -------------------------------------------------------------------------


@pytest.fixture
def pretend():
    """Workers without a process: `pretend(a=..., b=...)` makes a race of rows whose answers come from functions
    `prompt -> tokens`; those named in `lossy` are not exact. The race remembers who was asked what in `race.asked`."""

    def make(rounds=1, most_gaps=4, max_seq_len=4096, lossy=(), **rows):
        asked = []

        class Pretender:
            def __init__(self, title):
                self.title, self.tokens = title, rows[title]

            def answer(self):
                if self.tokens is None:
                    raise WorkerError("it is not installed")
                return {"program": self.title, "means": "", "peak_without_loading": True}

            def ask(self, measure, prompt=(), most_gaps=0):
                asked.append((self.title, len(prompt), measure))
                if measure != "speed":
                    return {"lead": 0.25, "perplexity": 9.0}
                tokens = self.tokens(prompt)
                arrivals = [float(i + 1) for i in range(len(tokens))]
                return {"tokens": tokens, "arrivals": arrivals, "step_bytes": 1000, "peak_bytes": len(asked)}

            def close(self):
                asked.append((self.title, "closed"))

        def row(title):
            start = staticmethod(lambda model: Pretender(title))
            return type(title, (), {"title": title, "exact": title not in lossy, "texts": 1, "start": start})

        facts = {"max_seq_len": max_seq_len, "vocab_size": 9, "text": [i % 9 for i in range(2000)]}
        made = Race([row(title) for title in rows], "a model", facts, rounds, most_gaps)
        made.asked = asked
        return made

    return make


def same(prompt):
    return [7, 3, 3]


def fails(prompt):
    raise WorkerError("out of memory")


def test_rows_take_turns_and_another_begins_each_round(pretend):
    three = pretend(rounds=3, a=same, b=same, c=same)
    three.run()
    assert three.contexts == [0, 512, 2000]
    order = [entry[0] for entry in three.asked if entry[1] == 512]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [entry[1] for entry in three.asked if entry[0] == "a"] == [1, 512, 2000] * 3 + [0, "closed"]
    assert [entry for entry in three.asked if entry[2:] == ("perplexity",)] == [(t, 0, "perplexity") for t in "abc"]
    assert {row.perplexity for row in three.rows} == {9.0}
    assert {len(row.samples) for row in three.rows} == {9}
    assert [sample.round for sample in three.rows[0].samples] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert three.differences == []


@pytest.mark.parametrize(("limit", "contexts"), [(2004, [0, 512, 2000]), (2003, [0, 512]), (515, [0]), (5, [0])])
def test_contexts_that_the_model_has_no_room_for_are_left_out(pretend, limit, contexts):
    one = pretend(max_seq_len=limit, a=same)
    one.run()
    assert one.contexts == contexts


def test_a_model_too_short_for_anything(pretend):
    with pytest.raises(RuntimeError, match="has a context of 4 tokens: too short"):
        pretend(max_seq_len=4, a=same).run()


def test_a_row_that_fails_says_so_and_the_others_go_on(pretend):
    some = pretend(rounds=2, absent=None, a=same, late=lambda prompt: fails(prompt) if len(prompt) == 2000 else [7])
    some.run()
    assert [row.error for row in some.rows] == ["it is not installed", None, "out of memory"]
    assert [len(row.samples) for row in some.rows] == [0, 6, 2]
    assert [entry for entry in some.asked if entry[1] == "closed"] == [(t, "closed") for t in ("late", "a", "absent")]


def test_nobody_left_is_an_error_and_workers_are_closed(pretend):
    none = pretend(a=None, b=None)
    with pytest.raises(RuntimeError, match="^Nothing could be measured: it is not installed$"):
        none.run()
    assert none.asked == [("b", "closed"), ("a", "closed")]
    later = pretend(a=fails, b=fails)
    with pytest.raises(RuntimeError, match="^Nothing could be measured: out of memory$"):
        later.run()
    assert later.asked[-2:] == [("b", "closed"), ("a", "closed")]


def test_a_row_with_other_tokens_is_found_with_place_and_lead(pretend):
    rows = pretend(
        naive=lambda prompt: [7, 3],
        dense=lambda prompt: [7, 3, 3, 5],
        peer=lambda prompt: [7, 3, 3, 4] if len(prompt) == 512 else [7, 3, 3],  # beyond what naive wrote
        wrong=lambda prompt: [1],
    )
    rows.run()
    found = [(d.title, d.other, d.context, d.place, d.token, d.other_token, d.lead) for d in rows.differences]
    assert found == [
        ("wrong", "dense", 0, 0, 1, 7, 0.25),
        ("peer", "dense", 512, 3, 4, 5, 0.25),
        ("wrong", "dense", 512, 0, 1, 7, 0.25),
        ("wrong", "dense", 2000, 0, 1, 7, 0.25),
    ]
    assert ("dense", 512 + 3, "lead") in rows.asked  # the lead after the tokens that both agree on
    assert {d.wrong for d in rows.differences} == {True}


def test_a_row_of_other_numbers_may_differ_and_is_held_against_the_exact_ones(pretend):
    """It stands before them in the table, and they are not held against it."""
    rows = pretend(lossy=["int8", "int4"], int8=lambda prompt: [7, 4], dense=same, int4=lambda prompt: [7, 4, 4])
    rows.run()
    found = [(d.title, d.other, d.context, d.place, d.wrong) for d in rows.differences]
    assert found == [(row, "dense", n, 1, False) for n in (0, 512, 2000) for row in ("int8", "int4")]
    alone = pretend(lossy=["int8", "int4"], int8=lambda prompt: [7, 4], int4=same)
    alone.run()
    assert [(d.title, d.other, d.wrong) for d in alone.differences] == [("int4", "int8", False)] * 3


def test_a_row_that_changes_its_mind_between_rounds_is_found(pretend):
    answers = iter([[7], [7], [7], [7], [8], [7]])
    unsteady = pretend(rounds=2, a=lambda prompt: next(answers))
    unsteady.run()
    assert [(d.title, d.other, d.context) for d in unsteady.differences] == [("a", "a", 512)]


# --- numbers and text --------------------------------------------------------------------------------------------


def sample(context, arrivals, number=0, peak=1):
    return Sample(context, number, [1] * len(arrivals), arrivals, step_bytes=100, peak_bytes=peak)


def finished(*rows, contexts=(0, 512), rounds=3, differences=()):
    """A race that has been run, by hand."""
    made = Race([], "a model", {"device": "cpu", "dtype": "float32", "rounded": None}, rounds, 16)
    made.rows, made.contexts, made.differences = list(rows), list(contexts), list(differences)
    about = {"program": "kvcourse", "means": "writes", "weights": "float32", "peak_without_loading": True}
    for row in made.rows:
        row.about = {} if row.error == "never began" else about | row.about
    return made


def rows_by_hand():
    """Dense waits 2, 1 and 4 s for the first token at 512; its gaps there are 0.1 s, 0.2 s, 0.125 s in the median."""
    dense = [
        sample(512, [2.0, 2.1, 2.9, 3.0], 0),  # gaps 0.1, 0.8, 0.1
        sample(512, [1.0, 1.2], 1, peak=300_000_000),
        sample(512, [4.0, 4.125], 2, peak=200_000_000),
        sample(0, [0.5, 1.0], 0),
    ]
    return Row("dense", samples=dense), Row("peer", error="it is not installed", samples=[])


def test_numbers_by_hand():
    told = report.make_report(finished(*rows_by_hand()), CEILINGS, quick=False)
    dense, peer = told["rows"]
    assert dense["ttft"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    at_0, at_512 = dense["decode"]
    assert at_512["tokens_per_second"] == pytest.approx({"median": 8.0, "low": 5.0, "high": 10.0})
    assert at_512["bound"] == 40 and at_512["step_bytes"] == 100  # 4000 bytes a second, 100 bytes a step
    assert at_512["share"] == pytest.approx(0.2)
    assert at_0["tokens_per_second"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert dense["peak_bytes"] == 300_000_000
    assert peer["error"] == "it is not installed" and peer["ttft"] is None and peer["peak_bytes"] is None
    assert [cell["share"] for cell in peer["decode"]] == [None, None]
    assert (told["schema"], told["model"], told["contexts"], told["ttft_context"]) == (2, "a model", [0, 512], 512)
    assert told["ceilings"]["bytes_per_second"] == 4000 and told["environment"]["torch"] == torch.__version__
    assert json.loads(json.dumps(told)) == told


def test_table_shows_the_numbers_and_fits_the_screen():
    shown = report.text(report.make_report(finished(*rows_by_hand()), CEILINGS, quick=False))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 120
    row = next(i for i, line in enumerate(lines) if line.startswith("dense"))
    assert lines[row].split() == "dense 2.00 s 2.00 (5%) 8.00 (20%) 0.30 GB".split()
    assert lines[row + 1].split() == "1.00 s to 4.00 s 2.00 to 2.00 5.00 to 10.0".split()
    assert lines[row + 2].split() == "peer not measured: it is not installed".split()
    assert "left out: 2,000," in shown and "Medians of 3 rounds" in shown
    assert "same tokens" not in shown and "quick" not in shown  # one row alone proves nothing


def test_many_texts_at_once_count_together():
    """16 texts, a gap of 0.5 s: 32 tokens a second. 100 bytes serve a step of all of them: at most 640 a second."""
    batch = Row("paged batch", samples=[sample(0, [0.5, 1.0])], texts=16)
    (row,) = report.make_report(finished(batch, contexts=[0]), CEILINGS, quick=False)["rows"]
    (cell,) = row["decode"]
    assert row["texts"] == 16 and cell["tokens_per_second"]["median"] == 32
    assert cell["bound"] == 640 and cell["share"] == pytest.approx(0.05)


def with_quality(title, perplexity, exact=True, **about):
    return Row(title, about, [sample(0, [0.5, 1.0])], exact=exact, perplexity=perplexity)


def test_perplexity_is_told_with_its_ratio_to_the_exact_rows():
    rows = with_quality("int8", 20.1, exact=False), with_quality("dense", 20.0), with_quality("peer", None)
    told = report.make_report(finished(*rows, contexts=[0], rounds=1), CEILINGS, quick=False)
    ratios = [row["perplexity_over_exact"] for row in told["rows"]]
    assert ratios == [pytest.approx(1.005), 1.0, None]
    shown = {line.split()[0]: line for line in report.text(told).splitlines() if line}
    assert shown["int8"].endswith("20.10 (+0.5%)") and shown["dense"].endswith("  20.00")
    assert shown["peer"].endswith(" GB")
    alone = report.make_report(finished(rows[0], contexts=[0], rounds=1), CEILINGS, quick=False)
    assert alone["rows"][0]["perplexity_over_exact"] is None and "20.10\n" in report.text(alone)


def test_a_file_that_was_rounded_before_is_told():
    told = finished(with_quality("dense", 20.0), contexts=[0])
    assert "rounding them once more" not in report.text(report.make_report(told, CEILINGS, quick=False))
    told.facts["rounded"] = "Q4_1"
    shown = " ".join(report.text(report.make_report(told, CEILINGS, quick=False)).split())
    assert "The model's file keeps them in Q4_1: rounding them once more comes on top of that." in shown


def test_what_was_compiled_is_told_and_what_was_not():
    fast, plain = with_quality("compiled", 20.0), with_quality("dense", 20.0)
    slow = with_quality("int8", 20.0, exact=False, reason="There is no compiler.")
    fast.samples[-1].compilations, fast.samples[-1].compile_seconds = 3, 41.5
    told = report.make_report(finished(fast, plain, slow, contexts=[0]), CEILINGS, quick=False)
    assert [(row["compilations"], row["compile_seconds"]) for row in told["rows"]] == [(3, 41.5), (0, 0.0), (0, 0.0)]
    shown = " ".join(report.text(told).split())
    assert "compiled: 3 compilations took 41.5 s before the clock started; none came later." in shown
    assert "int8: nothing is compiled. There is no compiler." in shown
    assert "dense: 0" not in shown and "dense: nothing" not in shown


def test_one_quick_round_shows_no_ranges_and_says_it_is_rough():
    both = [Row(title, samples=[sample(0, [0.5, 1.0])]) for title in ("naive", "dense")]
    shown = report.text(report.make_report(finished(*both, contexts=[0], rounds=1), CEILINGS, quick=True))
    assert " to 2.00" not in shown and "Medians" not in shown
    assert "the numbers are rough" in shown and "All rows wrote the same tokens." in shown
    assert "naive" in shown and next(line for line in shown.splitlines() if line.startswith("naive")).split()[1] == "-"


def test_different_tokens_are_told_with_place_and_lead():
    both = [Row(title, samples=[sample(0, [0.5, 1.0])]) for title in ("naive", "dense")]
    one = race.Difference("dense", "naive", 0, 4, 77, 12, 0.0031)
    shown = report.text(report.make_report(finished(*both, contexts=[0], differences=[one]), CEILINGS, quick=False))
    joined = " ".join(shown.split())
    assert "DIFFERENT TOKENS: dense wrote 77 where naive wrote 12, at context 0, new token 5;" in joined
    assert "ahead of the second best by 0.0031 logits" in joined and "same tokens" not in joined


def test_parting_of_rows_with_other_numbers_is_told_row_by_row():
    three = [with_quality(title, None, exact=title != "int8") for title in ("naive", "dense", "int8")]
    parting = [race.Difference("int8", "naive", n, 6, 77, 12, lead, False) for n, lead in ((0, 0.031), (512, None))]
    shown = report.text(report.make_report(finished(*three, contexts=[0], differences=parting), CEILINGS, quick=False))
    joined = " ".join(shown.split())
    assert "The same tokens were written by naive, dense." in joined and "DIFFERENT" not in joined
    assert (
        "may write other tokens: int8 wrote others than naive at context 0 from new token 7 on (lead 0.031), " in joined
    )
    assert "(lead 0.031), at context 512 from new token 7 on. lead: by how many logits" in joined


def test_the_widest_table_fits_the_screen():
    """All titles, four figures before the point, ranges, everything at hand."""
    titles = [row.title for row in rows.COURSE + rows.PEERS] + vllm_row.TITLES
    wide = [1.0, 1.0 + 1 / 12345.6]
    several = [
        Row(title, samples=[sample(n, wide, i, 10**11) for n in (0, 512, 2000) for i in range(3)], perplexity=12345.678)
        for title in titles
    ]
    for row in several:
        row.exact, row.about = False, {"program": f"{row.title} 2026.10.12345"}
    several[0].exact = True
    made = report.make_report(finished(*several, contexts=(0, 512, 2000)), CEILINGS, quick=False)
    for row in made["rows"]:
        row["perplexity_over_exact"] = 1.234
        for cell in row["decode"]:
            cell["share"] = 1.01
    lines = report.text(made).splitlines()
    assert max(map(len, lines)) <= 120 and all(line == line.rstrip() for line in lines)
    first = next(line for line in lines if line.startswith("naive"))
    assert first.split() == ["naive", "1.00", "s", *["12,346", "(101%)"] * 3, "100.00", "GB", "12345.68"]
    assert "12345.68 (+23.4%)" in next(line for line in lines if line.startswith("transformers static  "))


def test_memory_note_says_when_loading_is_counted():
    assert "while it wrote" in report.memory_note("cpu", without_loading=True)
    assert "loading included" in report.memory_note("cpu", without_loading=False)
    assert "PyTorch's tensors" in report.memory_note("cuda:0", without_loading=True)


@pytest.mark.parametrize(
    ("function", "value", "written"),
    [
        (report.number, 1234.5, "1,234"),
        (report.number, 28.06, "28.1"),
        (report.number, 0.2169, "0.217"),
        (report.seconds, 0.0224, "22.4 ms"),
        (report.seconds, 1.15, "1.15 s"),
        (report.percent, 1.1, "110%"),
        (report.percent, 0.0074, "0.74%"),
    ],
)
def test_numbers_are_written_with_three_digits(function, value, written):
    assert function(value) == written


def test_one_thread_is_no_threads():
    where = {"device": "cpu", "device_name": "a processor", "dtype": "float32", "torch": "2"}
    headings = [
        report.heading({"model": "m", "rows": [], "environment": where | {"threads": threads}}) for threads in (1, 2)
    ]
    assert "processor, 1 thread (" in headings[0] and "processor, 2 threads (" in headings[1]


# --- files -------------------------------------------------------------------------------------------------------


def a_report(**changes):
    return report.make_report(finished(*rows_by_hand()), CEILINGS, quick=False) | changes


def test_both_files_are_written_and_a_second_time_replaced(tmp_path):
    folder = files.writable(tmp_path / "a" / "b")
    json_file, png_file = folder / "bench.json", folder / "bench.png"
    assert files.save(a_report(), folder) == [f"Written: {json_file}", f"Written: {png_file}"]
    assert json.loads(json_file.read_text())["model"] == "a model"
    assert png_file.read_bytes().startswith(b"\x89PNG")
    png_file.unlink()
    assert files.save(a_report(model="modèle"), files.writable(folder)) == [
        f"Replaced: {json_file}",
        f"Written: {png_file}",
    ]
    assert json.loads(json_file.read_text())["model"] == "modèle"
    assert sorted(folder.iterdir()) == [json_file, png_file]


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert files.writable(Path("~/results")) == tmp_path / "results"
    assert (tmp_path / "results").is_dir()
    with pytest.raises(ValueError, match="No results can be saved in ~nobodyhere"):
        files.writable(Path("~nobodyhere/x"))


def blocked(monkeypatch, tmp_path):
    """Stands in for a folder without permission to write, which the superuser never meets."""

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda patch, folder: (folder / "bench.json").mkdir(), r"bench\.json is there and cannot be replaced: move"),
        (lambda patch, folder: (folder / "bench.png").symlink_to("nowhere"), r"bench\.png is there and cannot be"),
        (blocked, r"No results can be saved in .* \(Permission denied\): give another folder"),
    ],
    ids=["a folder in the way", "a link to nothing", "read-only"],
)
def test_a_folder_that_cannot_be_used_is_refused(prepare, message, tmp_path, monkeypatch):
    prepare(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=message):
        files.writable(tmp_path)


# --- the whole command -------------------------------------------------------------------------------------------


PLAIN = "naive,dense,transformers,transformers static"


def test_the_whole_command(tiny, tmp_path, capsys, monkeypatch):
    measured = [Ceilings(1e9, 3000.0, "cpu", "float32"), CEILINGS]  # before and after: the higher one counts
    monkeypatch.setattr("kvcourse.roof.measure_ceilings", lambda: measured.pop(0))
    assert kvcourse(["bench", tiny, "--quick", "--peers", "--only", PLAIN, "--output", str(tmp_path / "new")]) == 0
    shown = capsys.readouterr().out
    assert "All rows wrote the same tokens." in shown
    assert shown.endswith("".join(f"Written: {tmp_path / 'new' / name}\n" for name in ("bench.json", "bench.png")))
    stored = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert [row["title"] for row in stored["rows"]] == PLAIN.split(",")
    assert [row["error"] for row in stored["rows"]] == [None] * 4
    assert stored["rows"][2]["program"].startswith("transformers 5")
    gaps = [[len(sample["arrivals"]) - 1 for sample in row["samples"]] for row in stored["rows"]]
    assert gaps == [[4, 2, 2], [4, 4, 4], [4, 4, 4], [4, 4, 4]]
    config = tiny_config(max_seq_len=2048)
    for row in stored["rows"]:
        for cell in row["decode"]:
            step = kv.bytes_moved(config, 1, max(cell["context"], 1), bits=32).total
            assert cell["step_bytes"] == step
            assert cell["bound"] == CEILINGS.bytes_per_second / step
            assert cell["share"] == cell["tokens_per_second"]["median"] / cell["bound"]
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_and_missing_rows_make_the_command_fail_and_nothing_is_written(
    tiny, strange, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rows, "COURSE", [Dense])
    monkeypatch.setattr(rows, "PEERS", [strange.Wrong, strange.Absent])
    assert kvcourse(["bench", tiny, "--quick", "--peers"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "DIFFERENT TOKENS: wrong wrote" in shown and "at context 512, new token 2;" in shown
    assert "absent not measured: it is not installed: pip install it" in shown
    assert list(tmp_path.iterdir()) == []


def test_other_tokens_of_a_row_with_other_numbers_are_told_and_no_failure(tiny, strange, capsys, monkeypatch):
    monkeypatch.setattr(rows, "COURSE", [Dense, strange.Lossy])
    assert kvcourse(["bench", tiny, "--quick"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "may write other tokens: lossy wrote others than dense at context 512 from new token 2 on (lead " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds=0 must be a whole number of at least 1"),
        (["nosuchmodel"], "no model 'nosuchmodel'"),
        (
            ["--only", "dense,nobody"],
            "--only dense,nobody: there is no row 'nobody'. The rows are naive, dense",
        ),
        (["--only", "llama.cpp"], "there is no row 'llama.cpp'. The rows are naive"),
        (["--weights", "int8"], "--weights belongs to --serving"),
        (["--vllm", sys.executable], "is a Python without vLLM"),
        (["no/such/model.gguf"], "no file or folder"),
        (["--output", __file__], "is a file, and results are saved in a folder"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("kvcourse.roof.measure_ceilings", lambda: pytest.fail("work was begun"))
    assert kvcourse(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_told_before_anything_is_measured(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "short.gguf").write_bytes(Path(tiny).read_bytes()[:-100])
    monkeypatch.setattr("kvcourse.roof.measure_ceilings", lambda: pytest.fail("work was begun"))
    monkeypatch.setattr(Race, "run", lambda self: pytest.fail("work was begun"))
    assert kvcourse(["bench", str(tmp_path / "short.gguf")]) == 1
    error = capsys.readouterr().err
    assert "kvcourse: Nothing could be measured: " in error and "short.gguf is" in error.splitlines()[-1]


@pytest.fixture
def measured(monkeypatch):
    """A race that is over as soon as it begins, with the rows made by hand."""
    monkeypatch.setattr("kvcourse.lm.find_model", lambda name: None)
    monkeypatch.setattr(race, "learn_facts", lambda name: {"device": "cpu", "dtype": "float32", "rounded": None})

    def run(self):
        ready = finished(*rows_by_hand())
        self.rows, self.contexts = ready.rows, ready.contexts

    monkeypatch.setattr(Race, "run", run)


def test_files_are_written_before_anything_is_printed(measured, tmp_path, monkeypatch):
    """`kvcourse bench ... | head -1` reads no further than the first line."""

    def gone(text):
        raise BrokenPipeError

    monkeypatch.setattr(sys.stdout, "write", gone)
    with pytest.raises(BrokenPipeError):
        bench.main(make_parser().parse_args(["bench", "m", "--output", str(tmp_path)]))
    assert json.loads((tmp_path / "bench.json").read_text())["model"] == "m"
    assert (tmp_path / "bench.png").exists()


def test_the_table_is_printed_even_when_the_disk_is_full(measured, tmp_path, capsys, monkeypatch):
    def full(report, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save", full)
    assert kvcourse(["bench", "m", "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "peer" in shown.out and "TTFT" in shown.out and "No space left" in shown.err


def test_a_letter_that_the_terminal_lacks_is_printed_as_an_escape(measured, tmp_path, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    kvcourse(["bench", "modèle", "--output", str(tmp_path)])
    narrow.flush()
    assert narrow.buffer.getvalue().startswith(rb"mod\xe8le in float32")
    assert json.loads((tmp_path / "bench.json").read_text())["model"] == "modèle"


def test_ctrl_c_ends_the_workers_too(tiny):
    code = (
        "import signal, sys, kvcourse.roof as roof; from kvcourse.cli.main import main;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # whoever started the tests may ignore it
        "roof.measure_ceilings = lambda: roof.Ceilings(1.0, 1.0, 'cpu', 'float32');"
        f"sys.exit(main(['bench', {tiny!r}, '--rounds', '100000', '--only', 'naive,dense']))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    workers = []
    try:
        deadline = time.monotonic() + 120
        while len(workers) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
            workers = psutil.Process(command.pid).children(recursive=True)
        assert len(workers) == 2 and all("kvcourse.bench.worker" in one.cmdline() for one in workers)
        os.kill(command.pid, signal.SIGINT)
        output, _ = command.communicate(timeout=60)
        assert command.returncode == 130 and "Traceback" not in output
        assert not any(one.is_running() for one in workers)
    finally:
        for one in (command, *workers):
            with suppress(psutil.NoSuchProcess):
                one.kill()
