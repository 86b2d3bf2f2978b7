# %% [markdown]
# # 3. Prefill and decode
#
# **Time:** about 75 minutes · **Device:** any (CPU is enough). On Colab this notebook asks for a GPU, whose two speeds
# lie further apart; *Runtime > Change runtime type* goes back to the CPU.
#
# **You will be able to**
#
# - take an answer apart into its two phases and say how each grows with length;
# - count operations per byte, and say from two measured ceilings what limits a pass;
# - say whether a decode step reads more weights or more cache, by context and batch;
# - use spare arithmetic three ways: a prompt in pieces, many texts in a batch, guesses about the next tokens;
# - derive from the clock why output tokens are sold for more than input tokens.
#
# {{colab_badge}}

# %% tags=["setup", "gpu"]
# SETUP

# %% tags=["nbval-ignore-output"]
import statistics

import numpy as np
import torch

from kvcourse.metrics import Stopwatch

checkpoint = "smollm2-135m"  # or your own, with a context of 256 tokens or more
lm = kv.load_model(checkpoint)
model, config = lm.model, lm.config
bits = 8 * model.dtype.itemsize
usual = min(512, config.max_seq_len // 2)  # tokens of prompt that we come back to
on_gpu = model.device.type == "cuda"
print(f"{lm.name} on {model.device} in {model.dtype}: {kv.weight_bytes(config, bits) / 1e6:,.0f} MB of weights")

# %% [markdown]
# ## Two phases, one kind of pass
#
# An answer is made in two phases. **Prefill** runs the whole prompt through the model in one pass; out comes the first
# token. **Decode** then runs one token in each pass; out comes the next. The code is the same for both. A pass differs
# from another only in three numbers: how many *new tokens* it runs for each text, how many the cache holds already (the
# *context*), and how many texts run together (the *batch*).
#
# So one stopwatch serves this whole notebook. The time does not depend on which numbers the cache holds, so we fill it
# with one constant and tell it how many tokens it has. It must be filled, though: memory that was never written is not
# really there yet, and reading it would be too quick. Short passes jitter more than long ones, so they are run more
# often; what was measured is kept.

# %%
timed = {}


def pass_time(new_tokens, context=0, batch_size=1, last_only=True):
    """Median seconds of one pass over `new_tokens` tokens for each of `batch_size` texts that hold `context`."""
    key = new_tokens, context, batch_size, last_only
    if key not in timed:
        cache = kv.DenseCache(config, batch_size, context + new_tokens, model.dtype, model.device)
        cache.keys.fill_(0.01)
        cache.values.fill_(0.01)
        tokens = torch.zeros(batch_size, new_tokens, dtype=torch.int64)
        rows, readings = new_tokens * batch_size, []
        for _ in range(5 if rows <= 16 else 3 if on_gpu else 2 if rows <= 512 else 1):
            cache.lengths = [context] * batch_size
            watch = Stopwatch(model.device)
            model(tokens, cache=cache, last_only=last_only)
            readings.append(watch.read())
        timed[key] = statistics.median(readings)
    return timed[key]


# %% [markdown]
# Is that really what a user waits for? We write a short answer to a real prompt and compare: the time to first token
# (TTFT) with the pass over the prompt, a later gap with the pass over one token.

# %%
text = (
    "The lighthouse keeper counts the ships at dusk. On Monday there were eleven, on Tuesday nine, and on Wednesday, "
    "in the fog, not a single one."
)
prompt = (lm.encode(text) * 12)[:256]
print(f"{len(prompt)} tokens of prompt")

# %% tags=["nbval-ignore-output"]
answers = [kv.generate(model, prompt[:128], 8) for _ in range(3)]
first_wait = statistics.median(answer.ttft for answer in answers)
later_wait = statistics.median(answer.percentile(50) for answer in answers)
prefill_share, decode_share = pass_time(128) / first_wait, pass_time(1, 128) / later_wait
print(f"TTFT       {1e3 * first_wait:8.1f} ms, the pass alone {1e3 * pass_time(128):8.1f} ms")
print(f"median gap {1e3 * later_wait:8.1f} ms, the pass alone {1e3 * pass_time(1, 128):8.1f} ms")
print(f"the passes are {prefill_share:.0%} of TTFT and {decode_share:.0%} of the gap (timing jitters a little)")

# %% [markdown]
# ## Two ceilings
#
# Whatever a program does, a processor has two speeds: how many operations it does in a second, and how many bytes it
# reads from memory in a second, the **memory bandwidth**. Both are **ceilings**. We do not take them from a data sheet,
# we measure them: the one with a product of two large matrices, the other by reading a matrix of a gigabyte. So here a
# ceiling is the highest rate that a program of this course reaches on this machine. It is no law: another program may
# read a little faster, and numbers that stay in the processor's own cache are not read from memory again.

# %% tags=["nbval-ignore-output"]
ceilings = kv.measure_ceilings(model.device, model.dtype)
print(f"arithmetic: {ceilings.flops_per_second / 1e9:10,.0f} billion operations a second ({ceilings.dtype})")
print(f"memory:     {ceilings.bytes_per_second / 1e9:10,.1f} billion bytes a second")

# %% [markdown]
# The cost model of the package counts what a pass must do at least: `kv.flops` its operations, `kv.bytes_moved` the
# bytes it has to read and write. Take a prompt of 512 tokens and a single token after it:

# %%
for phase, new, context in ((f"prefill of {usual} tokens", usual, 0), ("one decode step", 1, usual)):
    operations, moved = kv.flops(config, new, context), kv.bytes_moved(config, new, context, bits=16)
    print(f"{phase:<22} {operations.total / 1e9:6.2f} billion operations; in 16 bits")
    print(f"    {moved.weights / 1e6:.0f} MB of weights, {moved.cache_read / 1e6:4.1f} MB of cache read, ", end="")
    print(f"{moved.cache_written / 1e6:4.1f} MB written")

# %% [markdown]
# ### Exercise: least_time
#
# ●○○ · 4 minutes
#
# A pass does `flops` operations and reads `nbytes` bytes. The machine does `flops_per_second` and reads
# `bytes_per_second`. Processors compute while they read. Write the least time the pass can take, in seconds.
#
# Why it matters: this one line is the **roofline**. It says how fast a pass can be at these two speeds, so it tells you
# when to stop tuning, and which of the two to buy.
#
# <details><summary>Hint 1</summary>How long does the arithmetic take alone? How long the reading?</details>
# <details><summary>Hint 2</summary>If both go on at the same time, the work is done when the slower one is.</details>


# %% tags=["exercise"]
def least_time(flops, nbytes, flops_per_second, bytes_per_second):
    """The least seconds for so many operations and bytes, computing and reading at once."""
    # SOLUTION
    return max(flops / flops_per_second, nbytes / bytes_per_second)
    # END SOLUTION


# %%
kv.check.least_time(least_time)

# %% [markdown]
# `kv.roofline` does the same and says which of the two counts. We will ask it often, so here is a short form:


# %%
def roof(new_tokens, context=0, batch_size=1, last_only=True):
    """The best that this machine can do for a pass: `.seconds`, `.limit`, `.intensity`."""
    operations = kv.flops(config, new_tokens, context, batch_size, last_only)
    return kv.roofline(operations, kv.bytes_moved(config, new_tokens, context, batch_size, bits), ceilings)


# %% [markdown]
# ## How each phase grows
#
# Now the two phases against their lengths: TTFT against the prompt, the gap against the context. These lengths will be
# timed:

# %% tags=["nbval-ignore-output"]
prompts = config.fitting([2**i for i in range(14 if on_gpu else 11)])  # shorter ones where the context is shorter
contexts = config.fitting([16, 2000, 4000, 8000], room=1)
long, short = prompts[-1], prompts[-1] // 8
print("tokens of prompt:", prompts)
print("context:         ", contexts)

# %% [markdown]
# **Predict.** The longest prompt is eight times as long as the one three places before it. How many times as long is
# its TTFT?

# %%
my_guess = 8  # PREDICT
kv.results.predict("03.ttft_growth", my_guess, unit="times", question="Prompt 8 times as long: TTFT?")

# %% tags=["nbval-ignore-output"]
ttft, gaps = [pass_time(n) for n in prompts], [pass_time(1, n) for n in contexts]
for n, seconds in zip(prompts, ttft, strict=True):
    print(f"{n:>6,} tokens of prompt: {1e3 * seconds:8.1f} ms, {1e3 * seconds / n:7.2f} ms for each")
counted = kv.flops(config, long).total / kv.flops(config, short).total
growth = kv.results.measure(
    "03.ttft_growth", pass_time(long) / pass_time(short), unit="times", bound=counted, note="bound: by count"
)

# %% [markdown]
# Look at the last column. One token alone is dear; in the company of others it gets cheaper, until there is nothing
# more to gain. Keep that in mind: it is the key to this notebook.
#
# To see what grows and how, we fit a curve to each phase: constant + so much for each token + so much for each *pair*
# of tokens for prefill, and constant + so much for each token held for decode. Very short prompts are left out of the
# fit, since there time hardly depends on length.


# %%
def fit(sizes, seconds, degree):
    """Coefficients, the constant first, of the polynomial with the least relative errors."""
    return np.polyfit(sizes, seconds, degree, w=1 / np.asarray(seconds))[::-1]


def where_equal(one, other):
    """The length at which `other` x length has grown to `one`; None when one of them is not above 0."""
    return one / other if one > 0 and other > 0 else None


# %% tags=["nbval-ignore-output"]
fit_from = min(512 if on_gpu else 64, prompts[-3])
fitted = [n for n in prompts if n >= fit_from]
prefill_fit = fit(fitted, [pass_time(n) for n in fitted], 2)
gap_fit = fit(contexts, gaps, 1)
figure = kv.plots.phases(
    prompts,
    ttft,
    [kv.flops(config, n).total / ceilings.flops_per_second for n in prompts],
    contexts,
    gaps,
    [kv.bytes_moved(config, 1, n, bits=bits).total / ceilings.bytes_per_second for n in contexts],
    prefill_fit,
    gap_fit,
    fit_from,
)
alt = (
    f"Left: TTFT grows from {1e3 * ttft[0]:,.0f} to {1e3 * ttft[-1]:,.0f} ms and comes near its bound only for long "
    f"prompts. Right: the gap goes from {1e3 * gaps[0]:,.0f} to {1e3 * gaps[-1]:,.0f} ms."
)
kv.plots.show(figure, alt=alt)

# %% [markdown]
# Prefill has a part for each pair of tokens, because attention compares each token with those before it. Decode has a
# large constant, because each step reads all weights. Where do these parts take over? The code says what it finds in
# the times of this machine, beside what the counts say; timings jitter, so a fit can also find nothing.

# %% tags=["nbval-ignore-output"]
per_token, per_pair = prefill_fit[1:]
one, step = kv.flops(config, 1), kv.bytes_moved(config, 1)
found = {
    "prefill: pairs cost as much as tokens, by operations": where_equal(one.linear, one.attention),
    "prefill: pairs cost as much as tokens, by time": where_equal(per_token, per_pair),
    "decode: context costs as much as the constant, by bytes": step.weights / kv.cache_bytes(config, 1),
    "decode: context costs as much as the constant, by time": where_equal(*gap_fit),
}
for name, tokens in found.items():
    print(f"{name:<57}", f"at {tokens:,.0f} tokens" if tokens else "not seen at these lengths")
print(f"the model's context is {config.max_seq_len:,} tokens")

# %% [markdown]
# Operations are counted here for the whole square of pairs, each token with each. A routine for attention that skips
# the masked half of it spends less time on pairs, and then they take over later.
#
# "Both grow linearly with length": we call growth linear where twice the length takes twice the time, within 15%.

# %% tags=["nbval-ignore-output"]
pairs = [n for n in prompts[:-1] if n >= 16]
doubled = {n: pass_time(2 * n) / pass_time(n) for n in pairs}
gap_doubled = {n: pass_time(1, 2 * n) / pass_time(1, n) for n in contexts[1:-1]}
for n, ratio in doubled.items():
    print(f"TTFT, {n:>5,} -> {2 * n:>5,} tokens of prompt:  {ratio:.2f} times")
for n, ratio in gap_doubled.items():
    print(f"gap,  {n:>5,} -> {2 * n:>5,} tokens of context: {ratio:.2f} times")

# %% [markdown]
# ## Operations per byte
#
# Why is one token alone so dear? Count for one weight. It is read once in a pass, and it meets every **row** of the
# pass (each new token of each text is a row): a multiply and an add for each. So a pass over the linear layers does
#
# $$\frac{\text{operations}}{\text{bytes}} = \frac{2 \times \text{rows}}{\text{bytes of a weight}}$$
#
# This is its **arithmetic intensity**. The machine has such a number too: operations a second, divided by bytes a
# second. That is the **ridge**. Below it memory sets the limit, and the arithmetic units wait. Above it arithmetic
# does.

# %% [markdown]
# ### Exercise: intensity
#
# ●○○ · 4 minutes
#
# Write the operations per byte of the linear layers when `rows` rows run through weights of `bits` bits each. Count the
# weights alone, read once.
#
# Why it matters: you can tell in your head that a device with a ridge of 300 needs some 300 rows of 16-bit weights
# before its arithmetic counts, and what 4-bit weights change about that.
#
# <details><summary>Hint 1</summary>How many bytes has a weight of 16 bits? How many operations does it do for each
# row?</details>
# <details><summary>Hint 2</summary>One row and 16 bits give 1 operation per byte.</details>


# %% tags=["exercise"]
def intensity(rows, bits):
    """Operations per byte of linear layers, their weights read once for all rows."""
    # SOLUTION
    return 2 * rows / (bits / 8)
    # END SOLUTION


# %%
kv.check.intensity(intensity)

# %% [markdown]
# A pass limited by memory is **memory-bound**: another row costs almost nothing. One limited by arithmetic is
# **compute-bound**: twice the rows take twice the time, and a row is as cheap as it gets. We call a prompt
# compute-bound when each of its tokens takes at most 1.5 times as long as in the cheapest prompt of the table above,
# provided that the cheapest is held up by arithmetic at all: right of the ridge, and within 3 times of its least time.
#
# **Predict.** From how many tokens of prompt on is that so on this machine?

# %%
my_guess = 4  # PREDICT
question = "From how many tokens of prompt on is prefill compute-bound?"
kv.results.predict("03.compute_bound_from", my_guess, unit="tokens", question=question)

# %% tags=["nbval-ignore-output"]
each = {n: pass_time(n) / n for n in prompts}
cheapest = min(prompts, key=each.get)
computes = roof(cheapest).limit == "compute" and pass_time(cheapest) <= 3 * roof(cheapest).seconds
compute_from = next(n for n in prompts if each[n] <= 1.5 * each[cheapest]) if computes else None
at_ridge = next((n for n in range(1, config.max_seq_len + 1) if roof(n).limit == "compute"), None)
print(f"ridge of this machine: {ceilings.ridge:.1f} operations per byte")
print(f"by count, a prompt passes it from {at_ridge:,} tokens on" if at_ridge else "by count, no prompt passes it")
value = compute_from or f"not up to {prompts[-1]}"
kv.results.measure("03.compute_bound_from", value, unit="tokens", bound=at_ridge, note="bound: ridge")

# %% [markdown]
# Two numbers, both honest. The ridge says where arithmetic *could* begin to count if the pass ran at full speed. The
# clock says where it does. Between the two a pass is held up by other things: small matrices that use the arithmetic
# units badly, and hundreds of small operations that have to be started.
#
# The picture for this is the **roofline**: the rate that a pass reaches against its operations per byte. No point can
# be above the roof, with one exception: if all weights fit into the processor's own cache memory, they need not be read
# from memory again in each pass.

# %% tags=["nbval-ignore-output"]
shapes = {f"decode, batch of {b}": (1, 128, b) for b in (1, 4, 16)}
shapes |= {f"prefill of {n}": (n, 0, 1) for n in (8, 64, usual)}
measured = {}
for name, shape in shapes.items():
    best, seconds = roof(*shape), pass_time(*shape)
    measured[name] = best.intensity, kv.flops(config, *shape).total / seconds
    reached = best.seconds / seconds
    print(f"{name:<19} {best.intensity:5.1f} ops per byte, {reached:4.0%} of roof ({best.limit})")

# %% tags=["nbval-ignore-output"]
sides = {"memory": [], "compute": []}
for name, shape in shapes.items():
    sides[roof(*shape).limit].append(name)
alt = (
    f"Roofline with the ridge at {ceilings.ridge:.1f} operations per byte. Left of it: "
    f"{', '.join(sides['memory']) or 'nothing'}. Right of it: {', '.join(sides['compute']) or 'nothing'}."
)
kv.plots.show(kv.plots.roofline_chart(ceilings, measured), alt=alt)

# %% [markdown]
# Move the sliders. How many texts does a batch need until decode reaches the ridge? What does a long context do to it?
# And fewer bits for each number? (The green point is the best possible; the ceilings stay those measured above.)


# %% tags=["nbval-ignore-output"]
def draw(new_tokens, context, batch, bits):
    """The roofline with the pass chosen, and a sentence about it."""
    moved = kv.bytes_moved(config, new_tokens, context, batch, bits)
    best = kv.roofline(kv.flops(config, new_tokens, context, batch), moved, ceilings)
    label = f"{best.intensity:,.1f} operations per byte, {best.limit}-bound: at least {best.seconds:.4f} s"
    figure = kv.plots.roofline_chart(ceilings, measured, {label: (best.intensity, best.flops_per_second)})
    return figure, f"The pass chosen has {label}."


notch = min(250, config.max_seq_len // 32)  # of the slider for the context
figure, alt = draw(1, 4 * notch, 8, bits)
kv.plots.show(figure, alt=f"One new token for each of 8 texts that hold {4 * notch:,}. {alt}")

# %% tags=["nbval-ignore-output"]
kv.widgets.explore(
    draw,
    new_tokens=[2**i for i in range(10) if 2**i <= usual],
    context=(0, 30 * notch, notch, 4 * notch),
    batch=(1, 128, 1, 8),
    bits=[bits, *(n for n in (32, 16, 8, 4) if n != bits)],
)

# %% [markdown]
# ## Who reads what: weights or cache
#
# A decode step reads two things: all weights, once for the whole batch, and the cache of each text. At first the
# weights are nearly all of it. The cache grows with the context and with the batch. Where does it overtake?

# %%
each_holds = min(1000, config.max_seq_len - 1)
for batch_size in (1, 4, 16):
    moved = kv.bytes_moved(config, 1, each_holds, batch_size, bits=16)
    print(
        f"batch of {batch_size:>2}, {each_holds:,} tokens each: {moved.weights / 1e6:.0f} MB of weights, "
        f"{moved.cache_read / 1e6:4.0f} MB of cache"
    )

# %% [markdown]
# ### Exercise: crossover_context
#
# ●●○ · 6 minutes
#
# Write the context at which a decode step reads as many bytes of cache as of weights. Every text of the batch holds
# that many tokens; weights and cache have the same bits; do not round.
#
# Why it matters: before this length it pays to make the *weights* smaller, after it to make the *cache* smaller: two
# remedies for two different illnesses.
#
# <details><summary>Hint 1</summary><code>kv.bytes_moved(config, 1, 0, batch_size).weights</code> are the bytes of
# weights. How many bytes does one more token for each text add?</details>
# <details><summary>Hint 2</summary><code>kv.cache_bytes(config, 1, batch_size)</code> are the bytes of one token in
# each text. Divide.</details>


# %% tags=["exercise"]
def crossover_context(config, batch_size):
    """Tokens of context at which a step reads as many bytes of cache as of weights."""
    # SOLUTION
    weights = kv.bytes_moved(config, 1, 0, batch_size).weights
    return weights / kv.cache_bytes(config, 1, batch_size)
    # END SOLUTION


# %%
kv.check.crossover_context(crossover_context)

# %%
meets = {b: kv.bytes_moved(config, 1, 0, b).weights / kv.cache_bytes(config, 1, b) for b in (1, 4, 16)}
for batch_size, tokens in meets.items():
    place = "past" if tokens > config.max_seq_len else "within"
    print(f"batch of {batch_size:>2}: {tokens:8,.0f} tokens, {place} this model's context of {config.max_seq_len:,}")

# %% [markdown]
# With a single text this model never gets there. With a batch it does, and then we can look at the clock: a step's time
# at a fixed batch is a constant plus a slope times the context. The **measured crossover** is where the slope's part
# has grown to the constant.
#
# **Predict.** With a batch of 16, at which context does that happen?

# %%
my_guess = 1000  # PREDICT
question = "Batch of 16: at which context does the growing part take as long as the constant?"
kv.results.predict("03.crossover_16", my_guess, unit="tokens", question=question)

# %% tags=["nbval-ignore-output"]
held = {4: [16, 1500, 3000], 16: [16, 500, 1000]}
if on_gpu:
    held = {4: [16, 2000, 4000, 8000], 16: [16, 1000, 2000, 4000]}
steps, crossing = {}, {}
for batch_size, planned in held.items():
    lengths = config.fitting(planned, room=1)
    times = [pass_time(1, n, batch_size) for n in lengths]
    constant, slope = fit(lengths, times, 1)
    steps[batch_size] = (lengths, times, constant, slope)
    off = max(abs(constant + slope * n - seconds) / seconds for n, seconds in zip(lengths, times, strict=True))
    print(f"batch of {batch_size}: the line is at most {off:.0%} off the times")
    crossing[batch_size] = value = where_equal(constant, slope)
    note = "bound: bytes" if value is None or value <= lengths[-1] else "bound: bytes; extrapolated"
    value = float(f"{value:.2g}") if value else f"not seen up to {lengths[-1]}"  # no more digits than the times have
    kv.results.measure(f"03.crossover_{batch_size}", value, unit="tokens", bound=meets[batch_size], note=note)

# %% tags=["nbval-ignore-output"]
across = np.linspace(0, 1.2 * meets[1], 60)
shares = {b: across / tokens for b, tokens in meets.items()}
said = [f"at about {n:,.0f} tokens for {b} texts" if n else f"nowhere for {b} texts" for b, n in crossing.items()]
kv.plots.show(
    kv.plots.weights_or_cache(across, shares, config.max_seq_len, steps),
    alt=f"Left: by bytes the cache overtakes the weights at {meets[4]:,.0f} tokens for 4 texts and {meets[16]:,.0f} "
    f"for 16. Right: by time the growing part is as long as the constant {' and '.join(said)}.",
)

# %% [markdown]
# The clock need not agree with the bytes. It would if weights and cache were read at one speed. Divide each by its time
# and see:

# %% tags=["nbval-ignore-output"]
for batch_size, (constant, slope) in ({1: gap_fit} | {b: step[2:] for b, step in steps.items()}).items():
    moved = {"weights": (kv.bytes_moved(config, 1, 0, batch_size, bits).weights, constant)}
    moved["cache"] = kv.cache_bytes(config, 1, batch_size, bits), slope
    said = [f"{what} at {n / t / 1e9:7.1f} GB/s" if t > 0 else f"{what}: not seen" for what, (n, t) in moved.items()]
    print(f"batch of {batch_size:>2}: {', '.join(said)}")
print(f"ceiling:     {ceilings.bytes_per_second / 1e9:18.1f} GB/s")
computing = kv.flops(config, 1, 0, 16).total / ceilings.flops_per_second
print(f"of the constant's {1e3 * steps[16][2]:.1f} ms for 16 texts at least {1e3 * computing:.1f} ms are arithmetic")

# %% [markdown]
# The measured crossover is the counted one, times the ratio of these two speeds. Each has a reason of its own. With
# more texts the linear layers do more arithmetic on the same weights: the constant grows, and it looks as if the
# weights were read more slowly. Attention goes through the cache in small pieces, head by head, and so reads at a
# speed of its own.
#
# ## Which phase takes the time
#
# Put both phases together. An answer of n tokens to a prompt of p takes one prefill and n − 1 steps whose context
# grows. From the fits above we can draw the whole map.
#
# **Predict.** After a prompt of 512 tokens: how long must an answer be until decode has taken as long as prefill?

# %%
my_guess = 100  # PREDICT
question = f"After a prompt of {usual} tokens: at which answer has decode taken as long as prefill?"
kv.results.predict("03.break_even", my_guess, unit="tokens", question=question)


# %% tags=["nbval-ignore-output"]
def prefill_seconds(p):
    """From the measured times; past the longest prompt along the fitted curve."""
    curve = np.polyval(prefill_fit[::-1], p) / np.polyval(prefill_fit[::-1], long)
    return np.where(p <= long, np.interp(p, prompts, ttft), ttft[-1] * np.maximum(curve, p / long))


def decode_seconds(p, n):
    """n - 1 steps at contexts p, p + 1, ..., by the fitted line."""
    return (n - 1) * np.maximum(np.polyval(gap_fit[::-1], p + (n - 2) / 2), 0)


answers = np.arange(2, config.max_seq_len)
longer = answers[decode_seconds(usual, answers) >= prefill_seconds(usual)]
least_ratio = roof(usual).seconds / roof(1, usual).seconds
break_even = kv.results.measure(
    "03.break_even",
    longer[0] if len(longer) else "never",
    unit="tokens",
    bound=1 + least_ratio,
    note="bound: by roofline",
)

# %% [markdown]
# We check the map with real answers: their share of time in decode, measured.

# %% tags=["nbval-ignore-output"]
asked = [(2048, 4), (4096, 64), (512, 8), (64, 64)] if on_gpu else [(512, 16), (128, 4), (32, 12)]
points = []
for p, n in [(p, n) for p, n in asked if p + n <= config.max_seq_len]:
    run = kv.generate(model, (prompt * 16)[:p], n)
    decoding = (n - 1) * run.percentile(50)
    points.append((p, n, decoding / (decoding + run.ttft)))
    drawn = decode_seconds(p, n) / (decode_seconds(p, n) + prefill_seconds(p))
    print(f"prompt {p:>5,}, answer {n:>3}: {points[-1][2]:4.0%} of the time in decode, the map says {drawn:4.0%}")

# %% tags=["nbval-ignore-output"]
p_axis, n_axis = np.geomspace(16, config.max_seq_len, 80), np.geomspace(2, min(2048, config.max_seq_len), 80)
decoding = decode_seconds(p_axis[None], n_axis[:, None])
share = decoding / (decoding + prefill_seconds(p_axis)[None])
figure = kv.plots.phase_map(p_axis, n_axis, share, points, config.max_seq_len)
alt = (
    "Map of prompt and answer lengths: short answers to long prompts spend their time in prefill, others in decode; "
    f"after {usual} tokens of prompt the two are equal at an answer of {break_even.text(break_even.measured)}."
)
kv.plots.show(figure, alt=alt)

# %% [markdown]
# Reading a token is so much cheaper than writing one that, at equal lengths, decode takes nearly all the time. Prefill
# counts where a long text meets a short answer.
#
# ## A prompt in pieces
#
# A long prefill is one long pass, and while it runs, nobody else on the machine gets a token. **Chunked prefill** cuts
# the prompt into pieces and lets the others step in between. What does it cost, what does it buy?
#
# The result stays the same: each piece finds the pieces before it in the cache. The bound is the largest difference we
# allow for rounding, in float32.

# %%
exact = model if model.dtype == torch.float32 else kv.load_model(checkpoint, dtype=torch.float32).model
tolerance = 1e-4 if exact.device.type == "cpu" else 1e-2


def last_scores(chunk):
    """Scores after the first 64 tokens of the prompt, run in pieces of `chunk`."""
    cache = kv.DenseCache(config, max_len=64, dtype=exact.dtype, device=exact.device)
    return kv.prefill(exact, [prompt[:64]], cache, chunk)


whole = last_scores(64)
for chunk in (7, 32):
    off = float((last_scores(chunk) - whole).abs().max())
    print(f"pieces of {chunk:>2}: difference within {tolerance}: {off <= tolerance}")

# %% [markdown]
# ### Exercise: prefill_in_chunks
#
# ●●○ · 8 minutes
#
# Run `ids` (a list) through `model` into `cache`, at most `chunk` tokens in a pass, and return the scores after the
# last token, shape `(vocab_size,)`. `model(torch.tensor([piece]), cache=cache)` goes on from what the cache holds and
# returns `(1, T, vocab_size)`.
#
# Why it matters: this loop is what keeps a chat fluent while somebody else uploads a book.
#
# <details><summary>Hint 1</summary><code>range(0, len(ids), chunk)</code> gives the starts of the pieces. A slice may
# reach past the end of a list.</details>
# <details><summary>Hint 2</summary>After the loop, <code>logits[0, -1]</code> are the scores after the last token of
# the last piece.</details>


# %% tags=["exercise"]
def prefill_in_chunks(model, ids, cache, chunk):
    """Scores after the last of `ids`, run in pieces of at most `chunk` tokens."""
    # SOLUTION
    for start in range(0, len(ids), chunk):
        logits = model(torch.tensor([ids[start : start + chunk]]), cache=cache)
    return logits[0, -1]
    # END SOLUTION


# %%
kv.check.prefill_in_chunks(prefill_in_chunks)

# %% [markdown]
# **Predict.** The prompt in the smallest pieces measured below, against the whole prompt in one pass: how many times as
# long does the whole prefill take?

# %%
my_guess = 1.5  # PREDICT
kv.results.predict("03.chunk_cost", my_guess, unit="times", question="Smallest pieces against one pass: total time?")

# %% tags=["nbval-ignore-output"]
size = min(4096 if on_gpu else 256, config.max_seq_len)
chunks = [size // 4, size // 2, size]
totals, longest, least = [], [], []
for chunk in chunks:
    starts = range(0, size, chunk)
    times = [pass_time(chunk, start) for start in starts]
    totals.append(sum(times))
    longest.append(max(times))
    least.append(sum(roof(chunk, start).seconds for start in starts))
    print(f"pieces of {chunk:>5,}: {1e3 * totals[-1]:7.1f} ms in all, longest pass {1e3 * longest[-1]:7.1f} ms")
kv.results.measure("03.chunk_cost", totals[0] / totals[-1], unit="times", note=f"pieces of {chunks[0]}")
kv.results.measure("03.chunk_wait", longest[0] / longest[-1], unit="times", note="longest pass, against one pass")

# %% tags=["nbval-ignore-output"]
alt = (
    f"Pieces of {chunks[0]:,} take {totals[0] / totals[-1]:.2f} times as long in all as one pass over {size:,} tokens, "
    f"and the longest wait of another text falls to {longest[0] / longest[-1]:.0%}."
)
kv.plots.show(kv.plots.chunk_costs(chunks, totals, longest, least, pass_time(1, usual // 2)), alt=alt)

# %% [markdown]
# Each piece reads all weights again, and the keys and values of the pieces before it. As long as a piece has enough
# rows to be compute-bound by the clock (the number measured above, not the ridge), that hardly shows. So there is a
# size that is good for both sides: read it off the clock. (The dashed line does not fall with larger pieces: for one
# pass we count the whole square of its tokens, masked half included, and pieces leave a part of that half out.)
#
# ## Many texts in a batch
#
# Decode has the opposite trouble: one row in a pass, and the arithmetic waits. The weights are read anyway, so let them
# serve more rows. The first way is to decode for several people at once.
#
# **Predict.** A step for 16 texts against a step for one: how many times as long?

# %%
my_guess = 16  # PREDICT
kv.results.predict("03.batch_step", my_guess, unit="times", question="A step for 16 texts against a step for one?")

# %% tags=["nbval-ignore-output"]
batches = [1, 2, 4, 8, 16, 32, 64, 128] if on_gpu else [1, 2, 4, 8, 16, 32]
batch_times = [pass_time(1, 128, b) for b in batches]
batch_least = [roof(1, 128, b).seconds for b in batches]
for b, seconds in zip(batches, batch_times, strict=True):
    print(f"batch of {b:>3}: {1e3 * seconds:6.1f} ms a step, {b / seconds:9,.0f} tokens a second")
flat = [b for b, seconds in zip(batches, batch_times, strict=True) if seconds <= 1.5 * batch_times[0]]
print(f"a step takes at most 1.5 times as long up to a batch of {flat[-1]}")
longer, at_least = pass_time(1, 128, 16) / pass_time(1, 128), roof(1, 128, 16).seconds / roof(1, 128).seconds
sixteen = kv.results.measure("03.batch_step", longer, unit="times", bound=at_least, note="bound: roofline")

# %% tags=["nbval-ignore-output"]
gain = batches[-1] * batch_times[0] / batch_times[-1]
kv.plots.show(
    kv.plots.batched_steps(batches, batch_times, batch_least),
    alt=f"A step for 16 texts takes {sixteen.measured:.1f} times as long as for one; with {batches[-1]} texts, "
    f"{gain:.1f} times as many tokens a second come out.",
)

# %% [markdown]
# ## Several guesses in one step
#
# The second way needs no other people. Decode is *sequential*: token 5 cannot be chosen before token 4 is known. But if
# somebody **guesses** tokens 4 to 10, all of them can run in one pass, and the model's scores say how far the guess was
# right. What does such a check cost?
#
# **Predict.** A pass that checks 7 guesses (8 rows) against an ordinary step: how many times as long?

# %%
my_guess = 8  # PREDICT
kv.results.predict("03.check_8", my_guess, unit="times", question="A pass over 8 tokens against a step of 1?")

# %% tags=["nbval-ignore-output"]
checked = [1, 2, 4, 8, 16]
check_times = [pass_time(k, usual // 2, last_only=False) for k in checked]  # the scores of every row are needed
for k, seconds in zip(checked, check_times, strict=True):
    print(f"{k:>2} tokens in the pass: {1e3 * seconds:6.1f} ms, {seconds / check_times[0]:.2f} times a step")
longer = check_times[3] / check_times[0]
at_least = roof(8, usual // 2, last_only=False).seconds / roof(1, usual // 2).seconds
kv.results.measure("03.check_8", longer, unit="times", bound=at_least, note="bound: roofline")

# %% [markdown]
# Now you have met three sources of rows: the tokens of a prompt, texts in a batch, guesses for one text. Draw them into
# one picture. To the linear layers a row is a row.

# %% tags=["nbval-ignore-output"]
series = {"tokens of one prompt": (prompts, ttft), "texts in a batch": (batches, batch_times)}
series["guesses for one text"] = (checked, check_times)
kv.plots.show(
    kv.plots.rows_alike(series, prompts, [roof(n).seconds for n in prompts]),
    alt=f"Time of a pass against its rows, from three sources, with the roofline: {prompts[-1]:,} rows take "
    f"{ttft[-1] / ttft[0]:.0f} times as long as one.",
)

# %% [markdown]
# Where one row stands a step apart from two, a likely reason (not measured here) is a routine of its own: with a single
# row a matrix product is matrix times vector, for which libraries have other code. From two rows on, rows come almost
# free until arithmetic counts.

# %% [markdown]
# ### Exercise: accept
#
# ●●○ · 6 minutes
#
# `guesses` are the tokens guessed. The pass ran the newest token and all guesses, so the model's own greedy choices are
# one more: `greedy[i]` is its choice after the text and the first `i` guesses. Return how many guesses stand, and the
# token that follows them.
#
# Why it matters: these lines make the method *exact*. The text that comes out is the one the model would have written
# alone, whatever the guesses were.
#
# <details><summary>Hint 1</summary>A guess stands if it equals the model's choice at its place and all guesses before
# it stand.</details>
# <details><summary>Hint 2</summary>If <code>count</code> guesses stand, the next token is <code>greedy[count]</code>:
# in place of the first wrong guess, or after the last right one.</details>


# %% tags=["exercise"]
def accept(guesses, greedy):
    """How many guesses stand, and the token that follows them."""
    # SOLUTION
    count = 0
    while count < len(guesses) and guesses[count] == greedy[count]:
        count += 1
    return count, greedy[count]
    # END SOLUTION


# %%
kv.check.accept(accept)

# %% [markdown]
# Who guesses? Often a small model. Here we use something simpler: **prompt lookup**. Find the last earlier place where
# the newest two tokens stood, and guess that the text goes on as it did there. After each pass the cache is cut back to
# what stands: `truncate`.


# %%
def lookup(ids, count):
    """At most `count` tokens: what followed the last earlier place of the newest two tokens."""
    for start in range(len(ids) - 3, -1, -1):
        if ids[start : start + 2] == ids[-2:]:
            return ids[start + 2 : start + 2 + count]
    return []


def speculate(model, prompt, new_tokens, guess_at_most=7):
    """Greedy ids, the (guesses, guesses that stood) of each pass after the prefill, and its seconds."""
    room = len(prompt) + new_tokens
    cache = kv.DenseCache(config, max_len=room, dtype=model.dtype, device=model.device)
    made, passes, watch = [int(kv.prefill(model, [prompt], cache).argmax())], [], Stopwatch(model.device)
    while len(made) < new_tokens:
        guesses = lookup(prompt + made, min(guess_at_most, new_tokens - len(made) - 1))
        greedy = model(torch.tensor([made[-1:] + guesses]), cache=cache)[0].argmax(-1).tolist()
        wrong = (i for i, guess in enumerate(guesses) if guess != greedy[i])
        stood = next(wrong, len(guesses))
        made += greedy[: stood + 1]  # guesses that stand are the model's own choices
        cache.truncate(len(prompt) + len(made) - 1)
        passes.append((len(guesses), stood))
    return made, passes, watch.read()


# %% [markdown]
# Two requests: one whose answer stands in the prompt already, if the model copies faithfully, and one whose answer does
# not. In both cases the tokens must
# be exactly those of `kv.generate`.

# %%
requests = {"Repeat a text": f"Repeat this text word for word: {text}", "Tell a story": "Tell me a story about a fox."}
wanted = 22
asked_ids = {name: lm.prompt_ids(request) for name, request in requests.items()}
plain = {name: kv.generate(exact, ids, wanted) for name, ids in asked_ids.items()}
guessed = {name: speculate(exact, ids, wanted) for name, ids in asked_ids.items()}
for name, (made, _, _) in guessed.items():
    assert made == plain[name].ids
    print(f"{name}: the same {wanted} tokens, {lm.decode(plain[name].ids[:12])!r} ...")
if not lm.tokenizer.chat_template:
    print(f"{lm.name} follows no requests. A chat model begins to repeat the text, and then many guesses stand.")

# %% tags=["nbval-ignore-output"]
per_pass, speedup, rounds = {}, {}, {}
for name, (_, rounds[name], seconds) in guessed.items():
    speedup[name] = (wanted - 1) * plain[name].percentile(50) / seconds
    per_pass[name] = (wanted - 1) / len(rounds[name])
    print(f"{name:<16} {per_pass[name]:.2f} tokens for each pass, decode {speedup[name]:.2f} times as fast")
kv.results.measure("03.tokens_per_pass", per_pass["Repeat a text"], note="prompt lookup, answer in the prompt")
kv.results.measure("03.speculation_speedup", speedup["Repeat a text"], unit="times")

# %% tags=["nbval-ignore-output"]
alt = "; ".join(f"{name}: {value:.2f} tokens for each pass" for name, value in per_pass.items())
kv.plots.show(kv.plots.guesses_kept(rounds), alt=f"Columns are passes, with guesses that stood and fell. {alt}.")

# %% [markdown]
# Where nothing can be copied, guesses are few, most or all of them fall, and a pass with wrong guesses costs what the
# table of passes above says. (The first token comes from the prefill, so it is in no pass here.) Speculation does not
# change the text, it changes the time, in either direction. (In half precision a near tie can still fall the other
# way, as with any change of shape: notebook 02.)
#
# It also spends what batching spends: idle arithmetic. A machine that is busy with many texts has little left for
# guesses.
#
# ## What a million tokens costs
#
# A machine has a price for each hour. Divide by the tokens it makes in an hour, and you have the price of a token. For
# input we take the prefill of a prompt, for output the steps of decode. The price of the hour below is an example; the
# *ratio* of the two prices does not depend on it.

# %% [markdown]
# ### Exercise: output_price_ratio
#
# ●●○ · 5 minutes
#
# A prefill of `prompt_tokens` tokens takes `prefill_seconds`. A decode step for `batch_size` texts takes
# `step_seconds`. How many times as much of the machine's time does an output token take as an input token?
#
# Why it matters: the two prices on every price list, from a stopwatch.
#
# <details><summary>Hint 1</summary>Seconds for one input token; seconds for one output token.</details>
# <details><summary>Hint 2</summary>A step makes one token for each text of the batch.</details>


# %% tags=["exercise"]
def output_price_ratio(prompt_tokens, prefill_seconds, step_seconds, batch_size):
    """Machine time of an output token over that of an input token."""
    # SOLUTION
    input_token = prefill_seconds / prompt_tokens
    output_token = step_seconds / batch_size
    return output_token / input_token
    # END SOLUTION


# %%
kv.check.output_price_ratio(output_price_ratio)

# %% [markdown]
# **Predict.** With a single text at a time: how many times as much must an output token cost as an input token?

# %%
my_guess = 5  # PREDICT
question = "One text alone: how many times as dear is an output token as an input token?"
kv.results.predict("03.price_ratio_alone", my_guess, unit="times", question=question)

# %% tags=["nbval-ignore-output"]
dollars_per_hour = 1.00  # an example; it cancels in the ratio
rate_in = usual / pass_time(usual)
input_price = kv.price_per_million(rate_in, dollars_per_hour)
print(f"input: {rate_in:,.0f} tokens a second, ${input_price:.3f} per million")
price_ratio = {}
for b, seconds in zip(batches, batch_times, strict=True):
    output_price = kv.price_per_million(b / seconds, dollars_per_hour)
    price_ratio[b] = output_price / input_price
    print(f"output, {b:>3} texts: {b / seconds:7,.0f} tokens a second, ${output_price:.3f}: {price_ratio[b]:.1f} times")
by_roof = usual * roof(1, 128).seconds / roof(usual).seconds
kv.results.measure("03.price_ratio_alone", price_ratio[1], unit="times", bound=by_roof, note="bound: by roofline")
kv.results.measure("03.price_ratio_batched", price_ratio[batches[-1]], unit="times", note=f"batch of {batches[-1]}")

# %% [markdown]
# And the market? Some list prices in dollars per million tokens, for input (not cached) and output, each with a month
# in which it was asked. They are cited, not measured, and they change: look at
# [OpenAI](https://platform.openai.com/docs/pricing),
# [Anthropic](https://platform.claude.com/docs/about-claude/pricing),
# [Google](https://ai.google.dev/gemini-api/docs/pricing), [DeepSeek](https://api-docs.deepseek.com/quick_start/pricing)
# and [Mistral](https://mistral.ai/pricing) for those of today. Older ones are kept in
# [llm-prices](https://github.com/simonw/llm-prices).

# %%
LISTED = [  # vendor and model, input, output ($ per million tokens), month
    ("Mistral Large 24.11", 2.00, 6.00, "2024-11"),
    ("DeepSeek V3", 0.27, 1.10, "2025-02"),
    ("OpenAI GPT-4.1", 2.00, 8.00, "2025-04"),
    ("Google Gemini 2.5 Flash", 0.30, 2.50, "2025-06"),
    ("OpenAI GPT-5", 1.25, 10.00, "2025-08"),
    ("Anthropic Claude Sonnet 4.5", 3.00, 15.00, "2025-11"),
    ("Anthropic Claude Opus 5", 5.00, 25.00, "2026-07"),
    ("DeepSeek V4 Flash", 0.14, 0.28, "2026-08"),
]
listed_ratio = {name: output / given for name, given, output, _ in LISTED}
for name, given, output, month in LISTED:
    print(f"{name:<28} {month}  ${given:5.2f} in  ${output:5.2f} out  {output / given:4.1f} times")
within = [name for name, ratio in listed_ratio.items() if 4 <= ratio <= 5]
lowest, highest = min(listed_ratio.values()), max(listed_ratio.values())
print(f"{len(within)} of {len(LISTED)} are between 4 and 5; the lowest is {lowest:.0f}, the highest {highest:.2g}")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.price_ratios(batches, list(price_ratio.values()), listed_ratio),
    alt=f"Left: an output token takes {price_ratio[1]:.0f} times the machine time of an input token for one text, "
    f"{price_ratio[batches[-1]]:.1f} times with {batches[-1]} texts. Right: price lists ask for {lowest:.0f} to "
    f"{highest:.1f} times.",
)

# %% [markdown]
# Compare the two panels. One text alone makes output far too dear, or it would be sold so. A server fills its batch,
# and each text in it makes an output token cheaper, while input has had its many rows from the start. Somewhere on the
# way down lies the ratio that is sold. Where, depends on the machine, on how full the batch is and how long the
# contexts are, and on what a vendor wants to earn with which token: the clock sets the direction and the range, not the
# digit.
#
# ## Summary

# %% tags=["nbval-ignore-output"]
kv.results.summary("03")
before = timed.pop((1, 128, 1, True))
print(f"one step at a context of 128: {1e3 * before:.1f} ms when first timed, {1e3 * pass_time(1, 128):.1f} ms now")

# %% [markdown]
# Your guesses beside what was measured: within the band they were at most a factor of two off. The farther from 1, the
# more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("03")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# Five statements can be judged now; the code works the verdicts out from the numbers above.
#
# - **7.** "Prefill is parallel and compute-bound, and sets TTFT." Parallel: 512 tokens together take less than half the
#   time of 512 alone. Compute-bound: as defined above, from some length on. Sets TTFT: the pass is at least 70% of it.
#   It holds if that is so from 8 tokens on, holds with a condition if only for longer prompts; if one of the three
#   fails it is wrong as said.
# - **8.** "Decode is sequential and memory-bound, and sets the gaps." Memory-bound: the roofline says so for one text,
#   and 8 rows, which share the reading, take less than half of 8 times one row. Sets the gaps: the pass is at least 70%
#   of one. If one of these fails it is wrong as said. It holds with a condition if a step takes more than twice the
#   roofline's time (then much of it is something else), if a batch became compute-bound, or if guesses gave more than
#   one token for a pass.
# - **9.** "Both grow linearly with length." Linear is what takes twice the time for twice the length, within 15%. It
#   holds if all doublings above were so, holds with a condition if some, is wrong as said if none.
# - **10.** "On a long prompt prefill takes seconds; on a long answer decode dominates." Holds if the longest prompt
#   measured took a second or more and an answer as long as its prompt of 512 spends most of its time in decode; holds
#   with a condition if a second is reached only later within the context; else wrong as said.
# - **11.** "Input is sold 4 to 5 times cheaper than output, and not arbitrarily." Holds if all listed ratios are within
#   4 and 5 and the measured ratio is above 1 at every batch; with a condition if only some are; wrong as said if none
#   is, or if output is not dearer here.


# %% tags=["nbval-ignore-output"]
def jitter(share):
    """What to say of a part that seems to be more than its whole."""
    return " (over 100% is noise: the two were timed at different moments)" if share >= 1.005 else ""


together = usual * pass_time(1) / pass_time(usual)
parallel_and_sets = together > 2 and compute_from is not None and prefill_share >= 0.7
start = f"from {compute_from:,} tokens on" if compute_from else "nowhere"
kv.results.verdict(
    7,
    ("holds" if compute_from <= 8 else "holds with a condition") if parallel_and_sets else "wrong as said",
    f"{usual} tokens together take {1 / together:.1%} of their time alone; a token is within 1.5 times of its cheapest "
    f"{start}; the pass is {prefill_share:.0%} of TTFT{jitter(prefill_share)}.",
)

# %% tags=["nbval-ignore-output"]
over, shared = pass_time(1, 128) / roof(1, 128).seconds, pass_time(8) / pass_time(1)
memory_bound = roof(1, 128).limit == "memory" and shared < 4
batched_limit = next((b for b in batches if roof(1, 128, b).limit == "compute"), None)
conditions = [f"a step takes {over:.1f} times what reading alone would, so much of it is something else"] * (over > 2)
conditions += [f"by count a batch of {batched_limit} is compute-bound"] if batched_limit else []
if max(per_pass.values()) > 1:
    conditions.append(f"guesses gave up to {max(per_pass.values()):.1f} tokens for each pass, with the same text")
kv.results.verdict(
    8,
    "wrong as said" if not memory_bound or decode_share < 0.7 else "holds with a condition" if conditions else "holds",
    f"For one text the limit is {roof(1, 128).limit}; 8 rows take {shared:.1f} times as long as 1; the pass is "
    f"{decode_share:.0%} of the gap{jitter(decode_share)}." + (f" But {'; '.join(conditions)}." if conditions else ""),
)

# %% tags=["nbval-ignore-output"]
everything = [*doubled.values(), *gap_doubled.values()]
linear = [1.7 <= ratio <= 2.3 for ratio in everything]
straight = [f"TTFT from {n:,} to {2 * n:,}" for n, ratio in doubled.items() if 1.7 <= ratio <= 2.3]
straight += [f"gap from {n:,} to {2 * n:,}" for n, ratio in gap_doubled.items() if 1.7 <= ratio <= 2.3]
kv.results.verdict(
    9,
    "holds" if all(linear) else "holds with a condition" if any(linear) else "wrong as said",
    f"Twice the prompt takes {min(doubled.values()):.2f} to {max(doubled.values()):.2f} times as long (from 16 tokens "
    f"on), twice the context {min(gap_doubled.values()):.2f} to {max(gap_doubled.values()):.2f} times: prefill has a "
    f"part for each pair of tokens, decode a constant. Within 15% of twice: {', '.join(straight) or 'nowhere'}.",
)

# %% tags=["nbval-ignore-output"]
reached = [n for n in range(16, config.max_seq_len + 1, 16) if prefill_seconds(n) >= 1]
dominates = decode_seconds(usual, usual) > prefill_seconds(usual)
at = f"at about {reached[0]:,} tokens" if reached else f"nowhere within {config.max_seq_len:,} tokens"
kv.results.verdict(
    10,
    "wrong as said" if not (reached and dominates) else "holds" if pass_time(long) >= 1 else "holds with a condition",
    f"Prefill takes a second {at} here; after {usual} tokens of prompt decode has taken as long as prefill at an "
    f"answer of {break_even.text(break_even.measured)}.",
)
late = [n for n in prompts if n >= 16 and pass_time(n) >= 2 * pass_time(1, 16)]
since = f"from a prompt of {late[0]} tokens on" if late else "at none of the prompts"
print(f"statement 1, settled in notebook 00: here the first token takes at least twice as long as a gap {since}")

# %% tags=["nbval-ignore-output"]
dearer = min(price_ratio.values()) > 1
kv.results.verdict(
    11,
    "wrong as said" if not (dearer and within) else "holds" if len(within) == len(LISTED) else "holds with a condition",
    f"{len(within)} of {len(LISTED)} listed ratios are between 4 and 5. By machine time an output token costs "
    f"{price_ratio[1]:.0f} times an input token alone and {price_ratio[batches[-1]]:.1f} times in a batch of "
    f"{batches[-1]}: not arbitrary, but it depends on how full the batch is.",
)

# %% [markdown]
# **What to remember**
#
# 1. Prefill and decode are one kind of pass. The rows in it decide: weights are read once, however many rows they meet.
# 2. Few rows wait for memory, many for arithmetic. The ridge says how many are many at best; the clock says how many
#    it takes here, where starting small operations and small matrices cost time as well.
# 3. TTFT grows with the prompt, later with its square. A gap is a large constant and a small slope.
# 4. Idle arithmetic can be filled: with other people's texts, or with guesses. A long prompt can be cut to let others
#    in.
# 5. Weights or cache: the context at which they are equal falls with the batch. Find it before you shrink either.
#
# ## What the field does today
#
# - Orca (OSDI 2022) schedules at each step instead of each request, so that texts enter and leave a running batch:
#   continuous batching. Serving engines such as vLLM work so today.
# - Sarathi (arXiv 2308.16369) fills decode steps with pieces of prefill, so that a pass has enough rows and nobody
#   waits long; vLLM's documentation of chunked prefill points to it.
# - Splitwise (arXiv 2311.18677) and DistServe (arXiv 2401.09670) run the two phases on different machines, each bought
#   for its own ceiling, and send the cache from one to the other.
# - Speculative decoding is due to Leviathan and others (arXiv 2211.17192) and Chen and others (arXiv 2302.01318), who
#   also keep the distribution exact when tokens are sampled. Prompt lookup, with no second model, is an option of
#   Hugging Face Transformers (`prompt_lookup_num_tokens` in its generation documentation) and of vLLM ("n-gram").
# - The roofline model is by Williams, Waterman and Patterson (*Communications of the ACM* 52(4), 2009).
#
# **Next:** 04, how much memory the cache takes, and how heads that share keys and values make it smaller.

# %% tags=["nbval-ignore-output"]
kv.check.progress("03")
