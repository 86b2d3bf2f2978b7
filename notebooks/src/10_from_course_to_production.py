# %% [markdown]
# # 10. From the course to production
#
# **Time:** about 100 minutes · **Device:** any (CPU is enough)
#
# **You will be able to**
#
# - say where the time of a decode step goes, and how far it is from the bound that memory sets;
# - go from a plain step to one near that bound, one measured change after the other, and say what quality each costs;
# - hold two engines to the same tokens, and take the time between them apart: weights, cache, overhead, scheduling;
# - measure a server from outside, and see its prefix cache there;
# - say what moves, and how many bytes, when a model is spread over several processes or machines;
# - judge the 29 statements of this course by numbers of your own.
#
# {{colab_badge}}
#
# One section compares with two other programs, transformers and llama.cpp. They come with `pip install -c
# constraints.txt -e ".[peers]"`. Without them their rows are left out, and everything else runs.

# %% tags=["setup"]
# SETUP

# %% tags=["nbval-ignore-output"]
import os
import random
import statistics
import tempfile
import textwrap
from collections import Counter
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kvcourse.caches.dense import DenseCache
from kvcourse.metrics import Stopwatch

checkpoint = "smollm2-135m"  # or your own, with a context of 512 tokens or more
lm = kv.load_model(checkpoint, dtype=torch.float32)
model, config = lm.model, lm.config
print(f"{lm.name} on {model.device} in float32")

# %% [markdown]
# ## Where the time of a step goes
#
# Notebook 03 said: a decode step of one text waits for memory. It reads all weights and the cache, and does little with
# them. Then there is a bound: the bytes that it must read, divided by the bytes that this machine can read in a second.
#
# ### Exercise: fastest_decode
#
# ●○○ · 4 minutes
#
# Write how many tokens a second decode can make at most, for one text. A step reads `weights` numbers of `weight_bits`
# bits each, and `cache_bytes` bytes of keys and values; the machine reads `bytes_per_second`.
#
# Why it matters: this is the first number to ask for before you choose a machine, and the one that tells you when to
# stop tuning.
#
# <details><summary>Hint 1</summary>A byte has 8 bits.</details>
# <details><summary>Hint 2</summary>Bytes divided by bytes per second are the seconds of a step. Tokens a second are the
# inverse.</details>


# %% tags=["exercise"]
def fastest_decode(weights, weight_bits, cache_bytes, bytes_per_second):
    """Tokens a second, at most."""
    # SOLUTION
    return bytes_per_second / (weights * weight_bits / 8 + cache_bytes)
    # END SOLUTION


# %%
kv.check.fastest_decode(fastest_decode)

# %% [markdown]
# The two numbers it needs: what this machine reads in a second (a matrix of 1 GB, as in notebook 03), and what a step
# of our model must read.

# %% tags=["nbval-ignore-output"]
ceilings = kv.measure_ceilings(model.device, torch.float32)
context = 64  # tokens of text before the step that is timed
moved = kv.bytes_moved(config, 1, context, bits=32)
bound = moved.total / ceilings.bytes_per_second
print(f"{ceilings.bytes_per_second / 1e9:.1f} GB a second; {moved.weights / 1e6:,.0f} MB of weights, ", end="")
print(f"{moved.cache_read / 1e6:.1f} MB of cache: at least {1e3 * bound:.2f} ms a step")


# %%
def room_for(model, tokens):
    """A cache for one text of the model, in which numbers stand."""
    cache = DenseCache(model.config, 1, tokens, model.dtype, model.device)
    cache.keys.fill_(0.01)
    cache.values.fill_(0.01)
    return cache


@torch.inference_mode()
def step(model, cache, context):
    """Seconds of one more token after `context` tokens."""
    cache.lengths = [context]
    watch = Stopwatch(model.device)
    model(torch.zeros(1, 1, dtype=torch.int64), cache=cache, last_only=True)
    return watch.read()


# %%
def race(rungs, rounds=3, steps=6):
    """The median seconds of a step of each, `{name: (model, what to switch off)}`, in turns, so that a slow moment of
    the machine meets all."""
    times = {name: [] for name in rungs}
    caches = {name: room_for(each, context + 1 + steps) for name, (each, _) in rungs.items()}
    for turn in range(rounds + 1):  # the first turn is the warm-up, and compiles
        for name, (each, switch) in rungs.items():
            with switch():
                taken = [step(each, caches[name], context + i) for i in range(steps)]
            times[name] += taken[1:] if turn else []
    return {name: statistics.median(taken) for name, taken in times.items()}


# %% [markdown]
# **Predict.** How many times the bound does a step of the plain model take?

# %%
my_guess = 1.5  # PREDICT
asked = "A step of the plain model: how many times the bound?"
kv.results.predict("10.plain_step", my_guess, unit="times", question=asked)

# %% tags=["nbval-ignore-output"]
kv.warm_up(model)
plain_step = race({"plain": (model, nullcontext)})["plain"]
kv.results.measure("10.plain_step", plain_step / bound, unit="times", note=f"{1e3 * plain_step:.1f} ms")

# %% [markdown]
# Where is the rest? PyTorch lets us stand between a program and its operations: a `TorchFunctionMode` is called in
# place of each, and may look at the clock. The linear layers read the weights, attention reads the cache. All other
# operations (norms, rotations, additions, views) work on a few hundred numbers each, or on none; and between the
# operations Python decides what comes next. (The clock has a price too: its own calls count as Python here, so a step
# with it takes a little longer than one without.)
#
# (A small model, such as the one that stands in, may fit into the processor's own memory. Then its weights are not read
# from memory at all, and nearly all of a step is overhead. On a GPU the clock sees how long it took to *ask* for an
# operation. It then says less about reading, and as much about overhead.)


# %%
class Clocked(TorchFunctionMode):
    """Seconds and number of PyTorch's operations inside a `with` block, by who reads what."""

    READERS = {"linear": "linear layers", "scaled_dot_product_attention": "attention"}

    def __init__(self):
        super().__init__()
        self.seconds, self.counts = Counter(), Counter()

    def __torch_function__(self, operation, types, args=(), kwargs=None):
        before = perf_counter()
        result = operation(*args, **(kwargs or {}))
        name = operation.__name__
        if name != "__get__":  # to ask a tensor for its shape is no operation
            part = self.READERS.get(name, "small operations")
            self.seconds[part] += perf_counter() - before
            self.counts[part] += 1
        return result


# %% tags=["nbval-ignore-output"]
steps, plain_cache = 5, room_for(model, context + 1)
with Clocked() as clock:
    clocked = sum(step(model, plain_cache, context) for _ in range(steps))
parts = {part: seconds / steps for part, seconds in clock.seconds.items()}
parts["Python between them"] = clocked / steps - sum(parts.values())
for part, seconds in parts.items():
    print(f"{part:<20} {1e3 * seconds:6.2f} ms in {clock.counts[part] / steps:5.0f} operations")

# %% tags=["nbval-ignore-output"]
written = moved.cache_read + moved.cache_written
least = {"weights": moved.weights / ceilings.bytes_per_second, "cache": written / ceilings.bytes_per_second}
kv.plots.show(
    kv.plots.time_apart({"at least": least, "plain step": parts}, "Where the time of a step goes"),
    alt=f"With the clock a plain step takes {1e3 * clocked / steps:.1f} ms, {1e3 * parts['linear layers']:.1f} of them "
    f"in linear layers; reading alone would take {1e3 * bound:.2f} ms.",
)

# %% [markdown]
# So there are two suspects. The small operations and Python's time between them are pure overhead. And where the bar of
# the linear layers is longer than the one for reading the weights, PyTorch's product for a single row reads them at
# less than the memory's speed. Is it the size of the matrices? We shall see.
#
# ## From the plain path to the fast one
#
# `kv.compiled(lm)` makes the same model faster (`kv.load_model(name, compiled=True)` does both at once). The plain
# model stays as it is, since it is the one to read. We go there in steps, and measure each.
#
# ### One product instead of three
#
# Queries, keys and values are three products with the same input; gate and up are two. If the rows of the matrices are
# put below each other, it is one product, with a longer matrix, and the result is cut.
#
# ### Exercise: joined_product
#
# ●○○ · 5 minutes
#
# `x` has the shape (tokens, d_model), and `weights` is a list of matrices, each (its rows, d_model), with different
# numbers of rows. Write the list of the products of `x` with each of them, (tokens, its rows), by **one** product.
#
# Why it matters: engines store these matrices joined. Who loads a checkpoint into one cuts and joins at the right rows;
# with grouped heads they are not thirds.
#
# <details><summary>Hint 1</summary><code>torch.cat(weights)</code> puts the rows below each other.</details>
# <details><summary>Hint 2</summary><code>result.split([...], dim=-1)</code> cuts into pieces of the given sizes.
# </details>


# %% tags=["exercise"]
def joined_product(x, weights):
    """The products of x with each of the matrices, by one product."""
    # SOLUTION
    together = x @ torch.cat(weights).T
    return list(together.split([len(weight) for weight in weights], dim=-1))
    # END SOLUTION


# %%
kv.check.joined_product(joined_product)

# %% [markdown]
# The package's fast model has its matrices joined. Here is its first one beside the three that it was made of:

# %% tags=["nbval-ignore-output"]
fast = kv.compiled(lm)
print(fast.model.reason or "torch.compile works on this machine.")

# %% [markdown]
# (Compiling needs a C++ compiler, or Triton on a GPU. Where there is none, the line above says so; the compiled rungs
# are then left out below, and everything else runs.)

# %%
own = model.layers[0].self_attn
three = [own.q_proj.weight, own.k_proj.weight, own.v_proj.weight]
joined = fast.model.weights[0].qkv.weight
print("the joined matrix is the three, one below the other:", torch.equal(joined, torch.cat(three)))
x = torch.randn(4, config.d_model, generator=torch.Generator().manual_seed(0)).to(model.device)
cut = (x @ joined.T).split([len(weight) for weight in three], dim=-1)
same = all(torch.allclose(part, x @ weight.T, atol=1e-4) for part, weight in zip(cut, three, strict=True))
print("its product, cut, is that of the three:", same)

# %% [markdown]
# ### One query needs no mask
#
# A mask says which keys a query may see. A single new token sees all that is there, so no mask has to be made or
# applied. (The plain cache knows that too.) A second thing can be tried: with grouped heads, several query heads look
# at the same keys. If they stand as rows of one matrix, one product serves them all. Whether that is faster depends on
# the kernel that PyTorch then chooses: on some machines, and with some versions, rows win only beside a mask, or never.

# %% tags=["nbval-ignore-output"]
from kvcourse.layers import attention

long = config.fitting([2000], room=1)[0]
heads, shared = config.n_heads, config.n_kv_heads
q = torch.randn(1, heads, 1, config.d_head, device=model.device)
keys, values = torch.randn(2, 1, shared, long, config.d_head, device=model.device)
everything = torch.ones(1, 1, 1, long, dtype=torch.bool, device=model.device)
rows = q.view(1, shared, heads // shared, config.d_head)  # the heads of a group, below each other
ways = {
    "with a mask": lambda: attention(q, keys, values, everything),
    "without": lambda: attention(q, keys, values),
    "heads as rows": lambda: attention(rows, keys, values).view(q.shape),
}
took = {name: kv.median_time(way, 0.1) for name, way in ways.items()}
for name, way in ways.items():
    alike = torch.allclose(way(), ways["with a mask"](), atol=1e-5)
    print(f"{name:<14} {1e6 * took[name]:7.0f} µs over {long:,} keys; the same result: {alike}")
print(f"Here the quickest is '{min(took, key=took.get)}'; against the mask, ", end="")
print(", ".join(f"'{name}' takes {took[name] / took['with a mask']:.2f} times as long" for name in list(ways)[1:]))

# %% [markdown]
# ### Compiled pieces, compiled layers
#
# `torch.compile` takes a function, looks at what it does with its tensors, and writes a program for it: in C++ on a
# CPU, in Triton on a GPU. Small operations that follow each other become one loop. A step can be compiled in two ways:
#
# - in *pieces*: one function before attention, one after it. In between, any cache can attend: pages, windows, few
#   bits. This is what the engine uses.
# - as *whole layers*: for one new token after a dense cache, everything of a layer is one function. The products are
#   written as sums over something that is read once, and the compiler makes one loop of each, which runs through the
#   weights from front to back.
#
# Compiling takes seconds, when a function is first used, and has to be told apart from running. And a program that was
# made for 64 tokens of context must not be made again for 65: the package tells the compiler which sizes vary. The
# model counts: `compilations`, `compile_seconds`.
#
# To see the steps one by one, we switch parts of the fast model off.

# %% tags=["nbval-ignore-output"]
compiles = fast.model.reason is None


@contextmanager
def switched(model, compiling=True, whole_layers=True):
    """A compiled model without compiled functions, or without those for whole layers, inside a `with` block."""
    kept = model.reason, model.full_context
    model.reason = model.reason if compiling else "Switched off, to see what joining alone gives."
    model.full_context = model.full_context and whole_layers
    try:
        yield
    finally:
        model.reason, model.full_context = kept


rungs = {
    "plain": (model, nullcontext),
    "joined matrices": (fast.model, lambda: switched(fast.model, compiling=False)),
}
if compiles:
    rungs["compiled pieces"] = fast.model, lambda: switched(fast.model, whole_layers=False)
    rungs["compiled layers"] = fast.model, nullcontext
last = list(rungs)[-1]  # the last rung in float32

# %% [markdown]
# **Predict.** The last rung in float32, whole layers: what share of the bound does it reach, in percent? (100% would be
# a step that takes as long as reading its bytes.)

# %%
my_guess = 70  # PREDICT
asked = "The compiled step in float32: share of the bound?"
kv.results.predict("10.fast_share", my_guess, unit="%", question=asked)


# %% tags=["nbval-ignore-output"]
pace = race(rungs)
for name, seconds in pace.items():
    print(
        f"{name:<16} {1e3 * seconds:6.2f} ms a step, {1 / seconds:6.1f} tokens/s, {pace['plain'] / seconds:5.2f} times"
    )

# %% tags=["nbval-ignore-output"]
fast_share = 100 * bound / pace[last]
kv.results.measure("10.fast_share", fast_share, unit="%", note=f"{last}, {1e3 * pace[last]:.1f} ms a step")
if fast_share > 100:
    print("Over 100%: the bound rests on what PyTorch's own product reads in a second.")
    print("This loop reads a little faster, or the two were timed at different moments.")

# %% tags=["nbval-ignore-output"]
for (before, slower), (name, quicker) in zip(pace.items(), list(pace.items())[1:], strict=False):
    gained = slower - quicker
    print(f"{name:<16} gains {1e3 * gained:+6.2f} ms over '{before}', {gained / slower:+4.0%} of its step")
print(f"in the plain step, under the clock, {parts['linear layers'] * steps / clocked:.0%} were linear layers")
print("(Times on a shared machine differ by a tenth; only rows of one race can be compared.)")

# %% [markdown]
# Joined matrices and compiled pieces leave the products to the library. So where the products are most of the step,
# these two gain little, and if longer matrices do not help, the size of the matrices was not the trouble. Whole layers
# replace the products themselves by loops of the compiler's. On a GPU, where starting an operation costs more against
# what it does, the first two gain more. It is always the part farthest from its bound that has something to give.

# %% [markdown]
# It computes the same thing. Scores differ by rounding, since sums are taken in another order, and greedy decoding
# gives the same tokens:

# %% tags=["nbval-ignore-output"]
from kvcourse.training.stories.probes import probes

text = lm.encode(kv.evaluation_text())
if lm.name in kv.COURSE_MODELS and not lm.tokenizer.chat_template:  # the stand-in knows stories, no prose
    text = [token for probe in islice(probes(lm.tokenizer, 256, 512), 4) for token in probe.prompt + probe.answer]
before = fast.model.compilations
spoken = {name: kv.generate(each, text[:48], 16) for name, each in (("plain", model), ("fast", fast.model))}
print("the same tokens:", spoken["fast"].ids == spoken["plain"].ids)
print(f"for a prompt: {fast.model.compilations - before} more functions compiled")

# %% [markdown]
# And the price of compiling? The functions above were compiled once each. A step after 200 tokens, or 300, uses the
# ones that are there:

# %% tags=["nbval-ignore-output"]
before = fast.model.compilations
longer = room_for(fast.model, 320)
for tokens in (70, 150, 200, 300):
    step(fast.model, longer, tokens)
assert fast.model.compilations == before, "a length of its own was compiled"
took = fast.model.compile_seconds
print(
    f"{before} functions compiled so far, in {took:.1f} s (or read from PyTorch's disk cache); for these lengths none"
)
if compiles and pace["plain"] > pace[last]:
    print(f"that time is won back after {took / (pace['plain'] - pace[last]):,.0f} tokens")

# %% [markdown]
# (PyTorch keeps on disk what it compiled, and may have read programs from there. So the seconds above are those of a
# first run only if this was one; the first takes longer.) A server compiles before its first visitor comes. A script
# that writes ten tokens should not.
#
# ### Fewer bytes
#
# Where a step comes near its bound, it reads its weights about as fast as this machine can. What is left is to have
# fewer bytes to read.
#
# - **bfloat16** has two bytes a number. The compiled loop reads them, widens them in the processor, and adds up in
#   float32.
# - **int8** has one. But widening each byte takes time too. So here also the *activations* are rounded to 8 bits, and
#   whole numbers are multiplied: processors do several times as many of those at once.
#
# Each token gets a scale of its own, 1/127 of its largest magnitude, and each row of the weights has one already
# (notebook 08):
#
# $$y = (x_q \, W_q^T) \times s_{token} \times s_{row}, \qquad x_q = round(x / s_{token})$$
#
# ### Exercise: int8_product
#
# ●●○ · 7 minutes
#
# `x` is (tokens, columns), floats; `codes` is (rows, columns), whole numbers from -127 to 127; `scale` is (rows,), so
# that a weight is its code times the scale of its row. Round each token of `x` with a scale of its own, 1/127 of its
# largest magnitude, multiply, and return (tokens, rows). (Keep the whole numbers in floats: they hold them exactly
# here. A kernel uses bytes, and adds up in 32-bit whole numbers.)
#
# Why it matters: this is what an engine does with "W8A8" on its label. One scale for all tokens would be simpler, and
# one *loud* token (one whose numbers are much larger) would then leave the others with a handful of values.
#
# <details><summary>Hint 1</summary><code>x.abs().amax(-1, keepdim=True)</code> is the largest magnitude of each token,
# (tokens, 1).</details>
# <details><summary>Hint 2</summary>First divide, then round. Afterwards multiply with both scales: that of the token
# stands in front of a row of the result, that of the weights above a column.</details>


# %% tags=["exercise"]
def int8_product(x, codes, scale):
    """x times the transposed weights, in whole numbers but for the scales."""
    # SOLUTION
    token_scale = x.abs().amax(-1, keepdim=True) / 127
    whole = (x / token_scale).round()
    return (whole @ codes.to(x.dtype).T) * token_scale * scale
    # END SOLUTION


# %%
kv.check.int8_product(int8_product)

# %% [markdown]
# The package's layer does the same, through a kernel for whole numbers where the processor has one. Beside it, what
# rounding has done:

# %%
from kvcourse.quant import QuantLinear

tiny = kv.load_model("tiny-gqa", dtype=torch.float32)
weight = tiny.model.layers[0].mlp.down_proj.weight
in_eight = kv.quant.rtn(weight, bits=8, symmetric=True)
layer = QuantLinear(in_eight, None, torch.float32, "int8 activations")
x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device)
codes = in_eight.dequantize(torch.float32) / in_eight.scale.float()
token_scale = x.abs().amax(-1, keepdim=True) / 127
by_hand = ((x / token_scale).round() @ codes.T) * token_scale * in_eight.scale.float()[:, 0]
print("as the package's layer:", torch.allclose(layer(x), by_hand, atol=1e-4))
error = (by_hand - x @ weight.T).norm() / (x @ weight.T).norm()
print(f"error of the result: {error:.2%} of its size")

# %% [markdown]
# Real activations are less well-behaved than these. A few channels are far larger than the others, and as notebook 08
# has said of weights, one large number spoils the grid for all that share it:

# %% tags=["nbval-ignore-output"]
loud = {}


def listen(name):
    """A hook that notes how the largest channel of a layer's input stands to the middle one."""

    def hook(_, inputs):
        size = inputs[0].abs().amax((0, 1))
        loud[name] = float(size.max() / size.median())

    return hook


hooks = [
    each.register_forward_pre_hook(listen(name))
    for name, each in model.named_modules()
    if isinstance(each, torch.nn.Linear)
]
with torch.inference_mode():
    model(torch.tensor([text[:128]]), last_only=True)
for hook in hooks:
    hook.remove()
worst = max(loud, key=loud.get)
print(f"largest channel against the middle one: {loud[worst]:,.0f} times in {worst}, ", end="")
print(f"{statistics.median(loud.values()):.0f} times in the median layer")

# %% [markdown]
# **SmoothQuant** (arXiv 2211.10438) moves the trouble to where it does less harm. Divide a loud channel by a factor,
# multiply the column of the weights that reads it by the same, and the product stays as it was, but the activations are
# tamer. `kv.compiled(lm, "int8")` does that first, with factors found by reading 2,048 tokens of a text.
#
# **Predict.** How many times the speed of the plain step has the int8 one?

# %%
my_guess = 4  # PREDICT
asked = "The int8 step against the plain one: how many times as fast?"
kv.results.predict("10.int8_times", my_guess, unit="times", question=asked)

# %% tags=["nbval-ignore-output"]
half, eight = kv.compiled(lm, "bfloat16"), kv.compiled(lm, "int8")
fewer = {"bfloat16": (half.model, nullcontext), "int8": (eight.model, nullcontext)}
pace = race({**rungs, **fewer})  # all once more, so that the ladder is of one race
int8_times = pace["plain"] / pace["int8"]
kv.results.measure("10.int8_times", int8_times, unit="times", note=f"{1e3 * pace['int8']:.1f} ms a step")
print("Times on a shared machine differ by a tenth; only rows of one race can be compared.")

# %% [markdown]
# Speed alone is easy: a model that reads nothing is very fast. So beside each rung stands what it costs, the perplexity
# of a text. (No program is compiled for this; the same sums are taken without.) Over 512 tokens, differences of less
# than about a percent are chance, up or down.

# %% tags=["nbval-ignore-output"]
scored = text[:512]
loss = {"plain": kv.perplexity(model, scored)}
for name, each in (("bfloat16", half.model), ("int8", eight.model)):
    with switched(each, compiling=False):
        loss[name] = kv.perplexity(each, scored)
rough = kv.compiled(model, "int8")  # a model without its tokenizer reads no text, so nothing is smoothed
with switched(rough, compiling=False):
    loss["int8, not smoothed"] = kv.perplexity(rough, scored)
del rough
for name, value in loss.items():
    print(f"{name:<19} perplexity {value:7.3f}, {100 * (value / loss['plain'] - 1):+.2f}%")

# %% tags=["nbval-ignore-output"]
from kvcourse.bench.bytes_read import weights_read

kinds = {"bfloat16": half.model, "int8": eight.model}
ladder = []
for name, seconds in pace.items():
    each = kinds.get(name, model)
    read = weights_read(each) + (moved.cache_read + moved.cache_written) * each.dtype.itemsize / 4
    least = read / ceilings.bytes_per_second
    change = loss[name] / loss["plain"] - 1 if name in kinds else None
    ladder.append((name, 1 / seconds, 1 / least, change))
    print(f"{name:<16} {1 / seconds:7.1f} tokens/s, bound {1 / least:7.1f}, {least / seconds:4.0%} of it; ", end="")
    print(f"{1e3 * seconds:6.2f} ms, {1e3 * (seconds - least):6.2f} of them not the reading")
if any(speed > at_most for _, speed, at_most, _ in ladder):
    print("Over 100%: it reads a little faster than the program that measured the ceiling.")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.speed_ladder(ladder),
    alt=f"From {ladder[0][1]:.0f} tokens a second (plain) over {1 / pace[last]:.0f} ({last}) to {ladder[-1][1]:.0f} "
    "(int8); beside each bar a mark for the bound of its bytes, which rises as the bytes become fewer.",
)

# %% [markdown]
# The fewer the bytes, the farther a step tends to be from its bound: compare the last column, the rest in milliseconds,
# of the compiled rungs. A part of the rest is the same for every kind of weights (calling programs from Python, the
# small operations), and its share grows as the reading shrinks. Another part is new: numbers must be widened,
# activations rounded, and that no longer hides behind the reading. In a profile of SmolLM2 in int8, on another occasion
# and with two cores, one layer was one program of 0.23 ms; 30 of them took 6.8 ms, the head 1.1 ms, and calling them
# from Python 2.3 ms.
#
# Four bits would halve the bytes once more. `kv.compiled(lm, "int4")` has them (32 weights to a scale, rounded to
# nearest); `kvcourse bench` times it and measures what rounding to nearest costs. The better roundings of notebook 08
# cost less and run on the same kernel.
#
# ## The same trace on several engines
#
# How does this compare with what others use? The rules of a fair race:
#
# - the same weights, the same prompts (as token ids), greedy decoding, the same number of new tokens;
# - first the answers are compared, then the times: who computes something else may be as fast as it likes;
# - the time of each is measured where its user is: from the request to each token.
#
# ### Exercise: gap_percentile
#
# ●●○ · 6 minutes
#
# `answers` is a list with one list for each request: the seconds, counted from its sending, at which its tokens came.
# Write the p-th percentile (0 < p < 100) of all gaps between tokens of one answer, as `numpy.percentile` has it.
#
# Why it matters: "p99 inter-token latency" is in every contract. Load testers have counted the wait for the first token
# as a gap, or the time between the last token of one answer and the first of another.
#
# <details><summary>Hint 1</summary>n tokens have n - 1 gaps: the first arrival is no gap.</details>
# <details><summary>Hint 2</summary>Collect the gaps of all answers in one list, then take the percentile of that.
# </details>


# %% tags=["exercise"]
def gap_percentile(answers, p):
    """The p-th percentile of the gaps, in seconds."""
    # SOLUTION
    gaps = [after - before for times in answers for before, after in zip(times, times[1:], strict=False)]
    return float(np.percentile(gaps, p))
    # END SOLUTION


# %%
kv.check.gap_percentile(gap_percentile)

# %% [markdown]
# The trace: four prompts of different lengths, eight new tokens each. It is played twice, by one user who waits for
# each answer, and by four at once.

# %%
from kvcourse.serving.engine import Engine
from kvcourse.serving.replay import replay
from kvcourse.serving.workload import Arrival

lengths, new = (24, 32, 48, 64), 8
prompts = [text[100 * i : 100 * i + n] for i, n in enumerate(lengths)]
trace = [Arrival(0.0, prompt, new) for prompt in prompts]


# %%
def gap(answers, p=50):
    """The p-th percentile of the time between two tokens of an answer (50: the median), seconds: your exercise, from
    the gaps that the package has noted."""
    return float(np.percentile([gap for answer in answers for gap in answer.itl], p))


def ran(alone, together=None):
    """What is compared of a program: its answers, and the gap between tokens for one user and for four at once."""
    first = statistics.median(answer.ttft for answer in alone)
    found = {"ids": [answer.ids for answer in alone], "ttft": first, "gap": gap(alone), "p99": gap(alone, 99)}
    return found | {"gap of four": gap(together) if together else None}


def in_words(found):
    """The times of one user, as a line."""
    times = (1e3 * found[name] for name in ("ttft", "gap", "p99"))
    return "TTFT {:6.0f} ms, a gap of {:6.1f} ms in the median, {:6.1f} at p99".format(*times)


def on_engine(model):
    """The trace on the course's engine."""
    engine = Engine(model, num_blocks=64, prefix_caching=False)
    replay(engine, trace[:1])  # the warm-up
    alone = [replay(engine, [arrival]).served[0] for arrival in trace]
    return ran(alone, replay(engine, trace).served)


# %% tags=["nbval-ignore-output"]
course = {"plain engine": on_engine(model), "compiled engine": on_engine(fast.model)}
for name, found in course.items():
    print(f"{name:<16} {in_words(found)}")
plain_gap, compiled_gap = (course[name]["gap"] for name in ("plain engine", "compiled engine"))
print(f"the compiled engine takes {compiled_gap / plain_gap:.2f} times the plain one's gap, ", end="")
print(f"and {compiled_gap / pace[last]:.2f} times a step of '{last}' with a dense cache")

# %% [markdown]
# (With so few gaps, p99 is nearly the largest one.) If the compiled engine is hardly faster than the plain one, this is
# why: its cache comes in pages, and the function for a whole layer does not reach into pages. So the engine runs
# *pieces*, which leave the products to the library, as above. To gain more, an attention that reads pages would be
# needed inside the compiled layer.
#
# **transformers** gets our weights, shared and not copied. It is what most people try first.


# %% tags=["nbval-ignore-output"]
def on_transformers(model):
    """The trace on Hugging Face's `generate`."""
    from kvcourse.bench.peers import to_transformers
    from kvcourse.bench.transformers_rows import Clock

    peer, alone = to_transformers(model), []
    for prompt in [prompts[0], *prompts]:  # the first is the warm-up
        clock, tokens = Clock(model.device, len(prompt)), torch.tensor([prompt], device=model.device)
        options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=new)
        peer.generate(tokens, attention_mask=torch.ones_like(tokens), streamer=clock, **options)
        alone.append(clock.generation)
    return ran(alone[1:])


others = {}
try:
    others["transformers"] = on_transformers(model)
    print(f"transformers: {in_words(others['transformers'])}")
except (ImportError, RuntimeError, ValueError) as error:
    print(f"transformers is left out: {error}")

# %% [markdown]
# **llama.cpp** gets a file. `kv.write_gguf` writes our float32 weights as one; the chat model came as one, with most of
# its weights in 4 bits. Both are served here, by llama.cpp's own server, on this computer only and for as long as the
# cell runs. `kv.meter` sends the trace to it, as it would to any server that speaks the language of OpenAI's interface,
# and notes when each token comes back.


# %% tags=["nbval-ignore-output"]
def metered(url):
    """The trace on a server: one user, then four at once."""
    asking = dict(new_tokens=new, extra={"logprobs": 1, "return_token_ids": True}, ignore_eos=True, progress=False)
    one, four = (kv.meter(url, prompts, concurrency=users, **asking) for users in (1, len(prompts)))
    for report in (one, four):
        if len(report.finished) < len(prompts):
            raise RuntimeError(f"it did not answer all requests; {(report.failed or report.records)[0].error}")
    found = {"ids": [record.token_ids for record in one.records], "ttft": statistics.median(one.ttft)}
    return found | {"gap": gap(one.records), "p99": gap(one.records, 99), "gap of four": gap(four.records)}


def on_llama_cpp(path):
    """The trace on a llama.cpp server, which is started for it; without its prefix cache, since prompts come twice."""
    from kvcourse.endpoint.server import llama_cpp_server

    with llama_cpp_server(path, slots=4, context=256, float32_cache=True, prefix_caching=False) as url:
        return metered(url)


# %% tags=["nbval-ignore-output"]
from kvcourse.weights.fetch import model_file

folder = tempfile.TemporaryDirectory(prefix="kvcourse-")
source = None if lm.name in kv.COURSE_MODELS else checkpoint  # where the tokenizer of your own model is
files = {"llama.cpp, float32": lambda: kv.write_gguf(lm, Path(folder.name) / "float32.gguf", source=source)}
if lm.name == "smollm2-135m":
    files["llama.cpp, 4 bits"] = lambda: model_file(lm.name)
for name, path in files.items():
    try:
        others[name] = on_llama_cpp(path())
        print(f"{name}: {in_words(others[name])}")
    except (ImportError, RuntimeError, OSError, ValueError) as error:
        print(f"{name} is left out: {error}")

# %% [markdown]
# **Any server you have.** Set the environment variable `KVCOURSE_ENDPOINT` to its address before you start Jupyter, and
# it is measured too. It should serve this very model: `kv.export_hf(lm, "smollm2-hf")` writes a folder that others
# load. On a machine with a GPU, for example (these commands are not run here; see vLLM's "OpenAI-Compatible Server",
# https://docs.vllm.ai/en/latest/serving/online_serving/openai_compatible_server/, and SGLang's "Server Arguments",
# https://docs.sglang.io/docs/advanced_features/server_arguments):
#
# ```text
# vllm serve ./smollm2-hf --served-model-name smollm2 --dtype float32 --max-model-len 2048 --port 8000
# python -m sglang.launch_server --model-path ./smollm2-hf --dtype float32 --port 30000
# ```

# %% tags=["nbval-ignore-output"]
endpoint = os.environ.get("KVCOURSE_ENDPOINT")
try:
    if endpoint:
        others[endpoint] = metered(endpoint)
    print(
        f"{endpoint}: {in_words(others[endpoint])}"
        if endpoint
        else "KVCOURSE_ENDPOINT is not set: no further server is measured."
    )
except (ImportError, RuntimeError, ValueError) as error:
    print(f"{endpoint} is left out: {error}")

# %% [markdown]
# ### The same tokens?
#
# Programs that compute the same sums in another order get scores that differ by a little. As long as the best token is
# ahead of the second by more than that, all choose the same. Where two tokens are nearly level, rounding decides; from
# there on two texts may part, and neither is wrong. So we compare up to the first difference, and look at how far the
# two tokens are apart there. Less than 0.001 counts as level.

# %% tags=["nbval-ignore-output"]
reference, level = course["plain engine"]["ids"], 1e-3


@torch.inference_mode()
def where_it_parts(ids):
    """(tokens that are the same, the gap of scores at each first difference) against the plain engine's answers."""
    same, gaps = 0, []
    for prompt, ours, theirs in zip(prompts, reference, ids, strict=True):
        parts_at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) == 2), None)
        same += new if parts_at is None else parts_at
        if parts_at is not None:
            scores = model(torch.tensor([prompt + ours[:parts_at]]), last_only=True)[0, -1]
            gaps.append(float(scores[ours[parts_at]] - scores[theirs[parts_at]]))
    return same, gaps


answers = {name: found["ids"] for name, found in {**course, **others}.items() if all(found["ids"])}
with switched(eight.model, compiling=False):
    answers["int8"] = [kv.generate(eight.model, prompt, new).ids for prompt in prompts]
for name, ids in answers.items():
    same, gaps = where_it_parts(ids)
    apart = f"; part where ours is ahead by {', '.join(f'{gap:.4f}' for gap in gaps)}" if gaps else ""
    print(f"{name:<19} {same} of {new * len(prompts)} tokens as the plain engine's{apart}")
print(f"int8 parts in {len(where_it_parts(answers['int8'])[1])} of {len(prompts)} answers")

# %% tags=["nbval-ignore-output"]
exact = [name for name in answers if name in ("compiled engine", "transformers", "llama.cpp, float32")]
agree = all(gap <= level for name in exact for gap in where_it_parts(answers[name])[1])
print(f"{', '.join(exact)}: the same tokens, or level ones: {agree}")

# %% [markdown]
# If the line above ends in True, the programs in float32 agree. Those with rounded weights or activations may go their
# own way sooner or later, first where two tokens were close. A small rise of perplexity does not mean the same text:
# the next token is about as well guessed, and yet an answer may part early. (The 4-bit file has the very weights of our
# model, since the model was read from it. What differs there is that llama.cpp rounds the *activations* to 8 bits,
# block by block.)
#
# ### The gap, taken apart
#
# Now the times. For each program: what reading its weights takes at the bandwidth of this machine, what reading the
# cache takes, and what is left of the gap between two tokens. That rest is *overhead*: arithmetic that does not hide
# behind the reading (4-bit weights must be widened), small operations, Python, sampling, and for a server HTTP.
#
# The rest can come out below zero. A few percent are noise, since the ceiling was measured at another moment. More than
# that means something: the ceiling is what *PyTorch* reads in a second, of one large matrix. Another program may read
# faster, or find a part of the weights in the processor's own cache, which then need not come from memory again. Such
# a program is said to be faster than the ceiling below, and its bar has a dashed end.

# %% tags=["nbval-ignore-output"]
held = statistics.mean(lengths) + new / 2  # tokens before a step, on average
cache_time = kv.bytes_moved(config, 1, round(held), bits=32).cache_read / ceilings.bytes_per_second
sizes = {"llama.cpp, 4 bits": model_file(lm.name).stat().st_size} if len(files) == 2 else {}
apart = {}
for name, found in {**course, **others}.items():
    weights_time = sizes.get(name, weights_read(model)) / ceilings.bytes_per_second
    reading = weights_time + cache_time
    rest = found["gap"] - reading
    apart[name] = {"weights": weights_time, "cache": cache_time, "overhead": rest}
    rate = ceilings.bytes_per_second * reading / found["gap"] / 1e9
    said = f"{rest / found['gap']:4.0%} of it overhead" if rest >= 0 else "none of it overhead:"
    print(f"{name:<19} {1e3 * found['gap']:6.1f} ms between tokens, {said}")
    if rest < 0:
        print(f"{'':<19} faster than the ceiling: {rate:.1f} GB a second, not {ceilings.bytes_per_second / 1e9:.1f}")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.time_apart(apart, "Between two tokens, one user"),
    alt="Time between two tokens: "
    + ", ".join(f"{name} {1e3 * sum(part.values()):.1f} ms" for name, part in apart.items())
    + "; each bar is cut into reading weights, reading the cache, and the rest"
    + "".join(f"; {name} is faster than the ceiling" for name, part in apart.items() if part["overhead"] < 0)
    + ".",
)
most = max(part["cache"] / sum(part.values()) for part in apart.values())
print(f"The cache is at most {most:.2%} of a bar here{': too little to be seen' if most < 0.005 else ''}.")

# %% [markdown]
# The last part is *scheduling*: what happens when several users come at once. An engine that takes them through the
# model together reads the weights once for all of them. One that serves them in turn gains nothing.

# %% tags=["nbval-ignore-output"]
users = {}  # tokens a second, all users together, while they decode
for name, found in {**course, **others}.items():
    together = found["gap of four"] and len(prompts) / found["gap of four"]
    users[name] = one, four = 1 / found["gap"], together
    gain = "serves one at a time" if four is None else f"{four:6.1f} with four at once, {four / one:.1f} times"
    print(f"{name:<19} {one:6.1f} tokens/s with one user; {gain}")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.users_at_once(users, len(prompts)),
    alt="Tokens a second with one user and with four at once: "
    + "; ".join(
        f"{name} {one:.0f} and {'not several at once' if four is None else f'{four:.0f}'}"
        for name, (one, four) in users.items()
    )
    + ".",
)

# %% tags=["nbval-ignore-output"]
from kvcourse.context_cost import DATA_SHEETS, crossover

gpu = DATA_SHEETS["H200 141 GB"]
print(f"an {gpu.device} reads {gpu.bytes_per_second / ceilings.bytes_per_second:,.0f} times as much a second ", end="")
print("(by its data sheet) as this machine (measured)")

# %% [markdown]
# What do engines such as vLLM and SGLang have that ours has not? By the same parts:
#
# - *weights and cache*: the same bytes, on a GPU with that many times the bandwidth; kernels that read pages directly,
#   and weights in FP8 or 4 bits.
# - *overhead*: a step's kernels are recorded once and started with one call (CUDA graphs); the next step is planned by
#   the CPU while the GPU still works on this one.
# - *scheduling*: what notebook 06 built, with priorities, aborts, and prompts cut in chunks; and several machines.
#
# ## A prefix cache, seen from outside
#
# Notebook 07 built one. A provider's cannot be looked into, but it shows itself: a prompt that begins as an earlier one
# did gets its first token sooner. We send prompts of two kinds, one after the other: some that share all but their
# end, and some that share nothing.
#
# **Predict.** TTFT of a prompt whose beginning is known, in percent of TTFT of one that is new?

# %%
my_guess = 20  # PREDICT
asked = "TTFT with a known beginning against a new one, seen from outside?"
kv.results.predict("10.known_beginning", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
draws = random.Random(0)
common, ending = config.fitting([192], room=17)[0], 16
ids = [[draws.randrange(3, config.vocab_size) for _ in range(common + ending)] for _ in range(5)]
known = [ids[0][:common] + other[common:] for other in ids[1:3]]
asks = [("new", ids[0]), *(("known", prompt) for prompt in known), ("new", ids[3]), ("new", ids[4])]


# %%
def waited(ttft, found):
    """Median TTFT of each kind, and the share of a known prompt's tokens that was found (None: nobody says)."""
    kinds = {kind: [t for t, (each, _) in zip(ttft, asks, strict=True) if each == kind] for kind in ("new", "known")}
    seconds = {kind: statistics.median(times) for kind, times in kinds.items()}
    return seconds, None if found is None else found / (common + ending)


def from_server(url):
    """The prompts to a server, one after the other."""
    sent = dict(new_tokens=1, concurrency=1, ignore_eos=True, progress=False)
    records = kv.meter(url, [prompt for _, prompt in asks], **sent).records
    return waited([record.ttft for record in records], records[2].cached_tokens)


def from_engine(engine):
    """The same to the course's engine."""
    served = []
    for _, prompt in asks:
        number = engine.submit(prompt, 1)
        served.append(engine.run()[number])
    return waited([answer.ttft for answer in served], served[2].cached_tokens)


# %% tags=["nbval-ignore-output"]
waits = {"compiled engine": from_engine(Engine(fast.model, num_blocks=128))}
try:
    from kvcourse.endpoint.server import llama_cpp_server

    with llama_cpp_server(list(files.values())[-1](), context=512) as url:
        waits[list(files)[-1]] = from_server(url)
except (ImportError, RuntimeError, OSError, ValueError) as error:
    print(f"llama.cpp is left out: {error}")
for name, (seconds, share) in waits.items():
    told = "does not say what it found" if share is None else f"found {share:.0%} of the tokens"
    print(f"{name}: {1e3 * seconds['new']:.0f} ms new, {1e3 * seconds['known']:.0f} ms known; {told}")

# %% tags=["nbval-ignore-output"]
outside = list(waits)[-1]
seconds, _ = waits[outside]
note = f"{outside}, {common} of {common + ending} tokens known"
kv.results.measure("10.known_beginning", 100 * seconds["known"] / seconds["new"], unit="%", note=note)

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.known_beginnings({name: seconds for name, (seconds, _) in waits.items()}),
    alt="TTFT of prompts with a new and with a known beginning: "
    + "; ".join(f"{name} {1e3 * s['new']:.0f} and {1e3 * s['known']:.0f} ms" for name, (s, _) in waits.items())
    + ".",
)

# %% [markdown]
# Anybody who can send prompts and read a clock can see this. It is how one finds out what a provider keeps and for how
# long. It is also why caches are kept apart between customers: a short wait tells that somebody sent the same before.
#
# If llama.cpp takes longer for a new prompt than the course's engine, though its step is quicker, its weights may be
# the reason: those in 4 bits must be widened for a prompt too. That saves reading, which a prompt does not wait for,
# and adds arithmetic, which it does.
#
# ## Past one machine
#
# ### Cutting a layer: tensor parallelism
#
# A model that is too large for one device, or too slow there, is cut. The usual cut goes through every layer
# (**tensor parallelism**): each of the *ranks* (processes, one for each GPU) holds some of the heads and a part of the
# feed-forward layer, computes its part of the result, and then all parts are added. That sum is an **all_reduce**, two
# for each layer.
#
# We run it, on two processes of this machine, with one of the course's own models (its two KV heads can be shared out
# to two ranks; those of SmolLM2, three of them, cannot).

# %%
small = kv.load_model("tiny-gqa", dtype=torch.float64, device="cpu")  # in float64, equal means equal
question = small.encode("Mia put the red kite in the shed. Then")
alone = kv.generate(small.model, question, 12)
parallel = kv.run_parallel(small, question, 12, world=2)
whole_cache = DenseCache(small.config, 1, len(question) + 11, torch.float64, "cpu").nbytes
print("the same tokens:", parallel.tokens == alone.ids)
print(f"cache of each rank: {[n / whole_cache for n in parallel.cache_bytes]} of the whole")
print(f"all_reduces: {parallel.all_reduces}, in {12} passes through {small.config.n_layers} layers")

# %% [markdown]
# (It is no faster here: two processes on one machine share its memory. What it shows is that the sum is right, and what
# has to be sent.)
#
# How much is that? Ranks stand in a **ring**. Each cuts its numbers into as many pieces as there are ranks, and passes
# one piece at a time to its neighbor, who adds its own: after `world` - 1 rounds each piece is summed up somewhere.
# After as many rounds more everybody has all of them.
#
# ### Exercise: ring_bytes
#
# ●●○ · 6 minutes
#
# Write how many bytes each of `world` ranks sends for **one token**, in a model of `n_layers` layers and width
# `d_model`, with numbers of `bits` bits: two all_reduces a layer, of `d_model` numbers each, around a ring.
#
# Why it matters: it decides over which wires a model may be cut.
#
# <details><summary>Hint 1</summary>A piece has d_model / world numbers, and a rank sends one in each round.</details>
# <details><summary>Hint 2</summary>There are 2 (world - 1) rounds in one all_reduce.</details>


# %% tags=["exercise"]
def ring_bytes(n_layers, d_model, bits, world):
    """Bytes that each rank sends for one token."""
    # SOLUTION
    rounds, piece = 2 * (world - 1), d_model * bits / 8 / world
    return 2 * n_layers * rounds * piece
    # END SOLUTION


# %%
kv.check.ring_bytes(ring_bytes)

# %%
from kvcourse.parallel import sent_bytes


def ring(shape, world, bits):
    """Bytes that each rank sends for a token, as in the exercise."""
    return 2 * shape.n_layers * shape.d_model * bits / 8 * 2 * (world - 1) / world


by_formula = ring(small.config, world=2, bits=64)
assert by_formula == sent_bytes(small.config, world=2, bits=64), "the package says otherwise"
print(f"sent by each rank for a token: {parallel.sent_bytes:,.0f} bytes; by the closed form {by_formula:,.0f}")

# %% [markdown]
# For a model of 70 billion weights on 8 GPUs, in 16 bits: what does each hold, and how long do its parts of a step
# take? The wires have the speeds of their data sheets, in one direction (cited: NVLink of an H200, 900 GB/s both ways
# together; a network card of 400 Gbit/s; an office network of 10 Gbit/s).

# %%
seventy, world = kv.PUBLISHED["Llama 3.1 70B"], 8
per_rank = kv.weight_bytes(seventy) / world
sending, sums = ring(seventy, world, bits=16), 2 * seventy.n_layers  # for each token: bytes, all_reduces
wires = {"NVLink": 450e9, "400 Gbit/s": 50e9, "10 Gbit/s": 1.25e9}
latency = {"NVLink": 20e-6, "400 Gbit/s": 200e-6, "10 Gbit/s": 200e-6}  # seconds for a sum of any size: assumptions
reading = per_rank / gpu.bytes_per_second
print(f"each GPU holds {per_rank / 1e9:.1f} GB of weights, read in {1e3 * reading:.1f} ms")
print(f"each sends {sending / 1e6:.1f} MB a token, in {sums} all_reduces that all must wait for:")
for name, speed in wires.items():
    by_bytes, waiting = sending / speed, sums * latency[name]
    print(
        f"  {name:<10} {1e3 * by_bytes:7.3f} ms for the bytes, {1e3 * waiting:5.1f} ms of waiting for messages: ",
        end="",
    )
    print(f"{by_bytes / reading:.1%} and {waiting / reading:.0%} of the reading that is left")
print(f"cut between layers instead, {2 * seventy.d_model / 1e3:.1f} KB go from one half to the other")

# %% [markdown]
# By the bytes alone, the sums are lost in the reading within a machine; over 10 Gbit/s they cost about as much as the
# reading that is left. But each sum also waits for a message, however short. That time is **assumed** here, 20 µs for
# an all_reduce within a machine and 200 µs over a network (measure your own). There are 160 sums, one after the other,
# and so waiting is the larger part: within a machine nearly as long as the reading, and over a network nearly nine
# times the reading, even where the bytes fly. It is the number of messages that decides, more than their size. So
# models are cut through the layers inside a machine, and *between* layers across machines (**pipeline parallelism**):
# the first machine has the first half of the layers, and only one vector a token goes over the network. In vLLM (cited
# from "Parallelism and Scaling", https://docs.vllm.ai/en/latest/serving/parallelism_scaling/; nothing of this is run
# here):
#
# ```text
# vllm serve MODEL --tensor-parallel-size 8                       # 8 GPUs of one machine
#
# # two machines with 8 GPUs each: the first command on one, the second on the other
# vllm serve MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2 \
#     --nnodes 2 --node-rank 0 --master-addr ADDRESS_OF_THE_FIRST
# vllm serve MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2 \
#     --nnodes 2 --node-rank 1 --master-addr ADDRESS_OF_THE_FIRST --headless
# ```
#
# ### Prefill here, decode there
#
# Prefill waits for arithmetic, decode for memory, and a long prompt makes everybody else's next token late (notebook
# 06). So the two can be given to different machines: **disaggregated prefill**. What must move between them? Everything
# that decode needs to know of the prompt, and that is the cache:

# %%
from kvcourse.generation import prefill

there = DenseCache(small.config, 1, 64, torch.float64, "cpu")
here = DenseCache(small.config, 1, 64, torch.float64, "cpu")
n = len(question)
first = int(prefill(small.model, [question], there).argmax())  # on one machine
parcel = torch.stack([there.keys[..., :n, :], there.values[..., :n, :]]).clone()  # over the wire
here.keys[..., :n, :], here.values[..., :n, :] = parcel
here.lengths = [n]
after = kv.generate(small.model, [first], 11, cache=here)  # on the other one
print(f"sent {parcel.nbytes:,} bytes; the same tokens: {[first, *after.ids] == alone.ids}")
print(f"as the formula of notebook 04 says: {parcel.nbytes == kv.cache_bytes(small.config, n, bits=64)}")

# %% tags=["nbval-ignore-output"]
from kvcourse.results import format_number

for name, shape, tokens in ((lm.name, config, 512), ("Llama 3.1 70B", seventy, 8192)):
    size = kv.cache_bytes(shape, tokens)
    print(f"{name}: a prompt of {tokens:,} tokens is {size / 1e6:,.1f} MB of cache in 16 bits; ", end="")
    print(", ".join(f"{format_number(1e3 * size / speed)} ms over {wire}" for wire, speed in wires.items()))
least = kv.long_context(seventy, 8192).prefill.seconds
print(f"a prefill of 8,192 tokens takes the 70B at least {least:.1f} s on one {gpu.device}, {least / 8:.2f} s on 8")
for wire, speed in wires.items():
    anew = least * speed / size
    print(f"  that is {format_number(anew)} times as long as sending over {wire}; {format_number(anew / 8)} times on 8")

# %% [markdown]
# Where such a factor is far above one, the parcel is far quicker than computing it anew; near or below one, it had
# better stay. vLLM does it with connectors (cited: "NixlConnector Usage Guide",
# https://docs.vllm.ai/en/latest/features/nixl_connector_usage/). Its documentation says plainly that this is for
# steadier gaps between tokens, and *not* for more throughput ("Disaggregated Prefilling",
# https://docs.vllm.ai/en/latest/features/disagg_prefill/). Each machine runs, with its own address in
# `VLLM_NIXL_SIDE_CHANNEL_HOST`:
#
# ```text
# vllm serve MODEL --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
# ```
#
# and a proxy in front sends each request first to a machine for prefill, and then to one for decode.
#
# ## A million tokens
#
# Statement 28 says: *a window of a million tokens is a memory problem, not an attention-compute problem*. We compute
# both sides for Llama 3 70B, in 16 bits, as if it had been made for such a text. (Operations of attention are counted
# for pairs that see each other, half of the square: what good kernels compute.)
#
# **Predict.** In the prefill of a million tokens, how many times all other operations does attention take?

# %%
my_guess = 1  # PREDICT
asked = "Prefill of a million tokens, 70B: attention against all other operations?"
kv.results.predict("10.million_prefill", my_guess, unit="times", question=asked)

# %%
llama, million = kv.PUBLISHED["Llama 3 70B"], 1_000_000
cost = kv.long_context(llama, million)
attention_times = cost.prefill.attention_flops / cost.prefill.other_flops
kv.results.measure(
    "10.million_prefill", attention_times, unit="times", note=f"at least {cost.prefill.seconds / 60:.0f} min"
)
print(f"held: {cost.cache_bytes / 1e9:.1f} GB of cache and {cost.weight_bytes / 1e9:.1f} GB of weights")
for name, phase in (("prefill", cost.prefill), ("decode step", cost.decode)):
    print(
        f"{name:<12} at least {phase.compute_seconds:9.3f} s of arithmetic and {phase.memory_seconds:6.3f} s of memory "
        f"on one {gpu.device}; the larger part: {phase.binds}"
    )

# %%
in_prefill, in_decode = crossover(llama)
print(
    f"attention is more than all else: in a prefill from {in_prefill:,.0f} tokens on, in a step from {in_decode:,.0f}"
)

# %% [markdown]
# The three sides against the length of the text. What is held and what a step costs grow with it, the attention of the
# prefill with its square. Try other models and lengths; the dotted line is the length chosen.


# %% tags=["nbval-ignore-output"]
def draw(name, tokens_in_thousands):
    """What one text of that length costs, and a sentence about it."""
    shape, chosen = kv.PUBLISHED[name], 1000 * tokens_in_thousands
    costs = {n: kv.long_context(shape, n) for n in sorted({chosen, *(2**power for power in range(10, 21))})}
    one = costs[chosen]
    said = f"{name}, {chosen:,} tokens: {one.cache_bytes / 1e9:.1f} GB of cache beside {one.weight_bytes / 1e9:.1f} GB "
    said += f"of weights; the larger part of a prefill is {one.prefill.binds}, of a step {one.decode.binds}."
    return kv.plots.very_long_text(costs, 141e9, chosen), said


figure, alt = draw("Llama 3 70B", 1000)
kv.plots.show(figure, alt=alt)

# %% tags=["nbval-ignore-output"]
dense = ["Llama 3 70B", "Llama 3.1 8B", "Llama 3.1 405B", "Gemma 3 27B", "Qwen3 32B", "SmolLM2 135M"]
kv.widgets.explore(draw, name=dense, tokens_in_thousands=[1000, 4, 16, 64, 128, 256, 512])

# %% [markdown]
# The verdict has three parts: what is *held*, what a *step* waits for, and what the *prefill* waits for.
#
# - The statement is wrong as said unless the cache of a million tokens takes more than the weights and does not fit on
#   one device, and a decode step waits for memory.
# - It holds with a condition if in the prefill attention takes more operations than everything else.
# - Else it holds.

# %%
held_apart = cost.cache_bytes > cost.weight_bytes and cost.held_bytes > kv.DEVICES["H200 141 GB"]
waits_for_memory = cost.decode.memory_seconds > cost.decode.compute_seconds
kv.results.verdict(
    28,
    "wrong as said"
    if not (held_apart and waits_for_memory)
    else "holds with a condition"
    if attention_times > 1
    else "holds",
    f"Llama 3 70B holds {cost.cache_bytes / 1e9:.1f} GB of cache beside {cost.weight_bytes / 1e9:.1f} GB of weights, "
    f"and a step waits for memory. In the prefill attention takes {attention_times:.1f} times all other operations"
    + (f": {cost.prefill.seconds / 60:.0f} minutes at the peak of one H200." if attention_times > 1 else "."),
)

# %% [markdown]
# ## What it would cost without a cache
#
# The last statement, 29: *without the cache, production would not be viable*. Let us put a price on it. Without a cache
# each token takes a whole pass over the text so far; with it, a step. We measure both after several lengths, with the
# plain model, and take a price for an hour of a machine: 2 dollars, **an assumption**. (Notebook 03 took 1 dollar; the
# ratio depends on neither.) Notebook 02 priced a whole text, from its first token on. This is the last token of one,
# where a missing cache costs the most.
#
# **Predict.** After the longest text below (1,024 tokens for SmolLM2): how many times does a token cost without a
# cache?

# %%
my_guess = 100  # PREDICT
asked = "A token without the cache against one with it, after the longest text: how many times the price?"
kv.results.predict("10.without_cache", my_guess, unit="times", question=asked)


# %% tags=["nbval-ignore-output"]
@torch.inference_mode()
def whole_pass(tokens):
    """Seconds of a token without a cache: all tokens so far go through the model."""
    watch = Stopwatch(model.device)
    model(torch.tensor([tokens]), last_only=True)
    return watch.read()


dollars, spans = 2.00, config.fitting([64, 256, 1024], room=1)
roomy, prices = room_for(model, spans[-1] + 1), {"without a cache": [], "with a cache": []}
step(model, roomy, spans[0])  # the warm-up
for n in spans:
    turns = [(whole_pass(text[:n]), step(model, roomy, n)) for _ in range(3)]
    naive, cached = map(statistics.median, zip(*turns, strict=True))
    for name, seconds in zip(prices, (naive, cached), strict=True):
        prices[name].append(kv.price_per_million(1 / seconds, dollars))
    print(f"after {n:>5,} tokens: {1 / naive:6.2f} tokens/s without, {1 / cached:6.2f} with, ", end="")
    print(f"${prices['without a cache'][-1]:,.2f} and ${prices['with a cache'][-1]:,.2f} for a million")

# %% tags=["nbval-ignore-output"]
dearer = [one / other for one, other in zip(*prices.values(), strict=True)]
note = f"after {spans[-1]:,} tokens, the plain model"
kv.results.measure("10.without_cache", dearer[-1], unit="times", note=note)
engine_price = kv.price_per_million(max(users[name][1] for name in course), dollars)
print(f"at the rate of the course's engine above, four texts at once: ${engine_price:,.2f} for a million")

# %% [markdown]
# That is a small model, and one text at a time. A service has a large one and many users at once. Then the cache is
# worth more: steps of many texts share the reading of the weights, and passes over whole texts share nothing, since
# they wait for arithmetic already. By the closed forms, for the 70B after 8,192 tokens on 8 H200 (16 dollars an hour by
# the same assumption), with 64 texts at once:

# %%
from kvcourse.serving.bill import PRICES

after, at_once, rent = 8192, 64, 8 * dollars
pass_seconds = at_once * kv.long_context(seventy, after).prefill.seconds / 8  # nobody's pass helps another's
flops, nbytes = (each(seventy, 1, after, at_once) for each in (kv.flops, kv.bytes_moved))
step_seconds = kv.roofline(flops, nbytes, gpu).seconds / 8
large = {
    name: kv.price_per_million(at_once / s, rent) for name, s in (("without", pass_seconds), ("with", step_seconds))
}
print(f"at best ${large['without']:,.2f} for a million tokens without a cache, ${large['with']:.2f} with it: ", end="")
print(f"{large['without'] / large['with']:,.0f} times")
listed = {name: rates.output for name, rates in PRICES.items()}
print("listed prices of output, a million:", ", ".join(f"{name} ${price:.2f}" for name, price in listed.items()))
below = {name: sum(price < cost for price in listed.values()) for name, cost in large.items()}
print(
    f"Of these {len(listed)} prices, of other models, {below['without']} would not pay for the 70B's machines ", end=""
)
print(f"without a cache, and {below['with']} would not with one.")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.price_by_length(spans, prices),
    alt=f"Dollars for a million tokens against the length of the text: without a cache from "
    f"${prices['without a cache'][0]:,.2f} to ${prices['without a cache'][-1]:,.2f}, with one from "
    f"${prices['with a cache'][0]:,.2f} to ${prices['with a cache'][-1]:,.2f}.",
)

# %% [markdown]
# When is something *not viable*? Let us say: when it costs ten times as much.
#
# - The statement is wrong as said if without the cache a token costs less than ten times as much both here, after the
#   longest text, and for the 70B by the closed forms.
# - It holds with a condition if one of the prices, of those measured here and the one computed, is less than ten times
#   as high.
# - Else it holds.

# %% tags=["nbval-ignore-output"]
by_form = large["without"] / large["with"]
below = [f"{factor:.1f} times after {n:,} tokens" for n, factor in zip(spans, dearer, strict=True) if factor < 10]
kv.results.verdict(
    29,
    "wrong as said"
    if max(dearer[-1], by_form) < 10
    else "holds with a condition"
    if below or by_form < 10
    else "holds",
    f"Without the cache a token costs {dearer[-1]:.1f} times as much after {spans[-1]:,} tokens here, and at least "
    f"{by_form:,.0f} times for a 70B model after {after:,} with {at_once} users."
    + (f" It depends on the length: only {', '.join(below)}." if below else ""),
)

# %% [markdown]
# ## Twenty-nine statements
#
# The course began with statements that one reads everywhere about fast inference. Here are all of them, with the
# verdicts that your own measurements gave, and the notebook that each comes from. Those of notebooks that you have not
# run on this machine say "not measured here".

# %% tags=["nbval-ignore-output"]
from kvcourse.statements import STATEMENTS

NOTEBOOKS = {
    "00": [1],
    "01": [3],
    "02": [2, 4, 5, 6],
    "03": [7, 8, 9, 10, 11],
    "04": [13, 14, 15, 17],
    "05": [18],
    "06": [19],
    "07": [12],
    "08": [20, 21, 22, 23, 24, 26, 27],
    "09": [16, 25],
    "10": [28, 29],
}
judged_in = {number: notebook for notebook, numbers in NOTEBOOKS.items() for number in numbers}
verdicts = kv.results.verdicts()
for number, statement in STATEMENTS.items():
    found = verdicts.get(number)
    verdict = f"{found.verdict}. {found.because}" if found else "not measured here"
    lines = f"{number:>2} ({judged_in[number]}) {statement}", f"      {verdict}"
    print("\n".join(textwrap.fill(line, 118, subsequent_indent=" " * 8) for line in lines))

# %% tags=["nbval-ignore-output"]
tally = Counter(finding.verdict for finding in verdicts.values())
said = ", ".join(f"{count} {verdict}" for verdict, count in tally.most_common())
kv.plots.show(
    kv.plots.verdict_board({n: verdicts[n].verdict if n in verdicts else None for n in STATEMENTS}),
    alt=f"Verdicts on {len(STATEMENTS)} statements: {said}; {len(STATEMENTS) - len(verdicts)} not measured here.",
)

# %% [markdown]
# If many of them hold *with a condition*, that is the lesson. Each of these sentences is true somewhere: at some
# length, for some batch, on some machine. What you have now is not the sentences but the conditions, and a way to find
# them.
#
# ## Summary

# %% tags=["nbval-ignore-output"]
kv.results.summary("10")

# %% [markdown]
# Your guesses beside what was measured: within the band they were at most a factor of two off. The farther from 1, the
# more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("10")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# **What to remember**
#
# 1. Bytes divided by bandwidth is the bound of a step. First measure how far you are from it, then say why.
# 2. Near the bound only fewer bytes help. Far from it, first find which part is far from its bound, and mend that one:
#    joining and compiling what is small gains little where the products are the trouble.
# 3. A faster engine that answers otherwise is another engine. Compare tokens, and where they part, compare scores.
# 4. The gap between two engines has four parts: weights, cache, overhead, scheduling. Each has its own remedy.
# 5. Cut through layers where wires are fast, between layers where they are slow; what moves from prefill to decode is
#    the cache.
# 6. A million tokens are memory to hold and to decode from, and arithmetic to read.
#
# ## What the field does today
#
# - vLLM (arXiv 2309.06180) and SGLang (arXiv 2312.07104) put all of this course into one program: pages, continuous
#   batching, prefix caches, quantized weights and caches, many GPUs. Both compile the model with `torch.compile` or
#   have fused kernels of their own, and start whole steps as CUDA graphs.
# - gpt-fast ("Accelerating Generative AI with PyTorch II: GPT, Fast", PyTorch blog, November 2023) went from 25 to over
#   200 tokens a second for a 7B model in a thousand lines of PyTorch, along the same ladder: compile, fewer bits, guess
#   ahead, cut over GPUs.
# - SmoothQuant (arXiv 2211.10438) and LLM.int8() (arXiv 2208.07339) multiply in whole numbers; on newer GPUs numbers in
#   FP8, which keep an exponent each, do it with less care.
# - Megatron-LM (arXiv 1909.08053) cut layers as we did; Ring Attention (arXiv 2310.01889) cuts the *text* over
#   machines, which is how a million tokens are read in time.
# - DistServe (arXiv 2401.09670), Splitwise (arXiv 2311.18677) and Mooncake (arXiv 2407.00079) send prefill and decode
#   to different machines.
# - FlashAttention-2 (arXiv 2307.08691) made attention as fast as its arithmetic allows. It does not make its arithmetic
#   less: sparse attention does, such as DeepSeek's NSA (arXiv 2502.11089), and models with windows or state in most of
#   their layers.
#
# **Where to go next.** Read an engine: nano-vllm is one in about 1,200 lines of Python (by its README). Run `kvcourse
# bench --peers` on your machine, and `kvcourse meter URL` on a server of your own. Take a model that you care about,
# export it with `kv.export_hf`, serve it, and find the part of its gap that can be mended.

# %% tags=["nbval-ignore-output"]
kv.check.progress("10")
