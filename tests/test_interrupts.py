"""The stop button: a kernel is interrupted in mid-work, the cell is run again, and the ones below it work as if nothing
had happened. Each case starts with a cell that never ends, so that the interrupt always finds it at work.
"""

import time

import pytest
from jupyter_client.manager import start_new_kernel

PATIENCE = 240  # seconds: only a kernel that hangs takes so long

BEGIN = """
import kvcourse as kv, torch
from kvcourse.quant import quantize_model
lm = kv.load_model("tiny-gqa", device="cpu", dtype="float32")
prompt = lm.encode("One day, Lily and her dog went to the park.")
right = kv.generate_naive(lm.model, prompt, 40).ids
"""

# name: (a cell that is stopped, a cell that then must pass)
CASES = {
    "generate, one cache for all": (
        """
made, cache = [], kv.DenseCache(lm.config)
while True:
    print("at work")
    made.clear(); cache.reset()
    kv.generate(lm.model, prompt, 400, cache=cache, on_token=lambda row, token: made.append(token))
""",
        """
assert cache.open_step is None
read = (prompt + made)[: cache.length]  # what it holds must be the beginning of the text, so going on from it is right
assert len(read) == cache.length and not cache.keys[:, :, :, cache.length :].any()
more = (prompt + right)[cache.length :][:1] or [0]
assert kv.generate(lm.model, more, 20, cache=cache).ids == kv.generate_naive(lm.model, read + more, 20).ids
cache.reset()
assert kv.generate(lm.model, prompt, 40, cache=cache).ids == right
""",
    ),
    "stream": (
        """
while True:
    print("at work")
    for piece in lm.stream(prompt_text, 400):
        said = piece
""",
        """
answer = lm.stream(prompt_text, 40, stop_ids=[])
text = "".join(answer)
assert answer.generation.ids == right and text == lm.decode(right)
""",
    ),
    "engine": (
        """
if "engine" not in globals():
    engine = kv.Engine(lm.model, num_blocks=400)
while True:
    print("at work")
    ids = [engine.submit(prompt, 100) for _ in range(4)]
    engine.run()
""",
        """
left = set(engine._texts)
done = engine.run()
assert left <= done.keys() and engine.unfinished == 0 and engine.free_blocks == 400
assert all(served.ids[:40] == right and len(served.ids) == 100 for served in done.values())
id = engine.submit(prompt, 40)
assert engine.run()[id].ids == right
""",
    ),
    "quantize_model, with its bar": (
        """
text = lm.encode(kv.evaluation_text("calibration"))[:1024]
before = [parameter.clone() for parameter in lm.model.parameters()]
while True:
    print("at work")
    quantize_model(lm, "gptq", group_size=32, calibration=text, context=256)
""",
        """
assert all(map(torch.equal, before, lm.model.parameters()))
assert kv.generate(lm.model, prompt, 40).ids == right
first, second = (quantize_model(lm, "rtn", group_size=32, progress=False) for _ in range(2))
assert kv.generate(first.model, prompt, 20).ids == kv.generate(second.model, prompt, 20).ids
""",
    ),
    "a bar": (
        """
from tqdm.auto import tqdm
for _ in tqdm(range(10**9)):
    if _ % 100 == 0:
        print("at work")
    kv.generate(lm.model, prompt, 2)
""",
        """
assert len(list(tqdm(range(3)))) == 3
assert kv.generate(lm.model, prompt, 40).ids == right
""",
    ),
}


@pytest.fixture(scope="module")
def kernel():
    """A kernel, and its client, that has loaded a small model."""
    manager, client = start_new_kernel(kernel_name="python3", extra_arguments=["--IPKernelApp.log_level=50"])
    try:
        assert run(client, BEGIN + 'prompt_text = "One day, Lily and her dog went to the park."')["status"] == "ok"
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client, code: str) -> dict:
    """The kernel's reply to a cell that ends by itself. For a moment after an interrupt it refuses what it is sent."""
    while True:
        reply = client.execute_interactive(code, timeout=PATIENCE, output_hook=lambda message: None)["content"]
        if reply["status"] != "aborted":
            return reply


def run_and_stop(manager, client, code: str, after: float) -> dict:
    """The kernel's reply to a cell that is interrupted `after` seconds of work."""
    id = client.execute(code)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") == id and "at work" in message["content"].get("text", ""):
            break
    time.sleep(after)
    manager.interrupt_kernel()
    while True:
        reply = client.get_shell_msg(timeout=PATIENCE)
        if reply["parent_header"].get("msg_id") == id:
            return reply["content"]


@pytest.mark.parametrize("endless, then", CASES.values(), ids=CASES)
def test_after_an_interrupt_everything_works(endless, then, kernel):
    manager, client = kernel
    for after in (0.0, 0.05, 0.21):
        stopped = run_and_stop(manager, client, endless, after)
        assert stopped["ename"] == "KeyboardInterrupt", stopped
        reply = run(client, then + "\nassert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()")
        assert reply["status"] == "ok", "\n".join(reply["traceback"])


def test_an_interrupt_that_breaks_something_is_seen(kernel):
    """The red partner: a list that is emptied before it is filled."""
    manager, client = kernel
    endless = "kept = [1]\nwhile True:\n    print('at work')\n    kept.clear()\n    import time; time.sleep(60)\n"
    assert run_and_stop(manager, client, endless, 0.1)["ename"] == "KeyboardInterrupt"
    assert run(client, "assert kept")["ename"] == "AssertionError"
