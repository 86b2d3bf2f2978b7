"""`kvcourse bench --serving`: its numbers by hand, its turns by ways that only pretend, the whole command for real."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from reference import small_config, small_model

import kvcourse as kv
from kvcourse.bench import load, serving, serving_report, steps, vllm_row
from kvcourse.bench.batches import Batches, EngineBatch, StaticBatch, make_engine, prompts_of, vllm_rows
from kvcourse.bench.race import Row, WorkerError
from kvcourse.bench.vllm_row import VLLM, require_vllm
from kvcourse.cli.main import main as kvcourse

MODEL = small_model(dtype=torch.float64)
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


# --- ways of answering a batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [EngineBatch, StaticBatch])
def test_a_way_makes_the_tokens_of_solo_runs(way):
    tokens, seconds = way(MODEL).write(PROMPTS, 5)
    assert tokens == [kv.generate(MODEL, prompt, 5).ids for prompt in PROMPTS]
    assert seconds > 0


def test_the_engine_of_a_batch_has_exactly_the_pages_it_needs():
    engine = make_engine(MODEL, [[0] * 10, [0] * 17], new_tokens=8)  # 17 and 24 tokens are stored
    assert engine.num_blocks == 2 + 2
    assert make_engine(MODEL, [[0] * 10], new_tokens=7).num_blocks == 1  # 16 tokens


def test_prompts_are_different_pieces_of_the_text():
    lm = kv.load_model("tiny-gqa")
    prompts = prompts_of(lm, 16, 12)
    text = lm.encode(kv.evaluation_text())
    assert len({tuple(prompt) for prompt in prompts}) == 16 and {len(prompt) for prompt in prompts} == {12}
    assert all(any(text[i : i + 12] == prompt for i in range(len(text))) for prompt in prompts)
    assert prompts == prompts_of(lm, 16, 12) != prompts_of(lm, 16, 12, seed=1)


def test_prompts_of_a_model_without_a_tokenizer_are_ids():
    silent = kv.LM(MODEL, None, "silent")
    prompts = prompts_of(silent, 3, 5)
    assert {len(prompt) for prompt in prompts} == {5} and len({tuple(prompt) for prompt in prompts}) == 3
    assert all(0 <= token < MODEL.config.vocab_size for prompt in prompts for token in prompt)


# --- turns -------------------------------------------------------------------------------------------------------


class Pretender:
    """Answers at once, and says how long it took: the next of `seconds`. `tokens` are what it makes for a prompt."""

    program, means = "none", "pretends"

    def __init__(self, title, seconds, tokens=lambda prompt, n: [prompt[0]] * n):
        self.title, self.seconds, self.tokens, self.asked = title, iter(seconds), tokens, []

    def write(self, prompts, new_tokens):
        self.asked.append((len(prompts), new_tokens))
        warming_up = len(self.asked) % 2
        return [self.tokens(prompt, new_tokens) for prompt in prompts], 99.0 if warming_up else next(self.seconds)


def race(*ways, sizes=(4, 2), new_tokens=6, rounds=1):
    batches = Batches(PROMPTS, list(sizes), new_tokens, rounds)
    batches.run(list(ways))
    return batches


def test_speeds_and_ratios_by_hand():
    """24 tokens in 2, 3 and 4 s against 4, 9 and 4 s: ratios 2, 3 and 1, round by round."""
    found = race(Pretender("engine", [2, 3, 4]), Pretender("other", [4, 9, 4]), sizes=[4], rounds=3).summary()
    engine, other = (row["batches"][0] for row in found)
    assert engine["tokens_per_second"] == {"median": 8, "low": 6, "high": 12}
    assert engine["engine_over_this"] == {"median": 1, "low": 1, "high": 1}
    assert other["tokens_per_second"] == {"median": 6, "low": 24 / 9, "high": 6}
    assert other["engine_over_this"] == {"median": 2, "low": 1, "high": 3}
    assert [row["error"] for row in found] == [None, None]


def test_each_measured_run_follows_a_short_one_that_is_not_measured():
    engine = Pretender("engine", [1, 1])
    race(engine)
    assert engine.asked == [(4, 4), (4, 6), (2, 4), (2, 6)]


def test_another_way_begins_each_round():
    order = []

    class Noted(Pretender):
        def write(self, prompts, new_tokens):
            order.append(self.title)
            return super().write(prompts, new_tokens)

    race(Noted("a", [1, 1]), Noted("b", [1, 1]), sizes=[2], rounds=2)
    assert order == ["a", "a", "b", "b", "b", "b", "a", "a"]


def broken(prompts, new_tokens):
    raise WorkerError("out of memory")


def test_a_way_that_fails_or_never_began_says_so_and_the_others_go_on():
    late = Pretender("late", [])
    late.write = broken
    batches = race(Pretender("engine", [1, 1]), late, Row("absent", error="it is not installed"))
    assert [row.error for row in batches.rows] == [None, "out of memory", "it is not installed"]
    assert [len(row.samples) for row in batches.rows] == [2, 0, 0]
    assert batches.summary()[1]["batches"][0] == {"size": 4, "tokens_per_second": None, "engine_over_this": None}


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (lambda prompt, n: [1] * (n - 1), r"made \[5\] tokens for 4 of 4"),
        (lambda p, n: [1] * (n + (p[0] > 1)), r"\[6, 7\]"),
    ],
    ids=["too few", "too many for some"],
)
def test_a_wrong_number_of_tokens_is_no_measurement(tokens, said):
    batches = race(Pretender("engine", [1, 1]), Pretender("short", [1, 1], tokens))
    assert batches.rows[1].samples == []
    assert re.search(said, batches.rows[1].error)


def test_other_tokens_are_found_with_their_lead():
    """In the second text, from its third token on."""

    def wrong(prompt, new_tokens):
        made = kv.generate(MODEL, prompt, new_tokens).ids
        return made if prompt != PROMPTS[1] else made[:2] + [(made[2] + 1) % 50] + made[3:]

    engine, static = EngineBatch(MODEL), StaticBatch(MODEL)
    batches = race(engine, static, Pretender("wrong", [1, 1], wrong), sizes=[4, 1])
    batches.compare(MODEL)
    (found,) = batches.differences
    right = kv.generate(MODEL, PROMPTS[1], 3).ids
    assert (found["title"], found["other"], found["size"], found["text"], found["place"]) == (
        "wrong",
        "engine",
        4,
        1,
        2,
    )
    assert (found["token"], found["other_token"], found["context"]) == ((right[2] + 1) % 50, right[2], 3)
    best, second = MODEL(torch.tensor([PROMPTS[1] + right[:2]]))[0, -1].sort(descending=True).values[:2]
    assert found["lead"] == pytest.approx(float(best - second))


# --- where a step's time goes ------------------------------------------------------------------------------------


def event(name, microseconds=0.0, parent=None):
    return SimpleNamespace(name=name, cpu_time_total=microseconds, cpu_parent=parent)


def test_parts_of_a_step_by_hand():
    """Two steps of 1 ms: per step 0.2 ms of linear layers, 0.1 of attention, 0.05 of copies, 0.15 of the head."""
    layer = event("kvcourse: norms, rotary, activations")
    attention = event("kvcourse: attention", parent=layer)
    copies = event("kvcourse: gather and scatter of pages", parent=attention)
    linear = event("aten::linear", 400, layer)
    events = [layer, attention, copies, linear, event("aten::addmm", 390, linear)]
    events += [event("aten::mul", 40, layer), event("aten::softmax", 200, attention)]
    events += [event("aten::index_select", 100, event("autograd::something", 120, copies))]
    events += [event("aten::linear", 300, event("kvcourse: head")), event("aten::argmax", 77)]
    found = {part["part"]: part for part in steps.parts(events, seconds=0.002, steps=2)}
    micro = {name: round(1e6 * part["seconds"], 6) for name, part in found.items()}
    assert micro == {
        "linear layers": 200,
        "attention": 100,
        "gather and scatter of pages": 50,
        "head": 150,
        "norms, rotary, activations": 20,
        "Python and the rest": 480,
    }
    assert [found[name]["operations"] for name in micro] == [0.5, 0.5, 0.5, 0.5, 0.5, 0]
    assert sum(part["share"] for part in found.values()) == pytest.approx(1)
    assert found["linear layers"]["share"] == pytest.approx(0.2)


def test_a_real_step_is_taken_apart_completely():
    model = small_model(small_config(tie_embeddings=True))
    found = steps.measure_step(model, PROMPTS, steps=2)
    assert (found["size"], found["steps"]) == (4, 2)
    counts = {part["part"]: part["operations"] for part in found["parts"]}
    n_layers = model.config.n_layers
    assert counts["linear layers"] == 7 * n_layers  # q, k, v, o, gate, up, down
    assert counts["head"] == 1
    assert counts["attention"] > 2 * n_layers and counts["norms, rotary, activations"] > 10 * n_layers
    assert counts["gather and scatter of pages"] >= 4 * n_layers  # keys and values, in and out
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1)
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["profiled_seconds"])
    assert all(0 < part["share"] < 1 for part in found["parts"])


def test_the_package_is_left_as_it_was():
    before = [getattr(owner, name) for owner, name, _ in steps.MARKED]
    steps.measure_step(small_model(), PROMPTS, steps=1)
    assert [getattr(owner, name) for owner, name, _ in steps.MARKED] == before


# --- load --------------------------------------------------------------------------------------------------------


def test_a_trace_fits_the_model():
    long, short = (load.trace_lengths(small_config(max_seq_len=n), 200) for n in (8192, 100))
    assert max(p for p, _ in long) <= 256 and max(a for _, a in long) <= 256
    assert max(p for p, _ in short) <= 50 and max(a for _, a in short) <= 50
    assert sorted(p for p, _ in long)[100] == pytest.approx(64, rel=0.25)  # the median
    assert load.pool_size([(10, 6), (1, 20)]) == 2 * 64 // 4  # 10 + 20 tokens are 2 blocks


def test_a_trace_is_played_at_its_share_of_the_capacity():
    model = small_model(small_config(max_seq_len=64))
    lengths = load.trace_lengths(model.config, 12, longest=8)
    found = load.measure_trace(model, lengths)
    wanted = sum(answer for _, answer in lengths)
    for run in (found["all_at_once"], found["at_load"]):
        assert run["output_tokens"] == wanted
        assert run["tokens_per_second"] == pytest.approx(wanted / run["seconds"])
        assert 0 < run["ttft"]["p50"] <= run["ttft"]["p95"] <= run["ttft"]["p99"]
        assert 0 < run["itl"]["p50"] <= run["itl"]["p95"] <= run["itl"]["p99"]
        assert 1 <= run["peak_blocks"] <= found["num_blocks"] and run["preemptions"] == 0
    assert found["capacity"] == pytest.approx(12 / found["all_at_once"]["seconds"])
    assert found["rate"] == pytest.approx(0.7 * found["capacity"])
    assert found["at_load"]["seconds"] > found["all_at_once"]["seconds"] / 10


def test_the_scheduler_alone_ends_all_requests():
    found = load.measure_scheduler(400)
    assert found["requests"] == 400 and found["steps"] > 400 / load.MAX_RUNNING
    assert found["steps_per_second_early"] > 0 and found["steps_per_second_late"] > 0


# --- vLLM, in another Python -------------------------------------------------------------------------------------

# Makes `token 0 of the prompt` over and over, and fails if it is not asked as vLLM wants to be asked.
STAND_IN = """
from types import SimpleNamespace
import json, os, sys
__version__ = "9.9"

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, dtype, max_model_len, enforce_eager, skip_tokenizer_init):
        print("a log line")
        os.system("echo from a child")
        assert os.path.exists(os.path.join(model, "model.safetensors")) and enforce_eager and skip_tokenizer_init
        self.config = json.load(open(os.path.join(model, "config.json")))
        if dtype == os.environ.get("REFUSED"):
            raise ValueError(f"{dtype} is not supported here\\nat line 5")
        self.resets = 0
    def reset_prefix_cache(self):
        self.resets += 1
        self.llm_engine = self
        self.left = []
    def add_request(self, id, prompt, sampling):
        assert self.resets and not self.left
        self.made, self.left = [], prompt["prompt_token_ids"][:1] * sampling.max_tokens
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        self.made = self.made + [self.left.pop()]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(self.made))])]
    def generate(self, prompts, sampling, use_tqdm):
        assert not use_tqdm and self.resets
        made = [[prompt["prompt_token_ids"][0]] * sampling.max_tokens for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids))]) for ids in made]
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A Python that finds a module named vllm."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return sys.executable


def test_vllm_is_given_the_model_and_the_prompts(stand_in):
    with vllm_rows(stand_in, small_model(), max_len=12) as rows:
        assert [row.title for row in rows] == ["vllm bfloat16", "vllm float32"]
        assert {row.program for row in rows} == {"vllm 9.9"}
        tokens, seconds = rows[0].write(PROMPTS, 3)
        assert tokens == [[prompt[0]] * 3 for prompt in PROMPTS] and seconds > 0
        processes = [row.worker.process for row in rows]
    assert all(process.returncode == 0 for process in processes)


def test_vllm_writes_one_text_as_a_contestant_of_the_race(stand_in):
    with vllm_row.vllm_texts(stand_in, "tiny-gqa") as rows:
        assert [row.title for row in rows] == vllm_row.TITLES and not any(row.exact for row in rows)
        worker = rows[0].start("tiny-gqa")
        about = worker.answer()
        assert (about["program"], about["weights"], about["means"]) == ("vllm 9.9", "bfloat16", VLLM.means)
        made = worker.ask(measure="speed", prompt=[7, 8, 9], most_gaps=4)
        assert worker.ask(measure="perplexity") == {"perplexity": None} and worker.ask(measure="lead") == {"lead": None}
        worker.close()
    assert made["tokens"] == [7] * 5 and len(made["arrivals"]) == 5
    assert made["arrivals"] == sorted(made["arrivals"]) and made["peak_bytes"] > 1e6
    config = kv.load_model("tiny-gqa").config
    assert made["step_bytes"] == kv.bytes_moved(config, 1, 3, bits=16).total  # in bfloat16
    assert worker.process.returncode == 0


def test_vllm_that_refuses_a_dtype_is_a_row_with_the_cause(stand_in, monkeypatch):
    monkeypatch.setenv("REFUSED", "bfloat16")
    with vllm_rows(stand_in, small_model(), max_len=12) as (refused, other):
        assert isinstance(other, VLLM)
        assert (refused.title, refused.error) == ("vllm bfloat16", "ValueError: bfloat16 is not supported here")


def test_vllm_computes_with_as_many_threads_and_the_environment_comes_first(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert vllm_row.settings()["OMP_NUM_THREADS"] == str(torch.get_num_threads())
    seen = []
    monkeypatch.setattr(vllm_row.VLLMWorker, "start", lambda self, command, env: seen.append(env))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    vllm_row.VLLMWorker("python", "folder", "float32", 12)
    assert seen[0]["VLLM_CPU_KVCACHE_SPACE"] == "7" and seen[0]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert seen[0]["PATH"] == os.environ["PATH"]


def no_python(tmp_path):
    path = tmp_path / "noise"
    path.write_text("#!/bin/sh\necho hello\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (lambda folder: sys.executable, r"is a Python without vLLM: install it there, or give one that has it\.$"),
        (lambda folder: str(folder / "nowhere"), r"cannot be run \(No such file or directory\): give a Python"),
        (no_python, r"does not answer as a Python does"),
    ],
    ids=["no vllm", "no file", "no python"],
)
def test_a_python_without_vllm_is_refused(python, message, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("")  # in the current folder: not installed
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ValueError, match=message) as caught:
        require_vllm(python(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_python_with_vllm_is_accepted(stand_in):
    assert require_vllm(stand_in) == stand_in


# --- text --------------------------------------------------------------------------------------------------------

ROW = {"error": None, "program": "kvcourse", "means": "writes"}


def cell(size, speed, ratio):
    return {
        "size": size,
        "tokens_per_second": {"median": speed, "low": speed - 1, "high": speed + 1},
        "engine_over_this": {"median": ratio, "low": ratio, "high": ratio},
    }


def a_report(**changes):
    run = {"tokens_per_second": 123.4, "preemptions": 2, "peak_blocks": 9, "steps": 1000}
    run |= {"ttft": {"p50": 0.05, "p95": 0.1, "p99": 1.5}, "itl": {"p50": 0.01, "p95": 0.02, "p99": None}}
    where = {"device": "cpu", "device_name": "a processor", "dtype": "float32", "torch": "2", "threads": 2}
    return {
        "model": "m",
        "environment": where,
        "rounds": 3,
        "quick": False,
        "weights": "float32",
        "compiled": False,
        "compilations": 0,
        "compilations_in_trace": 0,
        "prompt_tokens": 64,
        "new_tokens": 32,
        "rows": [
            ROW | {"title": "engine", "batches": [cell(16, 240, 1), cell(4, 90, 1)]},
            ROW | {"title": "static", "batches": [cell(16, 200, 1.2), cell(4, 100, 0.9)]},
            ROW | {"title": "vllm float32", "error": "it is not installed", "batches": []},
        ],
        "differences": [],
        "step": {
            "size": 16,
            "context": 66,
            "steps": 8,
            "seconds": 0.064,
            "profiled_seconds": 0.08,
            "parts": [
                {"part": "linear layers", "share": 0.75, "seconds": 0.06, "operations": 210},
                {"part": "Python and the rest", "share": 0.25, "seconds": 0.02, "operations": 0},
            ],
        },
        "trace": {
            "requests": 200,
            "longest": {"prompt": 250, "answer": 240},
            "num_blocks": 512,
            "capacity": 2.0,
            "load": 0.7,
            "rate": 1.4,
            "all_at_once": run,
            "at_load": run | {"preemptions": 0},
        },
        "scheduler": {
            "requests": 10_000,
            "steps": 5000,
            "steps_per_second_early": 2345.6,
            "steps_per_second_late": 2400.0,
        },
    } | changes


def words(report):
    return " ".join(serving_report.text(report).split())


def test_the_text_shows_the_numbers_and_fits_the_screen():
    shown = serving_report.text(a_report())
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 120 and all(line == line.rstrip() for line in lines)
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["engine"] == "engine 240 (239 to 241) 1.00x 90.0 (89.0 to 91.0) 1.00x".split()
    assert rows["static"] == "static 200 (199 to 201) 1.20x 100 (99.0 to 101) 0.90x".split()
    assert rows["vllm float32"][2:] == "not measured: it is not installed".split()
    assert rows["linear layers"] == "linear layers 75.0% 60.0 ms 210".split()
    assert rows["Python and the rest"] == "Python and the rest 25.0% 20.0 ms".split()
    assert rows["all"] == "all 100.0% 80.0 ms".split()
    assert rows["TTFT p50 / p95 / p99, ms"][-5:] == "50.0 / 100 / 1,500".split()
    assert rows["ITL p50 / p95 / p99, ms"][-5:] == "10.0 / 20.0 / -".split()
    assert rows["preemptions"] == "preemptions 2 0".split()
    assert rows["most blocks in use"][-3:] == "9 of 512".split()
    told = words(a_report())
    assert "Batches, 64 tokens in and 32 out each" in told and "Medians of 3 rounds" in told
    assert "- engine and static: writes. " in told  # what two rows have in common is said once
    assert "static wrote the same tokens as the engine." in told and "DIFFERENT" not in told
    assert "without it the median step took 64.0 ms" in told and "quick" not in told
    assert "10,000 requests: 2,346 steps/s" in told and "2,400 steps/s" in told


def test_the_text_says_what_is_compiled():
    assert "compiled" not in words(a_report())
    fast = a_report(weights="int8", compiled=True, compilations=5, step=None)
    said = "The engine's model is compiled, its weights in int8: 5 compilations, "
    assert said + "all of them before the clock started." in words(fast)
    assert "measured for plain models only" in words(fast) and "on the CPU only" not in words(fast)
    assert said + "2 of them while the trace was replayed." in words(fast | {"compilations_in_trace": 2})


def test_the_text_of_one_quick_round_on_a_gpu():
    told = words(a_report(rounds=1, quick=True, step=None))
    assert "239 to 241" not in told and "Medians" not in told
    assert "the numbers are rough" in told and "measured on the CPU only" in told


def test_the_text_tells_different_tokens_with_their_leads():
    one = {"title": "static", "size": 16, "lead": 0.0031}
    told = words(a_report(differences=[one, one | {"lead": 0.02}]))
    assert "DIFFERENT TOKENS: static wrote others than the engine in 2 of 16 texts and 0 of 4 texts." in told
    assert "by 0.0031 to 0.02 logits" in told


# --- the whole command -------------------------------------------------------------------------------------------

SMALL = serving.Amounts(prompt_tokens=6, new_tokens=4, sizes=(3, 2), steps=1, requests=4, longest=8, scheduled=60)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(serving, "QUICK", SMALL)


def test_the_whole_command(small, stand_in, tmp_path, capsys):
    folder = tmp_path / "new"
    arguments = ["bench", "tiny-gqa", "--serving", "--quick", "--vllm", stand_in, "--output", str(folder)]
    assert kvcourse(arguments) == 0  # that vLLM wrote others is told, and no error: it computes otherwise
    shown = capsys.readouterr().out
    assert shown.endswith(f"Written: {folder / 'bench.json'}\n")
    assert [file.name for file in folder.iterdir()] == ["bench.json"]
    stored = json.loads((folder / "bench.json").read_text())
    assert (stored["measured"], stored["model"], stored["quick"], stored["rounds"]) == ("serving", "tiny-gqa", True, 1)
    assert [row["title"] for row in stored["rows"]] == ["engine", "static", "vllm bfloat16", "vllm float32"]
    lm = kv.load_model("tiny-gqa")
    expected = [kv.generate(lm.model, prompt, 4).ids for prompt in prompts_of(lm, 3, 6)]
    for row in stored["rows"][:2]:
        assert [sample["tokens"] for sample in row["samples"]] == [expected, expected[:2]]
        assert [batch["size"] for batch in row["batches"]] == [3, 2]
        for sample, batch in zip(row["samples"], row["batches"], strict=True):
            assert batch["tokens_per_second"]["median"] == pytest.approx(batch["size"] * 4 / sample["seconds"])
    assert {difference["title"] for difference in stored["differences"]} == {"vllm bfloat16", "vllm float32"}
    assert stored["trace"]["requests"] == 4 and stored["scheduler"]["requests"] == 60
    assert sum(part["share"] for part in stored["step"]["parts"]) == pytest.approx(1)
    told = " ".join(shown.split())
    assert "static wrote the same tokens as the engine." in told and "DIFFERENT TOKENS: vllm float32" in told


def test_wrong_tokens_of_the_static_batch_make_the_command_fail(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StaticBatch, "write", lambda self, prompts, n: ([[0] * n for _ in prompts], 1.0))
    assert kvcourse(["bench", "tiny-gqa", "--serving", "--quick"]) == 1
    assert "DIFFERENT TOKENS: static" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_engine_over_weights_in_other_numbers(small, stand_in, tmp_path, monkeypatch):
    """The compiled model is the engine's and the static batch's; vLLM is given the plain one. Near ties may fall
    either way, so other tokens are no failure."""
    asked = []

    def load(name, dtype=None, compiled=False):
        asked.append((name, dtype, compiled))
        return kv.load_model(name, dtype=dtype)

    monkeypatch.setattr(serving, "load_model", load)
    monkeypatch.setattr(StaticBatch, "write", lambda self, prompts, n: ([[0] * n for _ in prompts], 1.0))
    arguments = ["bench", "tiny-gqa", "--serving", "--quick", "--output", str(tmp_path)]
    assert kvcourse([*arguments, "--weights", "int8", "--dtype", "bfloat16", "--vllm", stand_in]) == 0
    assert asked == [("tiny-gqa", "bfloat16", "int8"), ("tiny-gqa", None, False)]
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert (stored["weights"], stored["compiled"], stored["step"]) == ("int8", True, None)
    assert stored["environment"]["dtype"] == "bfloat16"
    assert kvcourse([*arguments, "--dtype", "bfloat16"]) == 0
    assert kvcourse([*arguments, "--weights", "float32"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serving", "--only", "dense"], "--only chooses rows of the other table"),
        (["--dtype", "bfloat16"], "--dtype belongs to --serving: leave it out"),
        (["--serving", "--peers"], "--peers belongs to the other table: leave out --serving"),
        (["--serving", "--rounds", "0"], "--rounds=0 must be a whole number of at least 1"),
        (["--serving", "--vllm", "no/such/python"], "--vllm no/such/python cannot be run"),
        (["--serving", "--output", __file__], "is a file, and results are saved in a folder"),
        (["--serving", "nosuchmodel"], "no model 'nosuchmodel'"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(serving, "load_model", lambda *arguments, **options: pytest.fail("work was begun"))
    monkeypatch.setattr("kvcourse.roof.measure_ceilings", lambda: pytest.fail("work was begun"))
    assert kvcourse(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_model_that_is_too_short_is_refused_before_anything_is_measured(monkeypatch, capsys):
    short = kv.LM(small_model(small_config(max_seq_len=100)), None, "short")
    monkeypatch.setattr(serving, "load_model", lambda name, **options: short)
    monkeypatch.setattr(Batches, "run", lambda self, ways: pytest.fail("work was begun"))
    assert kvcourse(["bench", "tiny-gqa", "--serving"]) == 1
    assert "tiny-gqa has a context of 100 tokens, and 128 are needed: measure another model." in capsys.readouterr().err
