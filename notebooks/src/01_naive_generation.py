# %% [markdown]
# # 1. Naive generation
#
# **Time:** about 45 minutes · **Device:** any (CPU is enough)
#
# **You will be able to**
#
# - compute causal attention by hand and say why a token never sees a later one
# - write the loop that makes text with a language model
# - count the rows and the operations that this loop spends, and check the count against PyTorch's own counter
# - tell from a fitted exponent how work grows with length: for the linear layers, for attention, and for time
#
# {{colab_badge}}

# %% tags=["setup"]
# SETUP

# %% tags=["nbval-ignore-output"]
import numpy as np
import torch

lm = kv.load_model("smollm2-135m")
config = lm.config

# %% [markdown]
# A language model reads a list of **tokens** (pieces of text, each with a number) and gives scores for the token
# that may come next. Inside, each token is one **row** of numbers, a vector. All rows go through the same stack of
# layers, side by side.

# %%
print(f"{config.n_layers} layers, each row is {config.d_model} numbers wide")
print(f"{config.n_heads} query heads and {config.n_kv_heads} key/value heads of {config.d_head} numbers")
print([(token, lm.decode([token])) for token in lm.encode("Once upon a time,")])

# %% [markdown]
# ## Attention by hand
#
# Most layers of the model treat each row alone. Attention is the one place where rows meet. Each row makes three
# vectors: a **query** (what it looks for), a **key** (what it can be found by) and a **value** (what it hands over).
# In the model, three weight matrices make them from the row. Here we write down small vectors, four numbers each,
# for five tokens. A real model does this with several heads at once; one head shows it all.

# %%
tokens = ["Once", "upon", "a", "time", ","]
q = np.array([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 0], [0, 1, 2, 0], [2, 0, 1, 1]], dtype=float)
k = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 2, 0, 1], [1, 0, 2, 0]], dtype=float)
v = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]], dtype=float)

scores = q @ k.T  # row: query, column: key
print(scores)

# %% [markdown]
# A score is the dot product of a query and a key: large where they point the same way. Sums over more numbers spread
# wider, so the scores are divided by the square root of how many numbers a vector has (here 4). Then every score of a
# key that stands *after* its query is set to minus infinity: that is the **causal mask**.

# %%
scaled = scores / np.sqrt(q.shape[1])
future = np.triu(np.ones((5, 5), dtype=bool), k=1)  # True where the key stands after the query
masked = np.where(future, -np.inf, scaled)

weights = np.exp(masked)  # exp(-inf) is 0: a hidden key gets no weight
weights /= weights.sum(axis=1, keepdims=True)  # each row sums to 1
out = weights @ v  # each row: a mix of the values it may see
print(out.round(2))

# %% [markdown]
# The two lines with `np.exp` and the sum are the **softmax**: scores become weights between 0 and 1. Each of the
# first four values has its single 1 in a place of its own, so the first four rows of the output are the weights again.
# Here are the three matrices.

# %%
panels = {"scores": scores, "scaled and masked": masked, "weights": np.where(future, np.nan, weights)}
alt = (
    "Three 5 by 5 tables of numbers: all scores, the scores after the mask with the upper right half blank, "
    "and the weights, where each row sums to 1."
)
kv.plots.show(kv.plots.attention_matrices(tokens, panels), alt=alt)

# %% [markdown]
# The model of this course computes the same with PyTorch's fused attention. Same numbers in, same numbers out:

# %%
as_batch = [torch.from_numpy(x)[None, None] for x in (q, k, v)]  # (B, H, T, D): one text, one head
fused = kv.layers.attention(*as_batch, causal=True)[0, 0].numpy()
assert np.allclose(out, fused)
print("largest difference below 1e-12:", np.abs(out - fused).max() < 1e-12)

# %% [markdown]
# **Why the mask?** Without it a token could look at its successors, the very tokens it is asked to predict. The mask
# has a second effect, which the next notebook will use. Change the last token, and see which rows of the output move:


# %%
def rows_that_move(causal):
    """Which output rows differ after query, key and value of the last token were changed."""
    changed = [x.clone() for x in as_batch]
    for x in changed:
        x[0, 0, -1] += 1
    before, after = (kv.layers.attention(*args, causal=causal)[0, 0] for args in (as_batch, changed))
    return [token for token, moved in zip(tokens, (before - after).abs().amax(1) > 1e-9, strict=True) if moved]


print("with the mask:   ", rows_that_move(causal=True))
print("without the mask:", rows_that_move(causal=False))

# %% [markdown]
# With the mask a row depends on itself and on earlier rows, never on later ones. Whatever is written after it, the
# row stays what it was. Keep this in mind: below, we compute it again and again.

# %% [markdown]
# ### Exercise: causal_attention
#
# ●○○ · 7 minutes
#
# Write causal attention for one head as a function, in NumPy: `q` and `k` are `(T, d)`, `v` is `(T, d_v)`, for any
# number of tokens `T`. It must also survive large scores: `np.exp(1000)` overflows, so subtract each row's largest
# score first (that changes no weight).
#
# *Why it matters:* this is the whole mixing of tokens in a decoder. Everything later in the course is about doing
# these lines less often, on fewer bytes, or in another order.
#
# <details><summary>Hint 1</summary>Take the steps above in their order: scores, scale, mask, softmax, weighted sum. The
# mask has to be made for <code>len(q)</code> tokens.</details>
#
# <details><summary>Hint 2</summary><code>masked.max(axis=1, keepdims=True)</code> is each row's largest score, in a
# shape that can be subtracted from the matrix. Subtract it after the mask.</details>


# %% tags=["exercise"]
def causal_attention(q, k, v):
    """One head of causal attention: q, k `(T, d)`, v `(T, d_v)` -> `(T, d_v)`."""
    # SOLUTION
    hidden = np.triu(np.ones((len(q), len(k)), dtype=bool), k=1)
    s = np.where(hidden, -np.inf, q @ k.T / np.sqrt(q.shape[1]))
    w = np.exp(s - s.max(axis=1, keepdims=True))
    return w / w.sum(axis=1, keepdims=True) @ v
    # END SOLUTION


# %%
kv.check.causal_attention(causal_attention)

# %% [markdown]
# ## From scores to a token
#
# After the last layer, each row is compared with all tokens of the vocabulary. The result is one score for each token,
# called a **logit**: how well it would go on from here. Every row gives such scores, for what follows its own token;
# to go on with the text we need those of the last row.

# %%
france = "The capital of France is"
logits = lm.model(torch.tensor([lm.encode(france)]))  # (1, T, vocabulary)
probabilities = logits[0, -1].float().softmax(-1)
top = probabilities.topk(5)
candidates = [lm.decode([token]) for token in top.indices.tolist()]
print(tuple(logits.shape))
print(candidates)

# %% tags=["nbval-ignore-output"]
figure = kv.plots.next_tokens(candidates, top.values.tolist(), france)
alt = f"Bars of the five most probable next tokens; the first, {candidates[0]!r}, has {float(top.values[0]):.0%}."
kv.plots.show(figure, alt=alt)

# %% [markdown]
# The model does not say which token comes next; it gives a distribution, and somebody has to choose. Taking the
# highest score every time (`argmax`) is called **greedy**. It always gives the same text, so we use it to compare.
#
# ## The loop
#
# One run of the model gives one token. To make a text, add the token to the text and run the model again, on all of it:

# %%
prompt = lm.encode("Once upon a time,")
made = []
for _ in range(8):
    logits = lm.model(torch.tensor([prompt + made]), last_only=True)  # all rows; scores of the last one
    made.append(int(logits[0, -1].argmax()))
print(made)
print(lm.decode(made))

# %% [markdown]
# `last_only` spares the scores of the other rows, which nobody reads. The package has the same loop with sampling, stop
# tokens and a clock; it must give the same tokens.

# %%
assert made == kv.generate_naive(lm.model, prompt, 8).ids
print("same tokens as kv.generate_naive")

# %% [markdown]
# ### Exercise: greedy_until
#
# ●●○ · 6 minutes
#
# A real text ends by itself: the model makes a stop token. Write the loop with that: return the list of new token ids,
# at most `max_new_tokens` of them, ending early with `stop_id` when the model chooses it (the stop token is kept).
#
# *Why it matters:* every engine has this loop at its heart. The usual mistakes are by one: a token or a run too many.
#
# <details><summary>Hint 1</summary>Take the loop above; after adding a token, look whether it is
# <code>stop_id</code>.</details>
#
# <details><summary>Hint 2</summary><code>model(torch.tensor([prompt + made]))</code> gives scores
# <code>(1, T, vocabulary)</code>; <code>[0, -1]</code> are those after the last token. Return <code>made</code>, not
# <code>prompt + made</code>.</details>


# %% tags=["exercise"]
def greedy_until(model, prompt, max_new_tokens, stop_id):
    """Ids of the new tokens, a list: at most `max_new_tokens`, ending with `stop_id` if it comes."""
    # SOLUTION
    new = []
    while len(new) < max_new_tokens and stop_id not in new:
        scores = model(torch.tensor([prompt + new]), last_only=True)
        new.append(scores[0, -1].argmax().item())
    return new
    # END SOLUTION


# %%
kv.check.greedy_until(greedy_until)

# %% [markdown]
# ## The rows that are run again
#
# Statement 3 of the course says: *without the cache, K and V of the whole sequence are computed again at each token;
# doubling the tokens quadruples the work.* K and V are the keys and values of all rows. The **cache** of notebook 02
# keeps them; here nothing is kept.
#
# Count what this loop does. In each step the model runs *every* row of the text, though all but the last have been
# through it before.
#
# **Predict.** How many rows run through each layer in all 48 steps together?

# %%
new_tokens = 48
my_guess = 53  # PREDICT
question = f"Rows run through each layer: prompt of {len(prompt)}, {new_tokens} new tokens?"
kv.results.predict("01.rows", my_guess, unit="rows", question=question)

# %% [markdown]
# A **hook** is a function that PyTorch calls whenever a layer has run. We put one on the matrix that makes the keys
# of the first layer, and let it write down how many rows came through.

# %%
rows_run = []
k_proj = lm.model.layers[0].self_attn.k_proj
hook = k_proj.register_forward_hook(lambda module, inputs, output: rows_run.append(output.shape[1]))
try:
    naive = kv.generate_naive(lm.model, prompt, new_tokens)
finally:
    hook.remove()  # also when the run is interrupted

print("rows in each step:", rows_run[:6], "...", rows_run[-1])
expected = sum(len(prompt) + step for step in range(new_tokens))
entry = kv.results.measure("01.rows", sum(rows_run), unit="rows", bound=expected)
assert entry.measured == expected

# %%
first = " + ".join(str(rows) for rows in rows_run[:3])
alt = f"Bars: your guess, the sum {first} + ..., and the rows counted."
kv.plots.show(kv.plots.predict_measure(entry), alt=alt)

# %% [markdown]
# The last token made is not among these rows: the model never ran on it. The first steps, as sheets of rows:

# %%
pieces = [lm.decode([token]) for token in prompt + naive.ids]
alt = (
    "Five sheets of rows side by side: step 1 runs the rows of the prompt, each later step adds one new row "
    "at the bottom and runs all rows above it again (hatched)."
)
kv.plots.show(kv.plots.rows_filmstrip(pieces, len(prompt), [1, 2, 3, 4, 5]), alt=alt)

# %% [markdown]
# Put the sheets of all steps side by side, each as one column, and they form a triangle. The blue edge is the work that
# is new. The area is work done again.

# %%
alt = "A triangle: each step is a column of rows, one row taller than the last; only the bottom row of each is new."
kv.plots.show(kv.plots.rows_triangle(len(prompt), new_tokens, new_tokens), alt=alt)

# %% [markdown]
# Move the step to see the triangle grow, and the length of the prompt to see what a long prompt changes.


# %% tags=["nbval-ignore-output"]
def draw_triangle(prompt_tokens, step):
    alt = f"The rows run up to step {step} after a prompt of {prompt_tokens} tokens."
    return kv.plots.rows_triangle(prompt_tokens, new_tokens, step), alt


kv.widgets.explore(draw_triangle, prompt_tokens=(1, 60, 1, len(prompt)), step=(1, new_tokens, 1, 12))

# %% [markdown]
# How soon does this matter? Divide the rows run by the rows that differ (each token's row once):

# %%
for step in (1, 2, 4, 8, 16, 32, 48):
    run, needed = sum(rows_run[:step]), rows_run[step - 1]
    print(f"after {step:>2} new tokens: {run:>5} rows run, {needed:>2} different ones: {run / needed:5.1f} times")
rows_ratio = kv.results.measure("01.rows_ratio", sum(rows_run) / rows_run[-1], unit="times")

# %% [markdown]
# The operations of the linear layers are proportional to rows, so this ratio is a ratio of operations as well. It grows
# with each token: with a short prompt it is about half the number of new tokens, with a long prompt nearly all of it.
#
# And the clock? Each step's time, from the same run:

# %% tags=["nbval-ignore-output"]
step_times = np.diff([0, *naive.arrivals])
early, late = np.median(step_times[:8]), np.median(step_times[-8:])
rows_factor = np.median(rows_run[-8:]) / np.median(rows_run[:8])
print(f"on this machine: {early * 1000:.1f} ms a step at the start, {late * 1000:.1f} ms at the end:")
print(f"{late / early:.1f} times the time for {rows_factor:.1f} times the rows")
alt = f"Dots: the time of each step against the rows it ran; the last steps take {late / early:.1f} times the first."
kv.plots.show(kv.plots.naive_step_times(rows_run, step_times), alt=alt)

# %% [markdown]
# If time followed the rows exactly, the two factors would be equal. A step has a fixed cost besides: all weights are
# read from memory and hundreds of small operations are started, for one row as for fifty. With few rows this
# **overhead** hides how the work grows. So we first count operations, which no overhead disturbs, and then time
# texts that are long enough.

# %% [markdown]
# ### Exercise: rows_computed
#
# ●○○ · 4 minutes
#
# Write the number of rows that naive generation runs through each layer, as a formula without a loop: for a prompt of
# `prompt_length` tokens and `new_tokens` new ones.
#
# *Why it matters:* an exact count finds the mistake by one that a picture hides. Does the model run on the last token?
#
# <details><summary>Hint 1</summary>Step 1 runs <code>prompt_length</code> rows, step 2 one more, and so on. How many
# rows does step <code>new_tokens</code> run?</details>
#
# <details><summary>Hint 2</summary>0 + 1 + ... + (m - 1) = m (m - 1) / 2. Use <code>//</code> to keep whole
# numbers.</details>


# %% tags=["exercise"]
def rows_computed(prompt_length, new_tokens):
    """Rows run through each layer in all steps together."""
    # SOLUTION
    return new_tokens * prompt_length + new_tokens * (new_tokens - 1) // 2
    # END SOLUTION


# %%
kv.check.rows_computed(rows_computed)

# %% [markdown]
# ## Counting operations
#
# The unit is the **FLOP**, a floating point operation: one multiplication or one addition. Three parts of the model
# matter; all else (norms, softmax, activations) is small beside them and left out, as everywhere in this field.
#
# **Linear layers.** Each weight meets each row once: one multiply and one add. So 2 x weights x rows.
#
# **Attention.** For each head, every query meets every key (`d_head` multiplies and adds), and every weight meets its
# value (as many again): rows x rows, counted in full, the masked half included.
#
# **Output head.** The comparison with the vocabulary (no attention head): 2 x `d_model` x vocabulary for the one row
# whose scores are asked for.


# %%
def count(n):
    """FLOPs of one forward pass over n rows: linear layers, attention, output head."""
    modules = lm.model.layers[0].modules()
    weights = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear))
    linear = config.n_layers * 2 * weights * n
    attention = config.n_layers * config.n_heads * 2 * (2 * config.d_head * n * n)
    head = 2 * config.d_model * config.vocab_size
    return linear, attention, head


print(f"{'tokens':>6} {'linear':>10} {'attention':>10} {'output head':>11}  GFLOP")
for n in config.fitting([1, 16, 128, 1024, 8192]):  # shorter ones where the model's context is shorter
    assert count(n) == kv.flops(config, n)  # the package's formula
    print(f"{n:>6} {count(n)[0] / 1e9:>10.2f} {count(n)[1] / 1e9:>10.4f} {count(n)[2] / 1e9:>11.3f}")

# %% [markdown]
# A formula is a claim. PyTorch can count the operations of a real run; `SDPBackend.MATH` makes attention run as plain
# matrix products, because a fused kernel hides its operations from the counter on some devices. Products with a
# weight matrix are counted under `mm`, those of attention (a batch of heads) under `bmm`.

# %%
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

rows = 16
with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
    lm.model(torch.zeros(1, rows, dtype=torch.int64), last_only=True)
counted = {operation.__name__: number for operation, number in counter.get_flop_counts()["Global"].items()}
formula = kv.flops(config, rows)
assert counted == {"mm": formula.linear + formula.head, "bmm": formula.attention}
print(counted)

# %% [markdown]
# Equal, to the last operation. One remark on statement 3, that *K and V* are computed again: they are, but so is
# everything else of those rows. The matrices that make keys and values are a small part of it:

# %%
kv_weights = 2 * config.d_model * config.n_kv_heads * config.d_head
layer_weights = count(1)[0] // (2 * config.n_layers)
print(f"keys and values: {kv_weights / layer_weights:.1%} of the linear work of a row")

# %% [markdown]
# ### Exercise: linear_flops
#
# ●●○ · 6 minutes
#
# Write the FLOPs of all linear layers of all decoder layers (not the output head) from the configuration alone, without
# a model at hand: `config` has `n_layers`, `d_model`, `d_ff`, `n_heads`, `n_kv_heads`, `d_head`. One layer has seven
# matrices: `q_proj`, `k_proj`, `v_proj`, `o_proj` in attention, `gate_proj`, `up_proj`, `down_proj` in the feed-forward
# part.
#
# *Why it matters:* this line, divided by what a device can do in a second, is the first estimate of any prefill.
#
# <details><summary>Hint 1</summary>A matrix that turns <code>a</code> numbers into <code>b</code> has
# <code>a * b</code> weights. The queries are <code>n_heads * d_head</code> numbers, the keys
# <code>n_kv_heads * d_head</code>, and so are the values.</details>
#
# <details><summary>Hint 2</summary><code>o_proj</code> turns <code>n_heads * d_head</code> numbers into
# <code>d_model</code>; the three feed-forward matrices have <code>d_model * d_ff</code> weights each.</details>


# %% tags=["exercise"]
def linear_flops(config, rows):
    """FLOPs of the linear layers of all decoder layers for `rows` rows."""
    # SOLUTION
    queries, keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    attention_weights = config.d_model * (queries + keys + keys + queries)
    feed_forward_weights = 3 * config.d_model * config.d_ff
    return 2 * rows * config.n_layers * (attention_weights + feed_forward_weights)
    # END SOLUTION


# %%
kv.check.linear_flops(linear_flops)

# %% [markdown]
# ## Where attention overtakes
#
# Linear layers cost the same for each row. Attention costs each row more, the longer the text. At some length the two
# are equal.
#
# **Predict.** At how many tokens does attention cost as much as the linear layers?

# %%
my_guess = 1000  # PREDICT
question = "At how many tokens does attention cost as much as the linear layers?"
kv.results.predict("01.attention_overtakes", my_guess, unit="tokens", question=question)

# %%
lengths = np.arange(1, config.max_seq_len + 1)
per_step = np.array([kv.flops(config, int(n)) for n in lengths], dtype=float)  # (length, part)
overtaken = lengths[per_step[:, 1] >= per_step[:, 0]]
crossing = int(overtaken[0]) if len(overtaken) else None
closed_form = layer_weights // (2 * config.n_heads * config.d_head)  # linear = attention, solved for n
nowhere = f"not up to {config.max_seq_len:,}"
entry = kv.results.measure("01.attention_overtakes", crossing or nowhere, unit="tokens", bound=closed_form)

# %%
parts = dict(zip(("linear layers", "attention", "output head"), per_step.T, strict=True))
alt = (
    "Operations of one step against length: a straight line for the linear layers, a parabola for attention that "
    f"crosses it {'well before' if crossing else 'past'} the end of the model's context, and a flat line near zero for "
    "the output head."
)
kv.plots.show(kv.plots.flops_by_length(lengths, parts, crossing, config.max_seq_len), alt=alt)

# %%
side = "within" if crossing else "past"
print(f"Equal at {closed_form:,} tokens, {side} this model's context of {config.max_seq_len:,} tokens.")

# %% [markdown]
# So for texts of a few hundred tokens this model is nearly all linear layers, and attention's growth does not show
# yet. A wider model has more linear work for each row, so there the two meet later.

# %% [markdown]
# ## How work grows: exponents
#
# When work grows like length to the power p, doubling the length multiplies it by 2 to the power p. On a picture with
# two logarithmic axes such growth is a straight line, and its **slope is the exponent** p. One step over n rows has
# exponents 1 (linear layers) and 2 (attention). Writing a text of n tokens from an empty page is a sum of n such steps.
#
# **Predict.** What are the two exponents of the sums, for the linear layers and for attention?

# %%
my_guess = 2  # PREDICT
question = "Linear layers: exponent of all n steps together?"
kv.results.predict("01.linear_exponent", my_guess, question=question)

# %%
my_guess = 2  # PREDICT
question = "Attention: exponent of all n steps together?"
kv.results.predict("01.attention_exponent", my_guess, question=question)

# %% [markdown]
# Sum the counted operations step by step, and fit a line in logarithms. `power_law` does it by least squares and
# returns exponent and factor; you write your own in the exercise below.

# %%
from kvcourse.plots.naive import power_law

totals = per_step.cumsum(axis=0)  # operations of the first n steps
doublings = config.fitting([128 * 2**i for i in range(7)])  # up to 8192 tokens
at = np.array(doublings) - 1
for part, name in enumerate(("linear", "attention")):
    step_exponent = power_law(doublings, per_step[at, part])[0]
    total_exponent = power_law(doublings, totals[at, part])[0]
    print(f"{name}: exponent {step_exponent:.2f} in a step")
    kv.results.measure(f"01.{name}_exponent", total_exponent, bound=2 + part, note="counted, n steps")

# %%
some = np.unique(np.geomspace(4, config.max_seq_len, 60).astype(int))
series = {
    "linear layers": totals[some - 1, 0],
    "attention": totals[some - 1, 1],
    "all together": totals[some - 1].sum(1),
}
alt = (
    "Left: operations for a whole text against its length, on log scales. Right: the slope of each curve: 2 for the "
    "linear layers, 3 for attention, and for all together a rise from 2 towards 3."
)
kv.plots.show(kv.plots.growth(some, series), alt=alt)

# %% [markdown]
# Summing raises each exponent by one: 1 + 2 + ... + n is about n²/2, and 1 + 4 + ... + n² is about n³/3. All
# together start at 2, and bend upwards where attention begins to count. At the very left the slopes are lower: there
# the output head, which costs the same in every step, and the first few terms of the sums weigh in.

# %% [markdown]
# ### Exercise: fit_exponent
#
# ●○○ · 4 minutes
#
# Write the fit yourself: from arrays of lengths and costs, the exponent p of the best law cost = c · length^p.
#
# *Why it matters:* with this one number you can tell from any table of timings what a longer text will cost.
#
# <details><summary>Hint 1</summary>log(cost) = log(c) + p · log(length) is a straight line. What is p in it?</details>
#
# <details><summary>Hint 2</summary><code>np.polyfit(x, y, 1)</code> fits a line and returns its slope first.</details>


# %% tags=["exercise"]
def fit_exponent(lengths, costs):
    """The exponent of the power law that fits best in logarithms (least squares)."""
    # SOLUTION
    slope, _ = np.polyfit(np.log(lengths), np.log(costs), 1)
    return slope
    # END SOLUTION


# %%
kv.check.fit_exponent(fit_exponent)

# %% [markdown]
# ## The same in time
#
# Now the clock. First one layer's two parts alone, each for rows enough that overhead is small. A GPU needs far longer
# texts for that, so the lengths depend on the device.
#
# **Predict.** In one run over n rows, with which power of n does the time of attention grow?

# %%
my_guess = 2  # PREDICT
question = "Attention alone, one run over n rows, timed: which exponent?"
kv.results.predict("01.attention_time_exponent", my_guess, question=question)

# %% tags=["nbval-ignore-output"]
fit_from = 2048 if lm.model.device.type == "cuda" else 128  # shorter texts are not fitted
layer_lengths = [fit_from // 2 * 2**i for i in range(6)]
layer = lm.model.layers[0]
where = {"device": lm.model.device, "dtype": lm.model.dtype}


@torch.inference_mode()
def linear_time(n):
    x, heads = torch.randn(n, config.d_model, **where), torch.randn(n, config.n_heads * config.d_head, **where)
    a = layer.self_attn
    return kv.median_time(lambda: (a.q_proj(x), a.k_proj(x), a.v_proj(x), a.o_proj(heads), layer.mlp(x)), 0.1)


@torch.inference_mode()
def attention_time(n):
    q, k, v = (torch.randn(1, h, n, config.d_head, **where) for h in (config.n_heads, *2 * [config.n_kv_heads]))
    return kv.median_time(lambda: kv.layers.attention(q, k, v, causal=True), 0.1)


# %% tags=["nbval-ignore-output"]
timed = {
    "linear layers": [linear_time(n) for n in layer_lengths],
    "attention": [attention_time(n) for n in layer_lengths],
}
long_enough = [i for i, n in enumerate(layer_lengths) if n >= fit_from]
time_exponents = {}
for bound, (name, seconds) in enumerate(timed.items(), 1):
    fitted = [layer_lengths[i] for i in long_enough], [seconds[i] for i in long_enough]
    time_exponents[name] = power_law(*fitted)[0]
    key = f"01.{name.split()[0]}_time_exponent"
    kv.results.measure(key, time_exponents[name], bound=bound, note=f"one step, from {fit_from} tokens")

# %% tags=["nbval-ignore-output"]
milliseconds = {name: (layer_lengths, np.array(seconds) * 1000) for name, seconds in timed.items()}
figure = kv.plots.power_laws(milliseconds, fit_from, "time (ms)", "One layer: linear part and attention, timed")
alt = (
    f"Times of one layer's parts on log scales; the fitted slopes are {time_exponents['linear layers']:.2f} for the "
    f"linear layers and {time_exponents['attention']:.2f} for attention."
)
kv.plots.show(figure, alt=alt)

# %% [markdown]
# A slope in time need not be the whole number of the count: a kernel works better on large matrices than on small ones,
# the processor's own caches fill up, and a fused attention may skip the masked half in blocks, which helps long texts
# more than short ones.
#
# Now whole steps, all layers and the output head. For the total time of a text we would have to time every step. We
# time a few lengths from 1 token on, read the steps between them off straight lines, and add up.

# %% tags=["nbval-ignore-output"]
longest = min(8 * fit_from, config.max_seq_len)
fit_from = min(fit_from, longest // 4)  # three lengths at least
doubled_lengths = [32 * 2**i for i in range(9) if 32 * 2**i <= longest]
step_lengths = [1, 2, 8, *doubled_lengths]


def step_time(n):
    text = torch.zeros(1, n, dtype=torch.int64)  # any tokens cost the same
    return kv.median_time(lambda: lm.model(text, last_only=True))


step_seconds = [step_time(n) for n in step_lengths]
each_step = np.interp(np.arange(1, step_lengths[-1] + 1), step_lengths, step_seconds)
time_until = each_step.cumsum()  # seconds for a text of 1, 2, 3, ... tokens
for n, seconds in zip(step_lengths, step_seconds, strict=True):
    print(f"{n:>5} tokens: {seconds * 1000:8.1f} ms a step, {time_until[n - 1]:8.3f} s for the whole text")

# %% tags=["nbval-ignore-output"]
total_seconds = [time_until[n - 1] for n in step_lengths]
fitted = np.array([n for n in step_lengths if n >= fit_from])
total_exponent = power_law(fitted, time_until[fitted - 1])[0]
counted_exponent = power_law(fitted, totals[fitted - 1].sum(1))[0]
kv.results.measure("01.total_time_exponent", total_exponent, bound=counted_exponent, note="n steps, all parts")
whole = {"one step": (step_lengths, step_seconds), "all n steps": (step_lengths, total_seconds)}
alt = f"Time of a step and of a whole text on log scales, the latter with slope {total_exponent:.2f}."
kv.plots.show(kv.plots.power_laws(whole, fit_from, "time (s)", "The whole model, timed"), alt=alt)

# %% [markdown]
# Look at the shaded part. Where points lie above their line, the fixed cost of a step shows: it stays when the rows get
# fewer. A fit through those points would give a smaller exponent, and a wrong forecast for long texts.

# %% [markdown]
# ## Doubling the text
#
# Statement 3 ends: *doubling the tokens quadruples the work*. Test it: work for 2n tokens divided by work for n, for
# pairs n and 2n that were both timed, from 32 tokens on.
#
# **Predict.** For the longest such pair: how many times the time does twice the text take?

# %%
my_guess = 4  # PREDICT
question = "Twice the tokens (the longest pair we timed): how many times the time?"
kv.results.predict("01.doubling", my_guess, unit="times", question=question)

# %% tags=["nbval-ignore-output"]
halves = np.array(doubled_lengths[:-1])
by_time = time_until[2 * halves - 1] / time_until[halves - 1]
all_parts = totals.sum(1)
by_count = all_parts[2 * halves - 1] / all_parts[halves - 1]
for n, seconds, operations in zip(halves, by_time, by_count, strict=True):
    print(f"{n:>5} -> {2 * n:>5} tokens: {seconds:.2f} times the time, {operations:.2f} times the operations")
kv.results.measure("01.doubling", by_time[-1], unit="times", bound=by_count[-1])
cheap = halves[by_time < 3.6]  # clearly less than 4
print(f"Clearly less than 4 times the time: {f'up to {2 * cheap.max()} tokens' if len(cheap) else 'nowhere'}.")

# %% tags=["nbval-ignore-output"]
ns = np.array([2**i for i in range(4, 13) if 2 ** (i + 1) <= config.max_seq_len])
ratios = totals[2 * ns - 1] / totals[ns - 1]
counted_ratios = {"linear layers": ratios[:, 0], "attention": ratios[:, 1]}
counted_ratios["all together"] = all_parts[2 * ns - 1] / all_parts[ns - 1]
alt = (
    "Doubling costs 4 times for linear layers, 8 for attention and a rising mix for all together; the dots are time, "
    f"{by_time[0]:.1f} times at {halves[0]} tokens and {by_time[-1]:.1f} times at {halves[-1]}."
)
kv.plots.show(kv.plots.doubling_ratios(ns, counted_ratios, (halves, by_time)), alt=alt)

# %% [markdown]
# Three regimes. While overhead rules, each step takes about the same time and doubling the text costs about 2. Where
# linear layers rule it costs 4. Where attention rules it goes towards 8.
#
# One more condition hides in "doubling the tokens": of the *whole text*. After a long prompt, twice the answer is not
# twice the text.

# %%
for prompt_length in (1, 100, 1000):
    rows_of = [sum(prompt_length + step for step in range(new)) for new in (50, 100)]
    print(f"prompt of {prompt_length:>4}: 100 new tokens run {rows_of[1] / rows_of[0]:.2f} times the rows of 50")

# %% [markdown]
# ## Summary
#
# What you just measured:

# %% tags=["nbval-ignore-output"]
kv.results.summary("01")

# %% [markdown]
# Your guesses beside what was measured: within the band they were at most a factor of two off. The farther from 1, the
# more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("01")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# The verdict on statement 3, from the numbers above. It is *wrong as said* if some step ran fewer rows than the text
# had, or if the exponent of the linear layers is not within 0.1 of 2. If both are as said, but attention's exponent is
# above 2.5, the statement *holds with a condition*.

# %% tags=["nbval-ignore-output"]
linear, attention = (kv.results.get(f"01.{name}_exponent").measured for name in ("linear", "attention"))
again = rows_run == [len(prompt) + step for step in range(new_tokens)]
quadruples = abs(linear - 2) < 0.1
verdict = "wrong as said" if not (again and quadruples) else "holds with a condition" if attention > 2.5 else "holds"
because = (
    f"Step by step, {'all rows were' if again else 'not all rows were'} run again. Total work grows with exponent "
    f"{linear:.2f} in the linear layers (doubling costs {2**linear:.1f} times) and {attention:.2f} in attention "
    f"({2**attention:.1f} times), which costs more in steps of over {closed_form:,} tokens. In time, doubling cost "
    f"{by_time[0]:.1f} times at {halves[0]} tokens and {by_time[-1]:.1f} times at {halves[-1]}."
)
kv.results.verdict(3, verdict, because)

# %% [markdown]
# A second statement says that *after a few tokens the gap in operations is large*. This notebook has one side of it:
# the operations without a cache. The verdict waits for the other side, in notebook 02.

# %%
first_tenfold = next((n for n in range(1, new_tokens + 1) if sum(rows_run[:n]) >= 10 * rows_run[n - 1]), None)
print(f"Rows run, as a multiple of the different rows: {rows_ratio.measured:.1f} after {new_tokens} tokens.")
print(f"Ten times is reached after {first_tenfold} new tokens (prompt of {len(prompt)}).")

# %% tags=["nbval-ignore-output"]
kv.check.progress("01")

# %% [markdown]
# **What to remember**
#
# 1. One run of the model gives one token. Text is a loop around it.
# 2. With the causal mask, a row never depends on later rows.
# 3. The naive loop runs every row again in every step: 1 + 2 + ... + n rows for n tokens.
# 4. In total, linear layers cost O(n²) and attention O(n³). Doubling the text costs 4 times in the one, 8 in the other.
# 5. Count operations first, then time, and only at lengths where overhead no longer hides the slope.

# %% [markdown]
# ## What the field does today
#
# - Attention as computed here is that of *Attention Is All You Need* (arXiv 1706.03762, section 3.2), the square root
#   and the mask included. Key/value heads shared by several query heads are grouped-query attention (arXiv 2305.13245).
# - No serving engine uses the naive loop by default. It lives on as the reference that faster versions are tested
#   against. In Hugging Face Transformers the cache is on by default (`use_cache` in the documentation of
#   `GenerationConfig`).
# - Running all rows at once is not naive where all of them are needed: training and scoring a given text do just this.
# - FlashAttention (arXiv 2205.14135) computes exact attention without ever storing the matrix of weights. It moves far
#   fewer bytes; the number of operations remains quadratic in the length of the text.
# - The count of 2 operations for each weight and token, plus a term for attention that grows with context, is the
#   customary one since *Scaling Laws for Neural Language Models* (arXiv 2001.08361, section 2.1).
# - Computing rows again can be the right choice: when memory runs out, vLLM may drop the cache of a request and later
#   recompute it (arXiv 2309.06180, section 4.5).
#
# ## What comes next
#
# A row never changes once it is computed, and yet we computed each one up to n times. Notebook **02, the KV cache**
# keeps what later steps need from it, and each step runs a single row.
