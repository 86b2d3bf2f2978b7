# %% [markdown]
# # 4. The memory bill and shared heads
#
# **Time:** about 80 minutes · **Device:** any (CPU is enough)
#
# **You will be able to**
#
# - write down how many bytes a cache takes, for any model, and check it against what was allocated;
# - say what fits on a device, and what binds: the weights, the cache, or the model's own context;
# - compute attention with shared key-value heads without copying any of them;
# - weigh what sharing saves against what it costs, in perplexity, recall and speed;
# - turn a trained model into one with fewer key-value heads, and let it recover;
# - explain how a latent makes the cache smaller still, and why nothing has to be expanded.
#
# {{colab_badge}}

# %% tags=["setup"]
# SETUP

# %% tags=["nbval-ignore-output"]
from dataclasses import replace
from statistics import mean, stdev

import ipywidgets
import numpy as np
import torch

from kvcourse import gqa, mla
from kvcourse.training import report
from kvcourse.training.recipe import Recipe, held_out
from kvcourse.uptraining import fine_tune, share_heads, tokenizer_for

checkpoint = "smollm2-135m"  # or your own
lm = kv.load_model(checkpoint)
model, config = lm.model, lm.config
tiny = {name: kv.load_model(name, dtype="float32") for name in ("tiny-mha", "tiny-gqa", "tiny-mqa", "tiny-window")}
print(f"{lm.name} on {model.device} in {model.dtype}, and the course's own models: {', '.join(tiny)}")

# %% [markdown]
# ## What a token leaves behind
#
# In each layer, attention is split into *heads*. A head compares a query of `d_head` numbers with the keys of earlier
# tokens, of `d_head` numbers each, and collects their values, again `d_head` numbers. So that nothing is computed
# twice, keys and values stay in memory. Count them, and you have the formula that one reads everywhere:
#
# $$\text{bytes} = 2 \times \text{layers} \times \text{heads} \times d_{\text{head}} \times \text{length} \times
# \text{batch} \times 2$$
#
# The first 2 is for keys and values, the last for the two bytes of a 16-bit number. A formula for memory can be checked
# to the byte: allocate a cache, and ask PyTorch how large its storage is.

# %%
tokens = min(1000, config.max_seq_len)
by_formula = 2 * config.n_layers * config.n_heads * config.d_head * tokens * 1 * 2
print(f"{config.n_layers} layers, {config.n_heads} heads of {config.d_head} numbers, one text of {tokens:,} tokens")
print(f"by the formula: {by_formula / 1e6:.1f} MB")

# %% [markdown]
# **Predict.** Divide what the formula says by what is really allocated. Which number comes out?

# %%
my_guess = 1  # PREDICT
question = "Bytes by the formula, divided by bytes allocated?"
kv.results.predict("04.formula_over_allocated", my_guess, unit="times", question=question)

# %%
cache = kv.DenseCache(config, max_len=tokens, dtype=torch.float16, device=model.device)
print(f"allocated: {cache.nbytes / 1e6:.1f} MB, keys {tuple(cache.keys.shape)}, values {tuple(cache.values.shape)}")
kv.results.measure("04.formula_over_allocated", by_formula / cache.nbytes, unit="times")

# %% [markdown]
# Look at the shape. Its parts are layers, texts, heads, tokens and numbers of a head, and the third need not be the
# number of heads that the formula was given. A model has two numbers of heads, which may differ:

# %%
shared_by = "each has its own" if config.group_size == 1 else f"{config.group_size} query heads share one"
print(f"{config.n_heads} query heads, {config.n_kv_heads} key-value heads: {shared_by}")

# %% [markdown]
# So there is the missing word. It must say **KV heads**. Queries are used at once and thrown away; only keys and values
# are kept, and a model may have fewer of those than of queries. When each query head has its own, that is *multi-head
# attention* (MHA). When groups of query heads share one, it is *grouped-query attention* (GQA); when all share a single
# one, *multi-query attention* (MQA).
#
# The models at hand, both readings of the formula, and the allocator:


# %%
def allocated(config, tokens, batch_size=1):
    """Bytes of a 16-bit cache for texts of so many tokens, as PyTorch allocates it."""
    kind = kv.WindowCache if any(config.windows) else kv.DenseCache
    return kind(config, batch_size=batch_size, max_len=tokens, dtype=torch.float16, device="cpu").nbytes


configs = {lm.name: config} | {name: other.config for name, other in tiny.items()}
read_as, really = {}, {}
print(f"{'bytes':<13}{'of heads':>10}  {'of KV heads':>11} {'allocated':>11}")
for name, c in configs.items():
    n = min(tokens, c.max_seq_len)
    read_as[name] = [2 * c.n_layers * heads * c.d_head * n * 1 * 2 for heads in (c.n_heads, c.n_kv_heads)]
    really[name] = allocated(c, n)
    said = [f"{nbytes:>10,}{' ' if nbytes != really[name] else '*'}" for nbytes in read_as[name]]
    print(f"{name:<13}{said[0]} {said[1]} {really[name]:>11,}")
print("* equal to the byte")

# %% [markdown]
# With KV heads the formula is right to the byte, with one exception: the model with a window keeps its latest tokens
# only, so there "length" must be read as "length, or the window if that is shorter". Windows are the matter of notebook
# 05; `kv.cache_bytes` counts them.

# %% [markdown]
# ### Exercise: cache_size
#
# ●○○ · 4 minutes
#
# Write the bytes of the cache of `batch_size` texts of `seq_len` tokens each, for numbers of `bits` bits. `config` has
# `n_layers`, `n_heads`, `n_kv_heads`, `d_head` and `d_model`; it has no window.
#
# Why it matters: with this line and the `config.json` of a model, you know whether it fits before you download it.
#
# <details><summary>Hint 1</summary>Begin with one token in one layer: a key and a value for each KV head.</details>
# <details><summary>Hint 2</summary>A number of <code>bits</code> bits has <code>bits / 8</code> bytes.</details>


# %% tags=["exercise"]
def cache_size(config, seq_len, batch_size, bits):
    """Bytes of keys and values."""
    # SOLUTION
    numbers = 2 * config.n_layers * config.n_kv_heads * config.d_head * seq_len * batch_size
    return numbers * bits / 8
    # END SOLUTION


# %%
kv.check.cache_size(cache_size)

# %% [markdown]
# ## 70 billion parameters, 128,000 tokens
#
# How large does it get? `kv.PUBLISHED` holds the shapes of public models, each with its source. We take one of 70
# billion parameters, and one long text.

# %%
llama = kv.PUBLISHED["Llama 3.1 70B"]
print(f"{kv.parameters(llama) / 1e9:.1f} billion parameters, {llama.n_layers} layers, {llama.n_heads} query heads")
print(llama.source)

# %% [markdown]
# **Predict.** One text of 128,000 tokens, numbers of 16 bits: how many GB (10⁹ bytes) of cache?

# %%
my_guess = 100  # PREDICT
question = "Llama 3.1 70B, one text of 128,000 tokens, 16 bits: how much cache?"
kv.results.predict("04.llama_70b", my_guess, unit="GB", question=question)

# %%
unshared = replace(llama, n_kv_heads=llama.n_heads)
long_text, long_unshared = kv.cache_bytes(llama, 128_000), kv.cache_bytes(unshared, 128_000)
print(f"with its {llama.n_kv_heads} KV heads:              {long_text / 1e9:6.1f} GB, {long_text:,} bytes")
print(f"if all {llama.n_heads} heads kept their own: {long_unshared / 1e9:6.1f} GB, {long_unshared:,} bytes")
kv.results.measure("04.llama_70b", long_text / 1e9, unit="GB")
kv.results.measure("04.llama_70b_unshared", long_unshared / 1e9, unit="GB", note="if all heads kept their own")

# %% [markdown]
# Can we ask the allocator here too? PyTorch has a device for that, `meta`: tensors there have shapes, and storage of
# the right size, but no memory behind it.

# %%
fields = ("vocab_size", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_model", "d_ff", "max_seq_len")
same_shape = kv.ModelConfig(**{name: getattr(llama, name) for name in fields})
on_meta = kv.DenseCache(same_shape, max_len=128_000, dtype=torch.float16, device="meta")
assert on_meta.nbytes == long_text
print(f"allocated on meta: {on_meta.nbytes:,} bytes; for each token {on_meta.nbytes // 128_000:,}")

# %% [markdown]
# Now the bill of all of them, for one text of 32,768 tokens, whether or not the model was made for texts that long. The
# hollow part is what the model would keep if every query head kept a key and a value of its own, for every token.

# %% tags=["nbval-ignore-output"]
bill = {}
for name, shape in kv.PUBLISHED.items():
    all_heads = replace(shape, n_kv_heads=shape.n_heads, window=None, latent=None)
    bill[name] = kv.cache_bytes(shape, 32_768), kv.cache_bytes(all_heads, 32_768)
most = max(bill, key=lambda name: bill[name][1] / bill[name][0])
alt = (
    f"From {min(bill.values())[0] / 1e9:.1f} to {max(bill.values())[0] / 1e9:.0f} GB of cache; {most} keeps "
    f"{bill[most][1] / bill[most][0]:.0f} times less than all its heads would."
)
kv.plots.show(kv.plots.cache_bill(bill, 32_768), alt=alt)

# %%
sharing = [name for name, shape in kv.PUBLISHED.items() if shape.n_kv_heads < shape.n_heads and not shape.latent]
windowed = [name for name, shape in kv.PUBLISHED.items() if any(shape.windows)]
latent = [name for name, shape in kv.PUBLISHED.items() if shape.latent]
plain = [name for name in kv.PUBLISHED if name not in sharing + windowed + latent]
print(f"{len(sharing)} of {len(kv.PUBLISHED)} share KV heads")
for what, names in (("a window in some layers or all", windowed), ("a latent", latent), ("none of these", plain)):
    print(f"{what}: {', '.join(names)}")

# %% [markdown]
# Three ways to a smaller cache: fewer heads, fewer tokens (windows, notebook 05), and something smaller in place of
# keys and values (a latent, at the end of this notebook). A fourth, fewer bits, is notebook 09.
#
# ## What fits
#
# A device has so many bytes. The weights take their part once, then every text brings its cache. Not all memory can be
# filled: activations, libraries and, on a laptop, the system need some; here we fill at most 90%.

# %%
for name, memory in kv.DEVICES.items():
    print(f"{name:<15} {0.9 * memory / 1e9:6.1f} GB may be filled")
small = kv.PUBLISHED["Llama 3.1 8B"]
print(f"weights of Llama 3.1 8B in 16 bits: {kv.weight_bytes(small) / 1e9:.1f} GB")

# %% [markdown]
# ### Exercise: tokens_that_fit
#
# ●●○ · 6 minutes
#
# Write how many tokens each of `batch_size` texts can hold on a device where `memory` bytes may be filled. Weights have
# `weight_bits` bits, numbers of the cache `cache_bits`. Return a whole number; 0 when the weights alone do not fit. The
# model has no window.
#
# Why it matters: it is the line of the log in which a server says how many tokens its cache holds, and the reason why
# the same model serves many people on one machine and none on another.
#
# <details><summary>Hint 1</summary><code>kv.weight_bytes(config, weight_bits)</code>, and
# <code>kv.cache_bytes(config, 1, batch_size, cache_bits)</code>: what one more token for each text takes.</details>
# <details><summary>Hint 2</summary>Divide the room that the weights leave by that, rounded down. What if there is
# none?</details>


# %% tags=["exercise"]
def tokens_that_fit(config, memory, batch_size, weight_bits, cache_bits):
    """The most tokens that each text can hold, after the weights."""
    # SOLUTION
    room = memory - kv.weight_bytes(config, weight_bits)
    each = kv.cache_bytes(config, 1, batch_size, cache_bits)
    return max(0, int(room // each))
    # END SOLUTION


# %%
kv.check.tokens_that_fit(tokens_that_fit)

# %% [markdown]
# The package has `kv.fits`, `kv.longest_context` and `kv.largest_batch`, which count windows and latents too.
#
# **Predict.** Llama 3.1 8B in 16 bits on a device with 24 GB, one text. The model was made for 131,072 tokens. How many
# fit?

# %%
my_guess = 131_072  # PREDICT
question = "Llama 3.1 8B on 24 GB, one text: how many tokens fit?"
kv.results.predict("04.tokens_on_24_gb", my_guess, unit="tokens", question=question)

# %%
fitting = kv.longest_context(small, kv.DEVICES["RTX 4090 24 GB"])
kv.results.measure("04.tokens_on_24_gb", fitting, unit="tokens", bound=small.max_seq_len, note="bound: its own context")
for texts in (2, 8, 32):
    print(f"{texts:>2} texts: {kv.longest_context(small, kv.DEVICES['RTX 4090 24 GB'], texts):>7,} tokens each")

# %% [markdown]
# Length and batch draw on the same memory: twice the texts, half the tokens. So the answer to "does it fit?" is a map.
# We draw three of them, for four devices: Llama 3.1 8B with weights of 16 bits, and of 4 (4.5 with their scales, see
# below), and Llama 3.1 70B with those of 4.5. The cache has 16 bits.

# %% tags=["nbval-ignore-output"]
devices = {name: 0.9 * memory for name, memory in kv.DEVICES.items() if "laptop" not in name}
lengths, batches = np.geomspace(512, 2**18, 100), np.geomspace(1, 256, 80)
requests = {
    "8B, weights in 16 bits": (small, 16),
    "8B, weights in 4.5 bits": (small, 4.5),
    "70B, weights in 4.5 bits": (llama, 4.5),
}
needed = {}
for title, (shape, weight_bits) in requests.items():
    each = np.array([kv.cache_bytes(shape, int(n)) for n in lengths])
    needed[title] = kv.weight_bytes(shape, weight_bits) + np.floor(batches)[:, None] * each
ends = {title: shape.max_seq_len for title, (shape, _) in requests.items()}
kv.plots.show(
    kv.plots.fit_map(lengths, batches, needed, devices, ends),
    alt="Three maps of text length and batch size, colored by the smallest device that holds them. The borders "
    f"fall from many short texts to few long ones; on 24 GB the 8B model in 16 bits runs one of {fitting:,} tokens.",
)

# %% [markdown]
# ### What binds
#
# For every public model and every device: what ends first when texts get longer? Either the **weights** do not fit at
# all, or the **cache** fills the memory, or the model's own **context** ends, and memory is not the limit.


# %%
def binds(shape, memory, texts, weight_bits=16):
    """What ends first when so many texts get longer: "weights", "cache" or "context"."""
    longest = kv.longest_context(shape, memory, texts, weight_bits=weight_bits)
    if longest == 0:
        return "weights"
    return "cache" if longest < shape.max_seq_len else "context"


# %%
bound_by = {1: [], 16: []}
for device, memory in kv.DEVICES.items():
    for texts, everywhere in bound_by.items():
        here = [binds(shape, memory, texts) for shape in kv.PUBLISHED.values()]
        everywhere += here
        counts = ", ".join(f"{what} {here.count(what):>2}" for what in ("weights", "cache", "context"))
        print(f"{device:<15} {texts:>2} texts: {counts}")

# %% [markdown]
# With one text, the cache is seldom what ends first: most models either do not fit at all, or can be used to the end of
# their context. With a batch, and a server needs one to be worth its price (notebook 03), the cache binds much more
# often.
#
# What a model *makes* of a long text is another question. On tasks that take more than finding one fact, many models
# fall off well before the context they are sold with: "only half of them can maintain satisfactory performance" at
# 32,000 tokens, of those that claim as much (RULER, arXiv 2404.06654; cited, not measured here).
#
# ## A 70B model on a laptop
#
# "Llama 70B runs on a 64 GB laptop in 4 bits." Weights of 4 bits are kept in groups, and each group has a scale of its
# own, often a zero point too. `kv.bits_per_number` adds these up. For each way of keeping them: bits for each weight,
# the gigabytes of all weights, and the tokens of cache that there is room for:

# %%
formats = {"16 bits": 16, "8 bits": 8, "4 bits, no scales": 4}
formats["4 bits, groups of 128, scale"] = kv.bits_per_number(4, 128)
formats["4 bits, groups of 32, scale"] = kv.bits_per_number(4, 32)
formats["4 bits, groups of 32, scale and zero"] = kv.bits_per_number(4, 32, zero_bits=16)
laptop = kv.DEVICES["laptop 64 GB"]
reaches = {}
print(f"{'':<37}{'bits':>7}{'GB':>7}{'tokens':>8}")
for name, bits in formats.items():
    reaches[name] = kv.longest_context(llama, laptop, weight_bits=bits)
    gigabytes = kv.weight_bytes(llama, bits) / 1e9
    print(f"{name:<37}{bits:7.3f}{gigabytes:7.1f}{reaches[name]:8,}")

# %% tags=["nbval-ignore-output"]
held = 8_000
bars = {name: (kv.weight_bytes(llama, bits), kv.cache_bytes(llama, held)) for name, bits in formats.items()}
kv.plots.show(
    kv.plots.memory_bill(bars, laptop, 0.9),
    alt=f"Llama 3.1 70B with {held:,} tokens of cache on 64 GB: 16 and 8 bits do not fit, the others do; the cache is "
    f"{bars['16 bits'][1] / 1e9:.1f} GB of it.",
)

# %% [markdown]
# It fits. But fitting is not yet running at a pleasant speed: each token reads all weights (notebook 03). We measure
# how many bytes a second this machine reads, and divide. Laptops differ, so we also divide 100 and 400 GB a second.

# %% tags=["nbval-ignore-output"]
ceilings = kv.measure_ceilings(model.device, model.dtype)
four_bits = formats["4 bits, groups of 32, scale"]
seconds = kv.weight_bytes(llama, four_bits) / ceilings.bytes_per_second
print(f"this machine reads {ceilings.bytes_per_second / 1e9:,.1f} GB a second")
print(f"a token of Llama 3.1 70B would take at least {seconds:.2f} s, if the weights are held here")
for bandwidth in (100e9, 400e9):
    rate = bandwidth / kv.weight_bytes(llama, four_bits)
    print(f"at {bandwidth / 1e9:.0f} GB a second it is at most {rate:.1f} tokens a second")


# %%
def devices_needed(shape, memory, seq_len, weight_bits=16):
    """How many devices of this size hold weights and one text together, 90% filled."""
    fit = kv.fits(shape, memory, seq_len, weight_bits=weight_bits)
    return -(-(fit.weights + fit.cache) // fit.room)


in_16_bits = {name: devices_needed(llama, memory, held) for name, memory in kv.DEVICES.items()}
print(f"in 16 bits, with {held:,} tokens:", ", ".join(f"{n} x {name}" for name, n in in_16_bits.items()))

# %% [markdown]
# ## Shared heads as code
#
# How does attention run when query heads share keys and values? Query heads that share stand next to each other: query
# head `h` uses KV head `h // group`.

# %%
print("query heads:", *range(config.n_heads))
print("KV head:    ", *(h // config.group_size for h in range(config.n_heads)))

# %% [markdown]
# ### Exercise: repeat_heads
#
# ●○○ · 4 minutes
#
# The simplest way: give each query head its own copy. `k` has the shape `(B, n_kv_heads, S, d_head)`. Return
# `(B, n_heads, S, d_head)`, in the order above.
#
# Why it matters: the other order, 0 1 2 0 1 2, has the same shape and raises no error. The model then speaks nonsense.
# It is easily shipped: with one KV head, or as many as query heads, a test cannot see it.
#
# <details><summary>Hint 1</summary>Each head is needed <code>n_heads // n_kv_heads</code> times.</details>
# <details><summary>Hint 2</summary><code>torch.repeat_interleave</code> repeats each entry in its place along
# <code>dim</code>; <code>Tensor.repeat</code> repeats the whole.</details>


# %% tags=["exercise"]
def repeat_heads(k, n_heads):
    """A key (or value) head for each query head."""
    # SOLUTION
    return torch.repeat_interleave(k, n_heads // k.shape[1], dim=1)
    # END SOLUTION


# %%
kv.check.repeat_heads(repeat_heads)

# %% [markdown]
# This is right, and it is a waste: what was not kept in memory is now made anew at each step, written, and read again.
# The second way copies nothing. The *queries* get another dimension, `(B, n_kv_heads, group, T, d_head)`, and the group
# shares one head's keys in a single matrix product.

# %% [markdown]
# ### Exercise: attend_grouped
#
# ●●○ · 10 minutes
#
# Write attention of `q` `(B, H, T, D)` over all of `k`, `v` `(B, H_kv, S, D)`, without a mask, for any `H_kv` that
# divides `H`. Return `(B, H, T, D)`. Do not copy keys or values.
#
# Why it matters: this is what sharing is for. A kernel that repeats heads first has saved the memory of the cache, and
# not the reading.
#
# <details><summary>Hint 1</summary><code>q.unflatten(1, (H_kv, -1))</code> splits the heads;
# <code>torch.einsum("bhgtd,bhsd->bhgts", ...)</code> has no <code>g</code> in the keys.</details>
# <details><summary>Hint 2</summary>Divide by the square root of D, take the softmax over the last dimension, a second
# einsum with the values, then <code>flatten(1, 2)</code>.</details>


# %% tags=["exercise"]
def attend_grouped(q, k, v):
    """Attention in which groups of query heads share keys and values."""
    # SOLUTION
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bhgtd,bhsd->bhgts", grouped, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhgts,bhsd->bhgtd", scores.softmax(-1), v).flatten(1, 2)
    # END SOLUTION


# %%
kv.check.attend_grouped(attend_grouped)

# %% [markdown]
# The third way leaves it to PyTorch: `scaled_dot_product_attention(..., enable_gqa=True)`, which the course's model
# uses in every layer. The package has all three. Are they equal? Keys and values are those of a real text in the first
# layer.

# %%
ways = {
    "repeat the heads": gqa.attend_repeated,
    "group the queries": gqa.attend_grouped,
    "PyTorch's own": gqa.attend_fused,
}
some_text = "Of all the things that a library lends, silence is the one that is always brought back late. "
ids = (lm.encode(some_text) * 10)[: min(128, config.max_seq_len)]
real = kv.DenseCache(config, max_len=len(ids), dtype=model.dtype, device=model.device)
model(torch.tensor([ids]), cache=real, last_only=True)
keys, values = real.keys[0].float(), real.values[0].float()
queries = torch.randn(1, config.n_heads, 4, config.d_head, generator=torch.Generator().manual_seed(0)).to(keys)
results = {way: attend(queries, keys, values) for way, attend in ways.items()}
for way, result in results.items():
    same = torch.allclose(result, results["repeat the heads"], atol=1e-4 if keys.device.type == "cpu" else 1e-2)
    print(f"{way:<18} {tuple(result.shape)}, equal up to rounding: {same}")

# %% [markdown]
# **Predict.** One new token in each of 8 texts, attention in one layer, 4,096 tokens held: repeating the heads first,
# against PyTorch's own way. How many times as long?

# %%
my_guess = 2  # PREDICT
question = "Attention with repeated heads against PyTorch's own: how many times as long?"
kv.results.predict("04.repeat_cost", my_guess, unit="times", question=question)

# %% tags=["nbval-ignore-output"]
context_lengths, seconds = [256, 1024, 4096], {way: [] for way in ways}
for n in context_lengths:
    q = torch.randn(8, config.n_heads, 1, config.d_head).to(model.device, model.dtype)
    k, v = torch.randn(2, 8, config.n_kv_heads, n, config.d_head).to(model.device, model.dtype)
    for way, attend in ways.items():
        seconds[way].append(kv.median_time(lambda: attend(q, k, v)))  # noqa: B023 (called at once)
    print(f"{n:>5,} tokens:", ", ".join(f"{way} {1e3 * times[-1]:.2f} ms" for way, times in seconds.items()))
slower = seconds["repeat the heads"][-1] / seconds["PyTorch's own"][-1]
kv.results.measure(
    "04.repeat_cost", slower, unit="times", bound=1 + 2 * config.group_size, note="bound: bytes read and written"
)

# %% tags=["nbval-ignore-output"]
one_layer = [16 * config.n_kv_heads * config.d_head * n * model.dtype.itemsize for n in context_lengths]
figure = kv.plots.ways_to_attend(context_lengths, seconds, [b / ceilings.bytes_per_second for b in one_layer])
alt = f"At {context_lengths[-1]:,} tokens repeating the heads takes {slower:.1f} times as long as PyTorch's own way."
kv.plots.show(figure, alt=alt)

# %% [markdown]
# The bound counts bytes: the cache is read once (1), the copies are written (the size of the group) and read again (the
# same). It is no ceiling. The copies are new memory at each step, which on a CPU the system may have to hand out and
# clear first; that is not counted. And a small cache fits into the processor's own memory, so that other things count
# more than the bytes.
#
# ## What sharing costs
#
# Fewer KV heads, fewer numbers to remember a token by. Does the model get worse? The course has trained four models for
# this question, alike in everything but attention: 8 query heads with 8, 2 or 1 KV heads, and one with 8 that sees the
# latest 64 tokens only.
#
# **Recall** asks for something that a story said so many tokens ago. *Guessed*, in the table below, is what one gets
# right without looking anything up: a model that is not above it has not found the fact.
#
# **Predict.** Perplexity says how many tokens a model hesitates between (smaller is better). By how many percent is
# that of `tiny-mqa`, with one KV head, higher than that of `tiny-mha`, with eight?

# %%
my_guess = 20  # PREDICT
question = "Perplexity with 1 KV head against 8: how much higher?"
kv.results.predict("04.mqa_perplexity", my_guess, unit="%", question=question)

# %% tags=["nbval-ignore-output"]
held_out_rows = held_out(Recipe(), tokenizer_for(tiny["tiny-mha"].model), "test", 16)
rows = {"test": torch.cat([batch.tokens for batch in held_out_rows])}
quality = {}
for name, other in tiny.items():
    quality[name] = report.measure(other, rows, questions=40, distances=(32, 128, 384))
print(report.text(list(quality.values())))


# %% tags=["nbval-ignore-output"]
def dearer(name, first="tiny-mha"):
    """Perplexity over that of `first`: the ratio, and both ends of its 95% interval."""
    pairs = zip(quality[name].losses["test"], quality[first].losses["test"], strict=True)
    gaps = [mine - its for mine, its in pairs]
    margin = 1.96 * stdev(gaps) / len(gaps) ** 0.5
    return tuple(np.exp([mean(gaps), mean(gaps) - margin, mean(gaps) + margin]))


for name in ("tiny-gqa", "tiny-mqa", "tiny-window"):
    kv.results.measure(f"04.{name[5:]}_perplexity", 100 * (dearer(name)[0] - 1), unit="%", note="against tiny-mha")

# %% [markdown]
# The interval says what another choice of stories could change. What another seed of the training would change is not
# in it: each model was trained once.
#
# And the speed? A decode step reads weights and cache. With many texts the cache is most of it.
#
# **Predict.** 64 texts that fill the context. How many times as many tokens a second does `tiny-gqa` make as
# `tiny-mha`, with a quarter of its cache?

# %%
my_guess = 4  # PREDICT
question = "Decode for 64 texts, 2 KV heads against 8: how many times as fast?"
kv.results.predict("04.gqa_speed", my_guess, unit="times", question=question)


# %% tags=["nbval-ignore-output"]
def decode_seconds(other, texts=64):
    """Median seconds of one decode step of so many texts whose context is full but for one token."""
    c, model = other.config, other.model
    cache = kv.DenseCache(c, texts, dtype=model.dtype, device=model.device)
    cache.keys.fill_(0.01)
    cache.values.fill_(0.01)
    newest = torch.zeros(texts, 1, dtype=torch.int64)

    def step():
        cache.lengths = [c.max_seq_len - 1] * texts
        model(newest, cache=cache)

    return kv.median_time(step)


speeds = {name: 64 / decode_seconds(other) for name, other in tiny.items()}
read = {name: kv.bytes_moved(m.config, 1, m.config.max_seq_len - 1, 64, bits=32).total for name, m in tiny.items()}
for name, speed in speeds.items():
    print(f"{name:<12} {speed:8,.0f} tokens a second, {read[name] / 1e6:6.1f} MB read and written in a step")
faster = speeds["tiny-gqa"] / speeds["tiny-mha"]
kv.results.measure(
    "04.gqa_speed", faster, unit="times", bound=read["tiny-mha"] / read["tiny-gqa"], note="bound: by bytes"
)

# %% tags=["nbval-ignore-output"]
base = quality["tiny-mha"].perplexity("test")
points = {name: tuple(base * ratio for ratio in dearer(name)) for name in tiny}
whole = {name: kv.cache_bytes(other.config, other.config.max_seq_len) for name, other in tiny.items()}
recalls = {name: measured.recalls for name, measured in quality.items()}
said = "; ".join(f"{name} {points[name][0]:.2f}" for name in tiny)
alt = (
    f"Perplexity: {said}. Recall at {recalls['tiny-mha'][-1].distance} tokens: "
    + ", ".join(f"{name} {answers[-1].share:.0%}" for name, answers in recalls.items())
    + f". tiny-gqa decodes {faster:.1f} times as fast as tiny-mha."
)
kv.plots.show(kv.plots.sharing(whole, points, recalls, speeds), alt=alt)

# %% [markdown]
# The bound for the speed counts bytes alone. Where a step also waits for something else, such as the arithmetic of 64
# rows (notebook 03), a smaller cache gains less.
#
# Two models may keep about as many bytes and be good at different things. Sharing heads keeps *every* token, with fewer
# numbers each; a window keeps *some* tokens, with all their numbers. The second panel shows what that means for
# something said long ago.
#
# ## From many heads to few
#
# Somebody has a model with all its KV heads, trained at great expense. Must it be trained again to have fewer?
#
# The other direction costs nothing. A model with shared heads *is* a model in which several heads happen to be equal.
# We write each KV head of `tiny-gqa` down once for every query head that uses it:


# %%
def unshare(model):
    """The same model with a KV head for every query head: copies of those that it has."""
    c, state = model.config, model.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].unflatten(0, (c.n_kv_heads, c.d_head))
            state[name] = heads.repeat_interleave(c.group_size, dim=0).flatten(0, 1)
    full = kv.Transformer(replace(c, n_kv_heads=c.n_heads), model.device, model.dtype)
    full.load_state_dict(state)
    return full


shared = tiny["tiny-gqa"].model
unshared_model = unshare(shared)
few = held_out_rows[0].tokens[:2, :100]
off = float((unshared_model(few) - shared(few)).abs().max())
print(f"the same scores: {off < (1e-4 if shared.device.type == 'cpu' else 1e-2)}")
print(f"cache: {allocated(unshared_model.config, 512) / allocated(shared.config, 512):.0f} times as large")

# %% [markdown]
# So sharing heads means to *demand* that KV heads be equal that are not. The plainest way is to take the mean of those
# that will share (Ainslie and others, arXiv 2305.13245). Keys and values are made by matrices, so it is the rows of
# these that are averaged.

# %% [markdown]
# ### Exercise: pool_heads
#
# ●●○ · 6 minutes
#
# `weight` is the projection to the keys, `(n_heads * d_head, d_model)`: the first `d_head` rows make head 0, the next
# ones head 1, and so on. Average the heads of each group, and return `(n_kv_heads * d_head, d_model)`. Heads of a group
# stand next to each other.
#
# Why it matters: these two lines are the first half of how a finished model gets a smaller cache.
#
# <details><summary>Hint 1</summary><code>weight.unflatten(0, (n_kv_heads, group, d_head))</code>: which of the
# dimensions is to be averaged?</details>
# <details><summary>Hint 2</summary>The group is <code>weight.shape[0] // (n_kv_heads * d_head)</code>; average over
# dimension 1, then <code>flatten(0, 1)</code>.</details>


# %% tags=["exercise"]
def pool_heads(weight, n_kv_heads, d_head):
    """The projection with the heads of each group averaged."""
    # SOLUTION
    heads = weight.unflatten(0, (n_kv_heads, -1, d_head))
    return heads.mean(dim=1).flatten(0, 1)
    # END SOLUTION


# %%
kv.check.pool_heads(pool_heads)

# %% [markdown]
# `share_heads` of the package does this to every layer. It knows two other ways, to compare with: to keep the first
# head of each group, and to begin anew with random ones. The second half is **uptraining**: let the model go on
# learning for a while, on what it was trained on, until it has found its way with fewer heads.
#
# **Predict.** We give `tiny-mha` 2 KV heads in place of 8, by the mean. What is its perplexity right after, before it
# learns anything? (Above it stands with its 8; a model that knows nothing and chooses evenly among all tokens has
# 2,000.)

# %%
my_guess = 10  # PREDICT
question = "tiny-mha with its KV heads averaged from 8 to 2: perplexity right after?"
kv.results.predict("04.pooled_perplexity", my_guess, question=question)


# %% tags=["nbval-ignore-output"]
def perplexity_of(model):
    """Over the held-out rows of above."""
    return float(np.exp(mean(np.log(kv.perplexity(model, row)) for row in rows["test"])))


original = perplexity_of(tiny["tiny-mha"])
merged = {how: share_heads(tiny["tiny-mha"], 2, how) for how in ("mean", "first", "random")}
right_after = {how: perplexity_of(other) for how, other in merged.items()}
for how, value in right_after.items():
    print(f"{how:<7} {value:8.1f}, with 8 heads {original:.2f}")
kv.results.measure("04.pooled_perplexity", right_after["mean"], bound=original, note="bound: with its 8 heads")

# %% [markdown]
# **Predict.** Now each of the three learns for a while, as many steps each. We look at the loss (the logarithm of the
# perplexity): merging has raised it. How many percent of that rise are gone again after these steps, for the mean?

# %%
my_guess = 50  # PREDICT
kv.results.predict("04.recovered", my_guess, unit="%", question="Heads averaged: how much of the rise is undone?")

# %% tags=["nbval-ignore-output"]
steps = 80
losses = {how: fine_tune(other, steps) for how, other in merged.items()}
after = {how: perplexity_of(other) for how, other in merged.items()}
recovered = {}
for how, other in merged.items():
    rise, left = np.log(right_after[how] / original), np.log(after[how] / original)
    recovered[how] = 100 * (1 - left / rise)
    said = f"{how:<7} {right_after[how]:8.1f} -> {after[how]:6.2f}: {recovered[how]:.0f}% undone"
    print(f"{said}; recall at 128 tokens {kv.recall(other, 128, questions=40).share:.1%}")
print(f"before heads were merged: recall {recalls['tiny-mha'][1].share:.0%}")
kv.results.measure("04.recovered", recovered["mean"], unit="%", note=f"{steps} steps")

# %% tags=["nbval-ignore-output"]
both = {how: (right_after[how], after[how]) for how in merged}
best = min(after, key=after.get)
alt = (
    f"After {steps} steps the best is {best!r}, with a perplexity of {after[best]:.2f}. With 8 "
    f"heads it was {original:.2f}."
)
kv.plots.show(kv.plots.uptraining(losses, both, original), alt=alt)

# %% tags=["nbval-ignore-output"]
recipe = Recipe()
share = steps * recipe.max_seq_len / (recipe.steps * recipe.batch_tokens)
print(f"best first, right after: {', '.join(sorted(right_after, key=right_after.get))}")
print(f"best first, after {steps} steps: {', '.join(sorted(after, key=after.get))}")
print(f"these steps read about {share:.1%} as many tokens as the training before")
print(f"tiny-gqa, trained with 2 KV heads from its first step: {quality['tiny-gqa'].perplexity('test'):.2f}")

# %% [markdown]
# Right after, random heads do worse than knowing nothing: what the later layers make of them is not unsure, but sure of
# a wrong token. The two that keep something of the old heads are far off as well: queries were made for other keys.
# What they still hold shows in how fast they recover. The paper uptrains for 5% of the original training, and finds
# that the mean ends best, then the first head, then random ones (section 3.3, for T5 Large). Our few steps are far less
# than that: see how much is missing to the model that learned with 2 KV heads from its beginning.
#
# Compare loss and recall, too. What gives back most of the loss, the common words and their order, need not yet give
# back the looking up of what was said: judge a model that was changed by more than one figure.
#
# ## A latent in place of heads
#
# GQA shares whole heads. **Multi-head latent attention** (MLA; DeepSeek-V2, arXiv 2405.04434) keeps something else: one
# short vector for each token, the *latent* `c`, from which *every* head's key and value is made by a matrix of its own:
#
# $$k_h = W^{UK}_h c \qquad v_h = W^{UV}_h c$$
#
# All heads differ, and yet only `c` is kept. Must then all keys be made again at each step? No. A score is a product,
# and a product may be bracketed another way:
#
# $$q_h \cdot (W^{UK}_h c) = (W^{UK\top}_h q_h) \cdot c$$
#
# The matrix moves to the *query*, of which there is one, away from the latents, of which there are many; $W^{UV}$ moves
# behind the sum over tokens in the same way. This is the **absorbed** form: attention in which all heads look at one
# shared "key", the latent. It is MQA with a large head. (Rotation by position would stand between query and matrix, so
# a small rotated part, `r`, is kept beside `c`, one for all heads.)
#
# Two forms, one result? On random weights, in float64, with a cache, in pieces:

# %%
weights = mla.random_weights(n_heads=8, d_model=256, d_latent=64, d_rope=16, d_nope=32, d_value=32)
x = torch.randn(2, 24, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
expanded, latents = mla.LatentCache(), mla.LatentCache()
for piece in x.split([12, 5, 1, 1, 1, 1, 1, 1, 1], dim=1):
    difference = mla.naive(piece, weights, expanded) - mla.absorbed(piece, weights, latents)
    assert float(difference.abs().max()) < 1e-10
print("naive and absorbed give the same, at every step")
print(f"kept for each token: {weights.kept_latent} numbers, {tuple(latents.latents.shape)} in all")
print(f"keys and values of all heads would be {weights.kept_expanded}")

# %% [markdown]
# **Predict.** DeepSeek-V2 has 128 heads, and keeps a latent of 512 and a rotated part of 64. How many times smaller is
# its cache than that of ordinary heads, with a key of 128 and a value of 128 numbers for each? (So the paper counts.
# The keys of the naive form carry the rotated part as well, 192 numbers in all.)

# %%
my_guess = 10  # PREDICT
question = "DeepSeek-V2: how many times smaller by the latent?"
kv.results.predict("04.latent_saves", my_guess, unit="times", question=question)

# %%
deepseek = kv.PUBLISHED["DeepSeek-V2"]
designs = {"MLA, as it is": deepseek}
for n in (128, 8, 1):
    name = {128: "MHA, 128 KV heads", 8: "GQA, 8 KV heads", 1: "MQA, 1 KV head"}[n]
    designs[name] = replace(deepseek, latent=None, n_kv_heads=n)
token_bytes = {name: kv.cache_bytes(shape, 1) for name, shape in designs.items()}
for name, nbytes in token_bytes.items():
    print(f"{name:<18} {nbytes:>9,} bytes a token, {nbytes * 128_000 / 1e9:6.1f} GB for 128,000")
saves = token_bytes["MHA, 128 KV heads"] / token_bytes["MLA, as it is"]
as_groups = token_bytes["MLA, as it is"] / token_bytes["MQA, 1 KV head"]
kv.results.measure("04.latent_saves", saves, unit="times")
expanded_numbers = deepseek.n_heads * (deepseek.latent.d_nope + deepseek.latent.d_rope + deepseek.latent.d_value)
print(f"as many bytes as {as_groups:.2f} KV heads")
against_naive = 2 * deepseek.n_layers * expanded_numbers / token_bytes["MLA, as it is"]
print(f"against the keys and values of the naive form: {against_naive:.1f} times smaller")

# %% [markdown]
# And which form when? Count the multiplications for each pair of a query and an earlier token:

# %%
m = deepseek.latent
pair = {
    "naive": m.d_nope + m.d_rope + m.d_value,
    "absorbed": m.d_latent + m.d_rope + m.d_latent,
}
for form, count in pair.items():
    print(f"{form:<8} {count:>5,} multiplications for each pair and head")
print(f"absorbed: {pair['absorbed'] / pair['naive']:.1f} times the arithmetic of the scores and sums, no keys to make")

# %% [markdown]
# You know from notebook 03 what that means. Decode waits for memory and has arithmetic to spare: the absorbed form. A
# long prefill is short of arithmetic and makes each key once for many queries: the naive form. Engines use both.
#
# ## Try any model
#
# Pick a model, or paste the `config.json` of any other of these families, as it stands on its hub page. What fits, and
# what binds?


# %%
def what_binds(shape, fit, tokens):
    """In words: what stands in the way of this request, or what would end first."""
    if tokens > shape.max_seq_len:
        return f"the model's own context of {shape.max_seq_len:,} tokens binds"
    if fit.weights > fit.room:
        return "the weights alone do not fit"
    left = (fit.room - fit.weights) / 1e9
    if not fit.fits:
        return f"the cache binds: it takes {fit.cache / 1e9:,.1f} GB, and the weights leave {left:,.1f}"
    larger = "cache" if fit.cache > fit.weights else "weights"
    return f"fits, {left - fit.cache / 1e9:,.1f} GB are left; most of it is {larger}"


# %% tags=["nbval-ignore-output"]
def draw(model, config_json, tokens, texts, cache_bits, weight_bits, device):
    """One request against one device, and a sentence about it."""
    pasted = config_json.strip()
    shape = kv.Shape.from_hf(pasted) if pasted else kv.PUBLISHED[model]
    memory, bits = kv.DEVICES[device], {"bits": cache_bits, "weight_bits": weight_bits}
    fit = kv.fits(shape, memory, tokens, texts, **bits)
    lengths = np.unique(np.geomspace(256, 2**20, 60).astype(int))
    frontier = [kv.largest_batch(shape, memory, int(n), **bits) for n in lengths]
    words = what_binds(shape, fit, tokens)
    title = f"{'The pasted model' if pasted else model} on {device}: {words}"
    parts = (fit.weights, fit.cache)
    figure = kv.plots.what_fits(parts, memory, 0.9, lengths, frontier, (tokens, texts), shape.max_seq_len, title)
    return figure, f"{texts} texts of {tokens:,} tokens. {title}."


figure, alt = draw("Llama 3.1 8B", "", 8192, 8, 16, 16, "RTX 4090 24 GB")
kv.plots.show(figure, alt=alt)

# %% tags=["nbval-ignore-output"]
paste = ipywidgets.Textarea(placeholder="paste a config.json here", continuous_update=False, description="config.json")
paste.layout = ipywidgets.Layout(width="480px", height="90px")
paste.style.description_width = "140px"
kv.widgets.explore(
    draw,
    model=["Llama 3.1 8B", *(name for name in kv.PUBLISHED if name != "Llama 3.1 8B")],
    config_json=paste,
    tokens=[2**i for i in range(8, 21)],
    texts=[2**i for i in range(9)],
    cache_bits=[16, 8, 4],
    weight_bits=[16, 8, 5, 4.5, 4],
    device=["RTX 4090 24 GB", *(name for name in kv.DEVICES if "4090" not in name)],
)

# %% [markdown]
# ## Summary

# %% tags=["nbval-ignore-output"]
kv.results.summary("04")

# %% [markdown]
# Your guesses beside what was measured: within the band they were at most a factor of two off. The farther from 1, the
# more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("04")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# Five statements can be judged now; the code works the verdicts out from the numbers above.
#
# - **13.** "Cache memory = 2 × layers × heads × d_head × length × batch × 2 bytes." Holds if it gives what is allocated
#   for all models above, read as it stands; with a condition if it does so for all without a window once "heads" is
#   read as "KV heads"; else wrong as said.
# - **14.** "70B parameters, 128,000 tokens, batch 1: several tens of GB." We call 20 to 100 GB several tens. Holds if
#   all public models of about 70 billion parameters (65 to 75) are there, and would be with all their heads too; with a
#   condition if only as they are; else wrong as said.
# - **15.** "The cache, more than reasoning ability, limits usable context." Judged from what can be counted: wherever
#   the weights fit, does the cache fill the memory before the model's own context ends? Holds if always, with one text
#   and with 16; with a condition if sometimes; wrong as said if never.
# - **17.** "MQA and GQA share K/V between heads." Holds if the cache shrinks as the KV heads do and no perplexity above
#   is measurably higher (its interval reaches down to that of `tiny-mha`); with a condition if one is; wrong as said if
#   the cache does not shrink so.
# - **26.** "Llama 70B runs on a 64 GB laptop in 4 bits, where FP16 needs a cluster." With scales in groups of 32. Holds
#   if a text as long as its context fits, and 16 bits need more than two of the largest devices; wrong as said if not
#   even 8,000 tokens fit, or one device holds the 16 bits; with a condition else.

# %%
literal, with_kv = ([sizes[i] == really[name] for name, sizes in read_as.items()] for i in (0, 1))
no_window = [right for right, c in zip(with_kv, configs.values(), strict=True) if not any(c.windows)]
kv.results.verdict(
    13,
    "holds" if all(literal) else "holds with a condition" if all(no_window) else "wrong as said",
    f"As it stands it is right to the byte for {sum(literal)} of {len(literal)} models, with KV heads for heads "
    f"for {sum(with_kv)}; where a window keeps fewer tokens, length means those that are kept.",
)

# %%
seventy = {name: shape for name, shape in kv.PUBLISHED.items() if 65e9 <= kv.parameters(shape) <= 75e9}
kept = [kv.cache_bytes(shape, 128_000) / 1e9 for shape in seventy.values()]
full = [kv.cache_bytes(replace(shape, n_kv_heads=shape.n_heads), 128_000) / 1e9 for shape in seventy.values()]
tens = [all(20 <= gigabytes <= 100 for gigabytes in values) for values in (kept, full)]
kv.results.verdict(
    14,
    "holds" if all(tens) else "holds with a condition" if tens[0] else "wrong as said",
    f"{', '.join(f'{name} {gigabytes:.1f} GB' for name, gigabytes in zip(seventy, kept, strict=True))}. They share KV "
    f"heads; if every query head kept its own, it would be {min(full):.1f} GB or more.",
)

# %%
cases = {texts: [what for what in everywhere if what != "weights"] for texts, everywhere in bound_by.items()}
by_cache = {texts: found.count("cache") / len(found) for texts, found in cases.items()}
kv.results.verdict(
    15,
    "wrong as said"
    if not any(by_cache.values())
    else "holds"
    if all(share == 1 for share in by_cache.values())
    else "holds with a condition",
    f"Where the weights fit, in 16 bits, the cache ends first in {by_cache[1]:.0%} of the cases with one text, in "
    f"{by_cache[16]:.0%} with 16; else the model's own context does. How well a model uses a long text is not in this.",
)

# %% tags=["nbval-ignore-output"]
shrinks = all(
    allocated(tiny[name].config, 512) * tiny[name].config.n_heads
    == allocated(tiny["tiny-mha"].config, 512) * tiny[name].config.n_kv_heads
    for name in ("tiny-gqa", "tiny-mqa")
)
costs = {name: dearer(name) for name in ("tiny-gqa", "tiny-mqa")}
worse = [name for name, (_, low, _) in costs.items() if low > 1]
said = " and ".join(f"{100 * (middle - 1):+.1f}% for {name}" for name, (middle, _, _) in costs.items())
kv.results.verdict(
    17,
    "wrong as said" if not shrinks else "holds with a condition" if worse else "holds",
    f"The cache shrinks as the KV heads do; perplexity changes by {said}, measurably for "
    f"{', '.join(worse) or 'neither'}. {len(sharing)} of {len(kv.PUBLISHED)} public models listed here share.",
)

# %%
reach = reaches["4 bits, groups of 32, scale"]
largest_device = max(kv.DEVICES, key=kv.DEVICES.get)
count = in_16_bits[largest_device]
fully = reach >= llama.max_seq_len and count > 2
kv.results.verdict(
    26,
    "wrong as said" if reach < held or count == 1 else "holds" if fully else "holds with a condition",
    f"With scales it is {kv.weight_bytes(llama, four_bits) / 1e9:.1f} GB of weights, and one text of up to {reach:,} "
    f"tokens fits beside them. In 16 bits weights and {held:,} tokens take {count} x {largest_device}. How fast it "
    "runs depends on the bandwidth: every token reads all weights.",
)

# %% [markdown]
# **What to remember**
#
# 1. Cache = 2 × layers × **KV heads** × d_head × tokens kept × texts × bytes of a number. It can be checked to the
#    byte.
# 2. Weights are paid once, cache for each token of each text. Length and batch draw on the same room.
# 3. With one text the weights or the model's own context bind most often; the larger the batch, the more often it is
#    the cache.
# 4. Shared heads make the cache smaller by the size of the group, if the code does not repeat them. Trained in from the
#    beginning they cost these models a few percent of perplexity, and no recall that we could see. A finished model can
#    be given fewer heads, but needs far more training than our few steps to get back what that breaks.
# 5. A latent keeps one vector for all heads, and the matrices that would expand it can stay with query and output.
#
# ## What the field does today
#
# - Multi-query attention is by Shazeer (arXiv 1911.02150), grouped-query attention and uptraining by Ainslie and others
#   (arXiv 2305.13245). Llama 2 shares heads in its 34B and 70B models (arXiv 2307.09288), Llama 3 in all
#   (arXiv 2407.21783).
# - MLA came with DeepSeek-V2 (arXiv 2405.04434), which reports a cache smaller by 93.3% than that of the model before
#   it, and stayed in V3 (arXiv 2412.19437). vLLM and SGLang run the absorbed form in decode.
# - TransMLA (arXiv 2502.07864) turns trained GQA models into MLA ones. Cross-layer attention (arXiv 2405.12981) shares
#   keys and values between neighboring layers as well.
# - Windows in half of the layers is the way of Gemma 2 (arXiv 2408.00118) and gpt-oss, in five of six that of Gemma 3
#   (arXiv 2503.19786): notebook 05.
#
# **Next:** notebook 05 keeps the latest tokens only, and looks at what is forgotten.

# %% tags=["nbval-ignore-output"]
kv.check.progress("04")
