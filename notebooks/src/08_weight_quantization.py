# %% [markdown]
# # 8. Fewer bits for each weight
#
# **Time:** about 110 minutes · **Device:** any (CPU is enough)
#
# **You will be able to**
#
# - round a group of weights by hand onto three kinds of grid, pack the codes, and read a block of a real file;
# - say what a model takes at so many bits a weight, scales included, and on which machine it fits;
# - measure what rounding costs: as an error, in perplexity, in recall, matrix by matrix;
# - derive GPTQ and AWQ, and say where they gain nothing;
# - tell what fewer bits save in memory from what they save in time, and why the second needs a kernel.
#
# {{colab_badge}}

# %% tags=["setup"]
# SETUP

# %% tags=["nbval-ignore-output"]
import copy
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from kvcourse import quant
from kvcourse.cost import parameters
from kvcourse.metrics import Stopwatch
from kvcourse.quant import gguf_blocks
from kvcourse.quant.grid import Grid, decode, encode, fit, nf4_levels
from kvcourse.quant.packing import pack
from kvcourse.quant.statistics import InputStatistics, output_error
from kvcourse.training.recipe import Recipe, held_out
from kvcourse.uptraining import tokenizer_for

checkpoint = "smollm2-135m"  # or your own, with a context of 512 tokens or more
lm = kv.load_model(checkpoint, dtype=torch.float32)  # float32: the numbers of the file, as exactly as they stand there
tiny = kv.load_model("tiny-gqa", dtype=torch.float32)
print(f"{lm.name} and {tiny.name} on {lm.model.device} in float32")

# %% [markdown]
# ## What a number takes
#
# A decode step reads all weights of the model, once, and does little with them: notebook 03. So the bytes of the
# weights decide how large a model a machine can hold, and how fast it can be at best. The plainest way to have fewer
# bytes is to keep each weight in fewer bits. How many bytes does a number take? We ask the memory.

# %%
bytes_each = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
    bytes_each[dtype] = torch.zeros(1000, dtype=dtype).untyped_storage().nbytes() / 1000
bytes_each["4 bits, packed"] = pack(torch.zeros(1000, dtype=torch.uint8), bits=4).untyped_storage().nbytes() / 1000
for kind, size in bytes_each.items():
    print(f"{str(kind).removeprefix('torch.'):<15} {size} bytes a number")

# %% [markdown]
# With 32 or 16 bits a number has a sign, an exponent and digits; it can be huge or tiny. With 8 or 4 bits there is no
# room for that. **b bits have 2^b values, and that is all.** So the few values are put where the weights are: on a
# **grid**. A weight is then kept as a *code*, the number of its place on the grid.
#
# ## 0.237 on a grid of 16
#
# Here are eight weights that stand next to each other, 0.237 the first of them. Each shall be kept in 4 bits, so there
# are 16 values, for all eight the same. The simplest grid is **symmetric**: the values are whole multiples of one
# number, the **scale**, and they reach as far as the largest magnitude, 0.7. Codes that are symmetric around zero go
# from -7 to 7. (One of the 16 values, -8, lies outside and is not used.) So the scale is 0.7 / 7 = 0.1, and by hand:
#
# $$0.237 / 0.1 = 2.37 \to 2 \to 2 \times 0.1 = 0.2$$
#
# ### Exercise: round_to_grid
#
# ●○○ · 5 minutes
#
# Write what becomes of a `group` (a tensor) on a symmetric grid of `bits` bits: the numbers themselves, not the codes.
#
# Why it matters: this is **round to nearest**, RTN for short, the method that all others are compared with.
#
# <details><summary>Hint 1</summary>With 4 bits the largest magnitude is 7 steps from zero, with 3 bits 3 steps, with
# <code>bits</code> bits 2^(bits - 1) - 1.</details>
# <details><summary>Hint 2</summary>Magnitudes: <code>group.abs()</code>. Divide by the scale, round, multiply by the
# scale.</details>


# %% tags=["exercise"]
def round_to_grid(group, bits):
    """The numbers of a group on its symmetric grid."""
    # SOLUTION
    scale = group.abs().max() / (2 ** (bits - 1) - 1)
    return (group / scale).round() * scale
    # END SOLUTION


# %%
kv.check.round_to_grid(round_to_grid)

# %% [markdown]
# There are other ways to lay 16 values over the same weights. All keep a scale for the group, and something that says
# where the grid lies:
#
# | kind | a code stands for | besides the scale, a group keeps |
# |---|---|---|
# | symmetric | (code − 8) × scale | nothing |
# | zero point | (code − zero) × scale | which code means 0 |
# | minimum | code × scale + minimum | its lowest value |
#
# With a minimum, by hand: the grid reaches from the lowest to the highest of the eight, in 15 steps.

# %%
group = torch.tensor([0.237, -0.412, 0.105, 0.7, -0.66, 0.031, -0.288, 0.519])
lowest, distance = float(group.min()), float(group.max() - group.min()) / 15
place = round((0.237 - lowest) / distance)
print(f"lowest {lowest:.2f}, scale {distance:.4f}")
print(f"0.237 is {(0.237 - lowest) / distance:.2f} steps above: code {place}, {lowest + place * distance:.4f}")

# %% [markdown]
# The package has all three, in `quant/grid.py`. `fit` chooses scale and zero, `encode` gives codes, `decode` numbers.


# %%
def on_grid(numbers, kind, bits=4):
    """What the numbers become, and all values of their grid."""
    grid = Grid(bits, kind=kind)
    scale, zero = fit(numbers[None], grid)
    rounded = decode(encode(numbers[None], scale, zero, grid), scale, zero, grid)[0]
    return rounded, decode(torch.arange(2**bits, dtype=torch.uint8)[None], scale, zero, grid)[0]


grids, nearest_always = {}, True
for kind in ("symmetric", "zero_point", "minimum"):
    rounded, values = on_grid(group, kind)
    grids[kind.replace("_", " ")] = group, rounded, values
    nearest = values[(values - group[:, None]).abs().argmin(1)]
    nearest_always = nearest_always and torch.equal(rounded, nearest)
    print(f"{kind:<10} 0.237 becomes {rounded[0]:.4f}; all eight become the nearest value: {nearest_always}")

# %%
becomes = {kind: float(rounded[0]) for kind, (_, rounded, _) in grids.items()}
kv.plots.show(
    kv.plots.rounding_grids(grids, marked=0),
    alt="The same eight weights on three grids of 16 values; 0.237 becomes "
    + ", ".join(f"{value:.4f} ({kind})" for kind, value in becomes.items())
    + ".",
)

# %% [markdown]
# Zero point and minimum have the same scale, 0.0907. Why do they differ? The code that means 0 must be a whole one:
# 0.66 / 0.0907 = 7.28 becomes 7. So that grid is shifted, by up to half a step. Here it begins at -0.635, and -0.66 is
# cut off to that.
#
# Why is it not exactly 0.2 on the first grid? The scale is a number too, and it is stored in 16 bits, which 0.1 does
# not fit exactly. (The package rounds it up, so that the largest number stays on the grid.) What matters is the order.
# A scale is rounded *first*, and then codes are chosen for the scale that will be read back. The other order gives
# weights that differ from those that were tested, without an error message (for one kind of 8-bit weights Transformers
# had that order until its pull request 46763).
#
# The grid depends on the company. If *one* of the eight is ten times as large as the others, all have to live on a grid
# that reaches so far:

# %%
crowded = group.clone()
crowded[3] = 7.0
becomes["symmetric, beside a 7.0"] = float(on_grid(crowded, "symmetric")[0][0])
print(f"beside 7.0 in place of 0.7, 0.237 becomes {becomes['symmetric, beside a 7.0']:.4f}")

# %% [markdown]
# Try it: bits, kind, and how large the largest is.


# %% tags=["nbval-ignore-output"]
def draw(bits, kind, largest):
    """The group on one grid, with its fourth number replaced, and a sentence about it."""
    numbers = group.clone()
    numbers[3] = largest
    rounded, values = on_grid(numbers, kind, bits)
    error = float((rounded - numbers).square().mean().sqrt())
    alt = f"On {len(values)} values 0.237 becomes {rounded[0]:.4f}; the error is {error:.3f} (root mean square)."
    return kv.plots.rounding_grids({f"{kind}, {bits} bits": (numbers, rounded, values)}, marked=0), alt


figure, alt = draw(4, "symmetric", 2.0)
kv.plots.show(figure, alt=alt)

# %% tags=["nbval-ignore-output"]
kv.widgets.explore(draw, bits=[4, 3, 2], kind=["symmetric", "zero_point", "minimum"], largest=(0.7, 7.0, 0.1, 2.0))

# %% [markdown]
# ### Exercise: zero_point
#
# ●●○ · 7 minutes
#
# A grid with a zero point is as wide as from the lowest to the highest number of the group. Write its `(scale, zero)`:
# with `bits` bits there are 2^bits values, `scale` apart, and `zero` is the code of the value 0, a whole number from 0
# to 2^bits − 1. So the grid must hold 0, also where all numbers have one sign: stretch it to 0 there.
#
# Why it matters: with a grid from 1 to 2.1 no code means 0, and a zero of −14 cannot be kept in 4 bits. Cut off to 0,
# it turns 2.1 into 1.1, without an error message (reported for AWQ's own code: llm-awq issue 193).
#
# <details><summary>Hint 1</summary><code>low = min(0.0, float(group.min()))</code>, and the other end likewise.
# </details>
# <details><summary>Hint 2</summary>16 values have 15 steps between them. How many steps is 0 above the lowest
# value?</details>


# %% tags=["exercise"]
def zero_point(group, bits):
    """(scale, zero) of the group's grid."""
    # SOLUTION
    low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
    scale = (high - low) / (2**bits - 1)
    return scale, round(-low / scale)
    # END SOLUTION


# %%
kv.check.zero_point(zero_point)

# %% [markdown]
# A grid with a minimum needs no 0. It lies as tightly as it can, and pays with a second number of 16 bits. Which kind
# is best? Weights are spread evenly around zero, as a rule, and the kinds are close to each other. We will measure all
# of them, on the weights of a model (under "Another grid").
#
# ## Two codes in a byte
#
# A byte is the smallest thing that memory gives out. A code of 4 bits that lies in a byte of its own has saved nothing
# beside one of 8 bits. So codes are **packed**: two of 4 bits into a byte, four of 2 bits, eight of 3 bits into three
# bytes.
#
# ### Exercise: pack_nibbles
#
# ●○○ · 5 minutes
#
# `codes` is a list with an even number of codes from 0 to 15. Write them as `bytes`, two codes in each: the first of a
# pair in the low half of its byte, the second in the high half.
#
# Why it matters: everybody who reads the file must know which half comes first. There are at least three orders in use,
# and a wrong one gives numbers that look like weights.
#
# <details><summary>Hint 1</summary><code>high << 4</code> moves a code into the high half; that is times 16.</details>
# <details><summary>Hint 2</summary><code>codes[::2]</code> and <code>codes[1::2]</code> are the first and the second
# ones of the pairs; <code>bytes(...)</code> takes numbers from 0 to 255.</details>


# %% tags=["exercise"]
def pack_nibbles(codes):
    """The codes as bytes, two in each."""
    # SOLUTION
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    # END SOLUTION


# %%
kv.check.pack_nibbles(pack_nibbles)

# %% [markdown]
# `quant.rtn` does all of it for a weight of a model: cuts its rows into groups, fits a grid to each, packs the codes.
# We take one of `tiny-gqa`, whose weights were trained as they are, in no grid.

# %%
weight = tiny.model.layers[0].mlp.down_proj.weight
packed = quant.rtn(weight, bits=4, group_size=64)
print(f"{tuple(weight.shape)} weights, {weight.nbytes:,} bytes in float32")
for part, tensor in packed.tensors.items():
    print(f"  {part:<6} {tuple(tensor.shape)!s:<12} {tensor.dtype}, {tensor.nbytes:,} bytes")
print(f"together {packed.nbytes:,} bytes, {packed.bits_per_weight:.3f} bits a weight")

# %% [markdown]
# So 4 bits are not 4 bits. Each group pays for its scale, and here also for its zero: eight in a row, two in a byte.
#
# ### Exercise: quantized_bytes
#
# ●○○ · 5 minutes
#
# Write how many bytes a weight of `rows` × `columns` takes when `group_size` numbers of a row share a grid: each number
# has a code of `bits` bits, each group a scale of 16 bits and a zero of `bits` bits.
#
# Why it matters: whether a model fits is decided by this, not by "4 bits".
#
# <details><summary>Hint 1</summary>How many groups are there? A group has <code>16 + bits</code> bits beside its
# codes.</details>
# <details><summary>Hint 2</summary>Add up bits, and divide by 8 at the end.</details>


# %% tags=["exercise"]
def quantized_bytes(rows, columns, bits, group_size):
    """Bytes of codes, scales and zeros."""
    # SOLUTION
    groups = rows * columns // group_size
    return (rows * columns * bits + groups * (16 + bits)) // 8
    # END SOLUTION


# %%
kv.check.quantized_bytes(quantized_bytes)

# %% [markdown]
# Now the table that stands everywhere: a model of 70 billion weights takes 280, 140, 70, 35 or 17.5 GB at 32, 16, 8, 4
# or 2 bits. The first column has that. The second has what a grid in use really takes, from the same function that
# allocates the memory; the third keeps embedding, head and norms in 16 bits, as is usual, for the weights of Llama 3.1
# 70B.

# %%
shape = kv.PUBLISHED["Llama 3.1 70B"]
total, apart = parameters(shape), 2 * shape.vocab_size * shape.d_model  # all weights; embedding and head
uses = [  # bits, numbers that share a grid, further options of the grid, in words
    (32, None, None, "float32"),
    (16, None, None, "bfloat16"),
    (8, None, {"symmetric": True}, "a row, symmetric"),
    (4, 64, {"symmetric": True}, "64, symmetric"),
    (4, 32, {"kind": "minimum"}, "32, minimum"),
    (2, 64, {}, "64, zero point"),
]
real = [32, 16]  # bits a weight
for bits, size, options, _ in uses[2:]:
    real.append(8 * quant.QuantizedTensor.bytes_for((8192, 8192), bits, size, **options) / 8192**2)

# %%
print("bits  codes alone  real bits    really  Llama 3.1 70B  numbers that share a grid")
for (bits, _, _, words), each in zip(uses, real, strict=True):
    whole = ((total - apart) * each + apart * max(16, bits)) / 8e9
    print(f"{bits:>4}  {70 * bits / 8:8.1f} GB  {each:9.3f}  {70 * each / 8:5.1f} GB  {whole:10.1f} GB  {words}")

# %% [markdown]
# With 4 bits the difference is largest where quality is best: small groups have more scales. "A 70B model in 35 GB" is
# the codes alone. It really takes some 37 to 44 GB, or more with an embedding in 16 bits.
#
# ## One grid for how many?
#
# A large number spoils the grid of all that share it. So let fewer share one: a whole matrix (*per tensor*), a row
# (*per channel*: all weights of one output), or a *group* within a row. We round all 28 matrices of `tiny-gqa`, and
# plot the error (the root mean square of what weights change by, as a share of their own) against the bits that it
# really takes.

# %%
LINEARS = {name: module for name, module in tiny.model.named_modules() if isinstance(module, torch.nn.Linear)}
weights = {name: module.weight for name, module in LINEARS.items() if name != "lm_head"}


def error_and_bits(bits, group_size, **options):
    """Relative error of all weights, and the bits each really takes."""
    rounded = {name: quant.rtn(weight, bits, group_size, **options) for name, weight in weights.items()}
    wrong = sum((weights[name] - rounded[name].dequantize()).square().sum() for name in weights)
    count = sum(weight.numel() for weight in weights.values())
    error = (wrong / sum(weight.square().sum() for weight in weights.values())).sqrt()
    return float(error), 8 * sum(each.nbytes for each in rounded.values()) / count


sizes = ["tensor", None, 64, 32, 16, 8]
errors = {bits: [error_and_bits(bits, size) for size in sizes] for bits in (4, 3, 2)}
for bits, measured in errors.items():
    print(f"{bits} bits: " + ", ".join(f"{error:.4f}" for error, _ in measured))

# %%
lines = {f"{bits} bits": [list(part) for part in zip(*pairs, strict=True)][::-1] for bits, pairs in errors.items()}
kv.plots.show(
    kv.plots.error_by_size(lines, ["whole tensor", "row", "64", "32", "16", "8"]),
    alt=f"The error falls with smaller groups and with more bits; at 4 bits from {errors[4][0][0]:.3f} with one grid a "
    f"matrix to {errors[4][-1][0]:.3f} in groups of 8, which takes {errors[4][-1][1]:.2f} bits.",
)

# %% [markdown]
# A bit more halves the distance of neighbors, and with it the error. Smaller groups lower it too, and cost more and
# more bits: in groups of 8 one could as well take one bit more. Groups of 32 to 128 are the usual bargain.
#
# Another way: let the grid end *before* the largest number. That one is **clipped** to the end of the grid, and all
# others sit on a finer one. The package tries, group by group, whether it pays (`clip=True`).

# %%
for bits in (4, 3, 2):
    (plain, _), (clipped, _) = (error_and_bits(bits, 64, clip=clip) for clip in (False, True))
    print(f"{bits} bits in groups of 64: error {plain:.4f}, with clipping {clipped:.4f}")

# %% [markdown]
# ## What it does to a model
#
# An error of the weights says little. What counts is what the model still can. `quant.quantize_model` rounds all
# matrices of the layers and gives back a new model that keeps its codes packed (embedding and head stay as they are,
# unless one asks). As a measure we take perplexity on stories that `tiny-gqa` was not trained on, and recall: questions
# about what a story said 128 tokens before.

# %% tags=["nbval-ignore-output"]
tokenizer = tokenizer_for(tiny.model)


def stories(split, rows):
    """Ids of `rows` rows of held-out stories, 512 tokens each, one after the other."""
    return torch.cat([batch.tokens[:, :512] for batch in held_out(Recipe(), tokenizer, split, rows)])[:rows].flatten()


test_ids, own_ids = stories("test", 8), stories("validation", 8)


def quality(model):
    """Perplexity, and recall over 128 tokens."""
    return kv.perplexity(model, test_ids, stride=512), kv.recall(model, 128, questions=40)


exact = quality(tiny)
print(f"float32: perplexity {exact[0]:.3f}; {exact[1]}")

# %% [markdown]
# **Predict.** `tiny-gqa` is rounded to nearest, with 4 bits in groups of 64. By how many percent does its perplexity
# rise?

# %%
my_guess = 10  # PREDICT
asked = "tiny-gqa, 4 bits in groups of 64, round to nearest: perplexity rises by?"
kv.results.predict("08.tiny_4_bits", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
BITS = (8, 4, 3, 2)


def times_or_percent(ratio):
    """What has changed, in percent, or times where that is more readable."""
    return f"{ratio:,.0f} times" if ratio > 10 else f"{ratio - 1:+.1%}"


found = {"RTN": []}
for bits in tqdm(BITS, leave=False):
    found["RTN"].append(quality(quant.quantize_model(tiny, "rtn", bits, 64, progress=False)))
for bits, (perplexity, recall) in zip(BITS, found["RTN"], strict=True):
    change = times_or_percent(perplexity / exact[0])
    print(f"{bits} bits: perplexity {perplexity:9.3f} ({change}), recall {recall.share:4.0%}")
rise = 100 * (found["RTN"][1][0] / exact[0] - 1)
kv.results.measure("08.tiny_4_bits", rise, unit="%")

# %% [markdown]
# ## A file that is rounded already
#
# Now SmolLM2. First a look at the file it came in. It is a **GGUF** file, the format of llama.cpp: everything in one
# file, most weights in *blocks* of 32 numbers that follow each other in a row. A type says what stands in a block.

# %% tags=["nbval-ignore-output"]
from kvcourse.weights.fetch import model_file
from kvcourse.weights.gguf_file import GGUFModel

file = model_file(lm.name) if lm.name == "smollm2-135m" else Path(checkpoint)
source = GGUFModel(file) if file.suffix == ".gguf" else None
tensors = source.tensors if source else {}
types = Counter(tensor.tensor_type.name for tensor in tensors.values())
for kind, count in types.items():
    of_kind = {name: tensor for name, tensor in tensors.items() if tensor.tensor_type.name == kind}
    each = 8 * sum(int(t.n_bytes) for t in of_kind.values()) / sum(int(t.n_elements) for t in of_kind.values())
    print(f"{kind:<5} {count:>4} tensors, {each:4.1f} bits a weight, such as {', '.join([*of_kind][:2])}")
print("" if source else f"{lm.name} came in no GGUF file; the cells below make a block of their own")

# %% [markdown]
# `Q4_1` is a grid with a minimum, 4 bits in groups of 32. We read a block by hand, the first of a matrix: 20 bytes. Two
# bytes are the scale, two the minimum, both float16, and 16 bytes hold the 32 codes. Byte i has code i in its low half
# and code i + 16 in its high half, *not* two neighbors: so a processor takes sixteen codes apart with one mask and one
# shift.

# %% tags=["nbval-ignore-output"]
up = lm.model.layers[0].mlp.up_proj.weight
if source:
    block = source.tensors["layers.0.mlp.up_proj.weight"].data[0, :20].tobytes()
else:
    block = gguf_blocks.to_blocks(quant.rtn(up, 4, 32, kind="minimum"))[0, :20].tobytes()
scale, minimum = np.frombuffer(block[:4], "<f2").astype(np.float32)
halves = np.frombuffer(block[4:], np.uint8)
codes = np.concatenate([halves & 15, halves >> 4])
print(f"{block.hex(' ')}\nscale {scale}, minimum {minimum}\ncodes {codes.tolist()}")
by_hand = torch.from_numpy(codes * scale + minimum)
if source:
    print(f"these are the first 32 weights of the matrix: {torch.equal(by_hand, up[0, :32].cpu())}")
else:
    print(f"{lm.name}'s first 32 weights, at most {(by_hand - up[0, :32].cpu()).abs().max():.4f} off")

# %% [markdown]
# ### Exercise: read_q4_0
#
# ●●○ · 6 minutes
#
# `Q4_0` is the symmetric one: a block has 18 bytes, the scale (float16) and 16 bytes of codes in the same order as
# above. A number is (code − 8) × scale. Write the 32 numbers of a `block` as a NumPy array.
#
# Why it matters: a format is what its bytes mean, and nothing in them says whether you got it right. Readers have taken
# the halves of a byte for neighbors, and 8 to 15 for negative numbers.
#
# <details><summary>Hint 1</summary><code>np.frombuffer(block[:2], "&lt;f2")</code> reads the scale, and
# <code>np.uint8</code> the rest.</details>
# <details><summary>Hint 2</summary>uint8 has no negative numbers: 3 − 8 would be 251. And a product of int8 and float16
# is rounded to float16. Make float32 of the codes and of the scale first.</details>


# %% tags=["exercise"]
def read_q4_0(block):
    """The 32 numbers of a Q4_0 block."""
    # SOLUTION
    packed = np.frombuffer(block[2:], np.uint8)
    signed = np.concatenate([packed & 15, packed >> 4]).astype(np.float32) - 8
    return signed * np.frombuffer(block[:2], "<f2").astype(np.float32)
    # END SOLUTION


# %%
kv.check.read_q4_0(read_q4_0)

# %% [markdown]
# Now a trap. We round SmolLM2's weights, as they come from its file, to 4 bits, on several grids. Look at the first
# line.

# %% tags=["nbval-ignore-output"]
same_grid = "groups of 32, minimum"
layer_weights = [p for name, p in lm.model.layers[0].named_parameters() if p.ndim == 2]
file_error = {}
for name, size, options in (
    (same_grid, 32, {"kind": "minimum"}),
    ("groups of 64, minimum", 64, {"kind": "minimum"}),
    ("groups of 32, zero point", 32, {}),
    ("groups of 64, zero point", 64, {}),
):
    off = [quant.rtn(w, 4, size, **options).dequantize() - w for w in layer_weights]
    wrong, whole = (sum(float(t.square().sum()) for t in ts) for ts in (off, layer_weights))
    file_error[name] = (wrong / whole) ** 0.5
    print(f"4 bits, {name:<26} error {file_error[name]:.4f}")
if source:
    assert file_error[same_grid] == 0

# %% [markdown]
# **An error of exactly zero (in the chat model's file) is no success of 4 bits.** These weights have been rounded
# before, when the file was made. What we have are values of that grid; its lowest and its highest value occur in every
# group, so the same grid is found again, and every weight already lies on it. Had we asked for perplexity, it would be
# "unchanged at 4 bits". The loss is there all the same. It happened before we came, and cannot be measured any more,
# since the weights before are not in the file. Whoever tests a quantizer on a file that went through one before will
# find wonders.
#
# So for SmolLM2 we take *the file's weights* as what is to be kept, and another grid: a zero point, in groups of 64.
# That is an honest question, though another one: how much is lost on top. `tiny-gqa` was trained in float32 and never
# rounded to less than float16; it gives the clean answer.

# %% tags=["nbval-ignore-output"]
whole_text = lm.encode(kv.evaluation_text()) if lm.tokenizer.chat_template else test_ids.tolist()
text_ids, context = whole_text[:769], min(384, lm.config.max_seq_len)
reading = kv.perplexity(lm, text_ids, context, stride=context)
kind_of_text = "this course's prose" if lm.tokenizer.chat_template else "held-out stories"
print(f"{lm.name} as it came: perplexity {reading:.2f} on {len(text_ids) - 1:,} tokens of {kind_of_text}")

# %% [markdown]
# **Predict.** And SmolLM2, at 4 bits in groups of 64, rounded to nearest: by how many percent does perplexity rise?

# %%
my_guess = 10  # PREDICT
asked = "SmolLM2, 4 bits in groups of 64, round to nearest: perplexity rises by?"
kv.results.predict("08.chat_4_bits", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
chat = []
for bits in tqdm(BITS, leave=False):
    rounded_model = quant.quantize_model(lm, "rtn", bits, 64, progress=False)
    chat.append(kv.perplexity(rounded_model, text_ids, context, stride=context))
    print(f"{bits} bits: perplexity {chat[-1]:12,.2f} ({times_or_percent(chat[-1] / reading)})")
on_top = "on top of what the file lost" if source else ""
kv.results.measure("08.chat_4_bits", 100 * (chat[1] / reading - 1), unit="%", note=on_top)
if lm.name != tiny.name:
    times_larger = parameters(lm.config) / parameters(tiny.config)
    minds = "more" if chat[1] / reading > found["RTN"][1][0] / exact[0] else "less"
    print(f"{lm.name} has {times_larger:.0f} times the weights of {tiny.name}, and minds 4 bits {minds}")

# %% [markdown]
# The same 4 bits, and another loss. Where this course was made the larger model minds more. Size is not all: SmolLM2
# has read far more text for each of its weights, and models trained on more text lose more when they are rounded
# afterwards (arXiv 2411.04330). Its weights were also rounded before, and its text is another. Among models of one
# family the larger ones mind less, as a rule (GPTQ paper, arXiv 2210.17323, section 4). These reasons are cited, not
# measured here. (And a perplexity beyond the number of tokens in the vocabulary is worse than choosing among all of
# them by lot.)
#
# ---
#
# *Half of the notebook is behind you: a good place for a break. What comes now is rounding better than to nearest.*
#
# ## GPTQ: let the others make up for it
#
# Rounding to nearest makes the error of each *weight* as small as possible. Nobody asked for that. What shall stay is
# the **output** of the layer, W x, for the inputs x that really come. The rows of W do not know of each other, so take
# one row w, rounded to q. Over many inputs its squared error is
#
# $$\text{mean of } \big((w - q) \cdot x\big)^2 = \tfrac12 (w - q)\, H\, (w - q)^T, \qquad H = 2 \cdot
# \text{mean of } x x^T.$$
#
# H is the **Hessian** of the error. It is the same for all rows, and it takes nothing but inputs: some text, run
# through the model, the *calibration*. (All errors of outputs below are the root of this mean.) If inputs go up and
# down together (H has large numbers off its diagonal), errors of two weights can cancel. Two weights, two inputs with
# a correlation of 0.9, a grid of 0.1:

# %%
pair, step = torch.tensor([0.237, 0.546]), 0.1
pair_hessian = 2 * torch.tensor([[1.0, 0.9], [0.9, 1.0]])


def output_off(rounded):
    """Error of the output of this pair, root mean square."""
    off = pair - rounded
    return float(off @ pair_hessian @ off / 2) ** 0.5


nearest = (pair / step).round() * step
first = nearest[0]
moved = pair[1] + pair_hessian[0, 1] / pair_hessian[1, 1] * (pair[0] - first)  # where the error is least again
second = (moved / step).round() * step
together = torch.stack([first, second])
print(f"to nearest: {nearest[0]:.1f}, {nearest[1]:.1f}, error of the output {output_off(nearest):.3f}")
print(f"the first rounded, the second moved to {moved:.3f}: {first:.1f}, {second:.1f}, {output_off(together):.3f}")

# %%
kv.plots.show(
    kv.plots.equal_error(pair, pair_hessian, step, {"RTN": nearest, "GPTQ": together}),
    alt="Curves of equal output error are long ellipses: the grid point nearest to the two weights lies across the "
    f"valley, the other one along it; its error is {output_off(together) / output_off(nearest):.0%} of the first's.",
)

# %% [markdown]
# The nearest point lies across the valley. The other is further away, along the valley, and better. That is all of
# GPTQ: *round one weight, then move those not yet rounded to where the error of the output is least again.*
#
# For a whole row: say column 0 has been rounded, from w₀ to q₀. Which change δ of the columns after it makes the error
# least? Setting its derivative to zero, with $H^{-1}$ the inverse of the Hessian of all columns that were not rounded
# before, gives
#
# $$\delta_k = -\,\frac{w_0 - q_0}{H^{-1}_{00}}\; H^{-1}_{0k}.$$
#
# Then column 1 is rounded, with the inverse of what is left, and so on.
#
# ### Exercise: gptq_update
#
# ●●○ · 8 minutes
#
# `weight` `(rows, n)` has the columns that are not rounded yet, `inverse` `(n, n)` is the inverse of their Hessian, and
# `rounded` `(rows,)` is what the first of them became. Write the weight after this step: the first column holds
# `rounded`, the others have moved.
#
# Why it matters: this line is the method. The rest is making it fast.
#
# <details><summary>Hint 1</summary>Each row has an error of its own: <code>weight[:, 0] - rounded</code>, divided by
# one number.</details>
# <details><summary>Hint 2</summary>Take that error times row 0 of the inverse off each row of the weight
# (<code>torch.outer</code>). What does it do to column 0?</details>


# %% tags=["exercise"]
def gptq_update(weight, rounded, inverse):
    """The weight after its first column was rounded."""
    # SOLUTION
    error = (weight[:, 0] - rounded) / inverse[0, 0]
    return weight - torch.outer(error, inverse[0])
    # END SOLUTION


# %%
kv.check.gptq_update(gptq_update)

# %% [markdown]
# Now a real layer. `InputStatistics` collects the Hessian of the inputs while the model reads held-out stories; not
# those that are used for testing.


# %%
def statistics_of(one, names, ids):
    """What goes into these linear layers of a model while it reads: {name: InputStatistics}."""
    modules = {name: one.model.get_submodule(name) for name in names}
    found = {name: InputStatistics(modules[name].in_features, one.model.device) for name in names}
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: found[name].add(inputs[0]))
        for name, module in modules.items()
    ]
    one.model(torch.as_tensor(ids).reshape(-1, min(512, len(ids))))
    for hook in hooks:
        hook.remove()
    return found


def output_rms(weight, rounded, inputs):
    """Error of the output on inputs with these statistics, root mean square."""
    return output_error(weight, rounded, inputs.hessian) ** 0.5


layer_names = [name for name in weights if name.startswith("layers.1.")]
calibrated = statistics_of(tiny, layer_names, own_ids)
tested = statistics_of(tiny, layer_names, test_ids)
shown = "layers.1.mlp.up_proj"
shown_weight, hessian = weights[shown].double(), calibrated[shown].hessian.double()

# %% [markdown]
# The whole method, as slow as it is plain: for each column round, invert, pass on. (A hundredth of the diagonal's mean
# is added to the diagonal of H first. This **damping** keeps the inverse tame where inputs hardly vary.)

# %% tags=["nbval-ignore-output"]
grid = Grid(3)  # 3 bits, one grid a row, with a zero point
scale, zero = fit(shown_weight, grid)
damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.double, device=hessian.device)
left = shown_weight.clone()
for j in range(left.shape[1]):
    column = left[:, j : j + 1]
    rounded = decode(encode(column, scale, zero, grid), scale, zero, grid)[:, 0].double()
    inverse = torch.linalg.inv(damped[j:, j:])
    left[:, j:] -= (column[:, 0] - rounded)[:, None] / inverse[0, 0] * inverse[0][None]
by_nearest = quant.rtn(weights[shown], 3)
by_gptq = quant.gptq(weights[shown], calibrated[shown].hessian, 3)
same = float((encode(left, scale, zero, grid) == by_gptq.unpacked()[0]).float().mean())
print(f"codes equal to those of the package's gptq: {same:.2%}")

# %% tags=["nbval-ignore-output"]
not_nearest = float((by_gptq.unpacked()[0] != by_nearest.unpacked()[0]).float().mean())
print(f"weights that GPTQ does not round to the nearest value: {not_nearest:.0%}")
for name, rounded in (("RTN", by_nearest.dequantize()), ("GPTQ", by_gptq.dequantize())):
    off = float((rounded - weights[shown]).square().mean().sqrt())
    own, other = (output_rms(weights[shown], rounded, s[shown]) for s in (calibrated, tested))
    print(f"{name:<5} error of the weights {off:.4f}; of the output {own:.3f}, on other stories {other:.3f}")
output_ratio = output_rms(weights[shown], by_gptq.dequantize(), tested[shown])
output_ratio /= output_rms(weights[shown], by_nearest.dequantize(), tested[shown])
kv.results.measure("08.gptq_layer", 100 * output_ratio, unit="%", note="output error, GPTQ against RTN")

# %% [markdown]
# GPTQ's error of the *weights* is larger, and it must be: on this grid RTN's is the smallest there is. The error of the
# *output* is smaller. The package's version is the same algorithm, made fast in two steps:
#
# - **No inverse a column.** All the first rows of all these inverses are, up to a factor, the rows of one triangular
#   matrix U, the Cholesky factor of the whole inverse: $H^{-1} = U^T U$. (Checked below.)
# - **Blocks.** Passing an error on to all later columns at once touches the whole matrix for each column. So errors are
#   passed on within a block of 128 columns, and to the rest once a block, as one matrix product. The result is the
#   same.

# %%
corner = damped[:6, :6]
u = torch.linalg.cholesky(torch.linalg.inv(corner), upper=True)
for j in range(6):
    torch.testing.assert_close(torch.linalg.inv(corner[j:, j:])[0], u[j, j] * u[j, j:])
print("row j of U, times U[j, j], is the first row of the inverse of what is left, for every j")

# %% [markdown]
# ## Where GPTQ gains nothing
#
# A method that is described with its gains alone is not understood. We round the seven matrices of a layer, and divide
# the error of the output (on stories that were not used) by that of RTN. The calibration varies: stories; only 64
# tokens of them; this course's prose, which is another kind of text; and inputs that are taken to be uncorrelated.

# %%
other_ids = torch.tensor(tiny.encode(kv.evaluation_text("calibration"))[:4096])
calibrations = {"stories": calibrated, "64 tokens of stories": statistics_of(tiny, layer_names, own_ids[:64])}
calibrations["prose"] = statistics_of(tiny, layer_names, other_ids)


def against_rtn(bits, hessian_of):
    """Output error of GPTQ as a share of that of RTN, for each matrix of the layer."""
    shares = []
    for name in layer_names:
        made = quant.gptq(weights[name], hessian_of(name), bits, 64), quant.rtn(weights[name], bits, 64)
        mine, its = (output_rms(weights[name], each.dequantize(), tested[name]) for each in made)
        shares.append(mine / its)
    return shares


# %% tags=["nbval-ignore-output"]
shares = {f"3 bits, {name}": against_rtn(3, lambda n, s=s: s[n].hessian) for name, s in calibrations.items()}
identity = {name: torch.eye(weights[name].shape[1], device=weights[name].device) for name in layer_names}
shares["3 bits, uncorrelated"] = against_rtn(3, identity.__getitem__)
shares["8 bits, stories"] = against_rtn(8, lambda name: calibrated[name].hessian)
medians = {name: statistics.median(values) for name, values in shares.items()}
kv.plots.show(
    kv.plots.against_nearest(shares),
    alt="The output error of GPTQ as a share of that of rounding to nearest, median of seven matrices: "
    + ", ".join(f"{value:.0%} ({name})" for name, value in medians.items())
    + ".",
)

# %%
exact_tie = all(
    torch.equal(quant.gptq(weights[name], identity[name], 3, 64).codes, quant.rtn(weights[name], 3, 64).codes)
    for name in layer_names
)
print(f"with uncorrelated inputs GPTQ gives the codes of RTN, all of them: {exact_tie}")

# %% [markdown]
# - **Uncorrelated inputs:** nothing to pass on. It is RTN, code by code.
# - **Too little calibration:** 64 tokens do not say how 192 or 512 inputs go together. GPTQ then fits what is chance.
# - **Another text:** it depends on how much the inputs resemble those of the real use. Look at the plot.
# - **8 bits:** the error falls by as much as at 3 bits. But it was so small that no model notices (below).

# %% [markdown]
# ## AWQ: some channels count more
#
# Inputs differ in size, and in real models greatly. A weight's error is multiplied by its input. So the columns of a
# few large inputs should be rounded most carefully. (AWQ is short for activation-aware weight quantization: it looks at
# the *activations*, which is what the inputs of a layer are.) Which columns are these? Not those of large weights.
# Here are the inputs of one matrix of SmolLM2, and what it helps to leave one column in a hundred unrounded.

# %% tags=["nbval-ignore-output"]
chosen = f"layers.{lm.config.n_layers // 3}.self_attn.q_proj"
awq_ids = lm.encode(kv.evaluation_text("calibration"))[:1024] if lm.tokenizer.chat_template else own_ids
inputs = statistics_of(lm, [chosen], awq_ids)[chosen]
q_weight, magnitude = lm.model.get_submodule(chosen).weight, inputs.magnitude
q_rounded = quant.rtn(q_weight, 3, 64).dequantize()
nearest_error = output_rms(q_weight, q_rounded, inputs)


def share_left(scores):
    """Error of the output where the 1% of columns with the highest scores stay as they are, as a share."""
    kept = scores.argsort(descending=True)[: max(1, len(scores) // 100)]
    return output_rms(q_weight, q_rounded.index_copy(1, kept, q_weight[:, kept]), inputs) / nearest_error


print(f"{chosen}: the largest input is {magnitude.max() / magnitude.median():.0f} times the median")
random_scores = torch.rand(len(magnitude), generator=torch.Generator().manual_seed(0)).to(magnitude.device)
scored = {"largest inputs": magnitude, "largest weights": q_weight.norm(dim=0), "any": random_scores}
for name, scores in scored.items():
    print(f"1% of the columns exact, {name:<15}: {share_left(scores):4.0%} of the output error is left")

# %% [markdown]
# But two kinds of numbers in one matrix are awkward for a kernel. AWQ has a trick that needs none: multiply such a
# column by s > 1 *before* rounding, and divide its input by s. Nothing has changed, as s cancels. But the distance of
# grid values hardly changes either, as long as s does not make the column the largest of its group. So the column's
# error, as a share of the column, is s times smaller. All columns get their scale from the size of their inputs:
#
# $$s_k = \text{magnitude}_k^{\;\text{ratio}}, \qquad \text{ratio from 0 to 1, found by trying.}$$
#
# Ratio 0 is no scale at all, which is RTN. With a large ratio the scaled columns spoil the grid for the others.

# %% tags=["nbval-ignore-output"]
ratios, scale_errors = [step / 20 for step in range(20)], []
for ratio in ratios:
    scale = magnitude.clamp(min=1e-4) ** ratio
    scale = scale / (scale.max() * scale.min()).sqrt()  # around 1
    scaled = quant.rtn(q_weight * scale, 3, 64).dequantize() / scale
    scale_errors.append(output_rms(q_weight, scaled, inputs))
best = min(range(20), key=scale_errors.__getitem__)
by_awq = quant.awq(q_weight, inputs, 3, 64)
elsewhere = statistics_of(lm, [chosen], text_ids[:256])[chosen]  # a text on which no ratio was chosen
own_share = output_rms(q_weight, by_awq.dequantize(), inputs) / nearest_error
awq_share = output_rms(q_weight, by_awq.dequantize(), elsewhere)
awq_share /= output_rms(q_weight, q_rounded, elsewhere)
print(f"best ratio {ratios[best]}: {scale_errors[best] / nearest_error:.0%} of the error is left")
print(f"quant.awq, which does just this: {own_share:.0%}; on another text {awq_share:.0%}")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.channel_scales(magnitude.cpu(), ratios, scale_errors, best),
    alt=f"A few inputs are {magnitude.max() / magnitude.median():.0f} times as large as most; with scales the output "
    f"error falls to {scale_errors[best] / nearest_error:.0%} at ratio {ratios[best]}, and rises again after that.",
)

# %% [markdown]
# And who divides the inputs by s? Dividing at each token would cost time. But whoever *writes* these inputs can be
# divided instead, once and for all: the weight of a norm, or the rows of the projection before. This is **folding**. It
# must not change the model at all before rounding. A norm is simple. Look at the values: attention takes weighted means
# of them, so what `o_proj` reads is divided by s if the rows of `v_proj` are. With shared key-value heads (notebook 04)
# several query heads read the same values, so they must have the same scales.
#
# ### Exercise: fold_value_scale
#
# ●●● · 8 minutes
#
# `v` `(KV heads × d_head, d_model)` and `o` `(d_model, n_heads × d_head)` are the weights of a layer's value and output
# projection, `scale` `(KV heads × d_head,)` belongs to the channels of the KV heads. Give back both, so that the rows
# of `v` are divided by the scale, the columns of `o` multiplied, and the layer's output is as before. Query heads that
# share a KV head stand next to each other.
#
# Why it matters: quantizers have failed on just this with shared heads: the search stopped with an error (llm-awq issue
# 53), or this fold is left out (its pull request 67; llm-compressor issue 2808). A wrong order of heads gives no error
# message.
#
# <details><summary>Hint 1</summary>Rows of <code>v</code>: <code>v / scale[:, None]</code>. How many times is each KV
# head used?</details>
# <details><summary>Hint 2</summary>Cut the scale into heads, <code>scale.reshape(-1, d_head)</code>, and repeat each
# (<code>repeat_interleave</code> with <code>dim=0</code>).</details>


# %% tags=["exercise"]
def fold_value_scale(v, o, scale, n_heads, d_head):
    """(v, o) with the scale folded in."""
    # SOLUTION
    heads = scale.reshape(-1, d_head)
    for_each_query_head = heads.repeat_interleave(n_heads // len(heads), dim=0).flatten()
    return v / scale[:, None], o * for_each_query_head
    # END SOLUTION


# %%
kv.check.fold_value_scale(fold_value_scale)

# %% [markdown]
# The package's `fold` does it for all four places of a layer. With scales from a third to three, drawn by lot, the
# model's scores must stay as they were:

# %%
from kvcourse.quant.fold import fold, shared_in_groups

folded, draw_scale = copy.deepcopy(tiny.model), torch.Generator().manual_seed(0)
for layer in folded.layers:
    reads = {"input_layernorm": layer.self_attn.q_proj, "post_attention_layernorm": layer.mlp.up_proj}
    reads |= {"self_attn.v_proj": layer.self_attn.o_proj, "mlp.up_proj": layer.mlp.down_proj}
    for writer, reader in reads.items():
        scale = 3 ** (2 * torch.rand(reader.in_features, generator=draw_scale) - 1)
        scale = shared_in_groups(scale, layer) if writer == "self_attn.v_proj" else scale
        fold(layer, writer, scale.to(folded.device))
few = test_ids[None, :200]
off = float((folded(few) - tiny.model(few)).abs().max())
print(f"scores as before the folding: {off < (1e-4 if folded.device.type == 'cpu' else 1e-2)}")

# %% [markdown]
# ## Side by side
#
# **Predict.** `tiny-gqa` at 3 bits in groups of 64. How many percent of the rise in perplexity that RTN costs are left
# with GPTQ?

# %%
my_guess = 50  # PREDICT
asked = "tiny-gqa, 3 bits: the rise in perplexity with GPTQ, as a share of that with RTN?"
kv.results.predict("08.gptq_rise", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
rounded_by = {}
for method in ("gptq", "awq"):
    for bits in tqdm(BITS, desc=method, leave=False):
        rounded_by[method, bits] = quant.quantize_model(tiny, method, bits, 64, own_ids, progress=False)
    found[method.upper()] = [quality(rounded_by[method, bits]) for bits in BITS]
print("perplexity, and recall over 128 tokens")
for name, values in found.items():
    each = "  ".join(f"{p:9.3f} ({r.share:4.0%})" for p, r in values)
    print(f"{name:<5} " + each)
rises = {name: [perplexity / exact[0] - 1 for perplexity, _ in values] for name, values in found.items()}
kv.results.measure("08.gptq_rise", 100 * rises["GPTQ"][2] / rises["RTN"][2], unit="%", note="AWQ: below")
kv.results.measure("08.awq_rise", 100 * rises["AWQ"][2] / rises["RTN"][2], unit="%", note="of RTN's, 3 bits")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.quality_by_bits(
        BITS,
        {name: [perplexity for perplexity, _ in values] for name, values in found.items()},
        exact[0],
        {name: [recall for _, recall in values] for name, values in found.items()},
    ),
    alt="At 8 bits all are at the exact weights. At 3 bits perplexity rises by "
    + ", ".join(f"{rise[2]:.1%} ({name})" for name, rise in rises.items())
    + ", at 2 bits by "
    + ", ".join(f"{rise[3]:.0%} ({name})" for name, rise in rises.items())
    + ".",
)

# %% [markdown]
# How much AWQ helps depends on the inputs of a model: it lives from a few that are much larger than the others.

# %% tags=["nbval-ignore-output"]
magnitudes = {tiny.name: calibrated["layers.1.self_attn.q_proj"].magnitude, lm.name: magnitude}
for name, mean_size in magnitudes.items():
    print(f"{name}: the largest input of a q_proj is {mean_size.max() / mean_size.median():.1f} times the median")
awq_left = {bits: rises["AWQ"][i] / rises["RTN"][i] for i, bits in enumerate(BITS) if bits < 8}
for bits, part in awq_left.items():
    print(f"{tiny.name} at {bits} bits: AWQ has {part:.0%} of RTN's rise{': it is worse' if part > 1 else ''}")

# %% [markdown]
# And this is the report that comes with such a model, a line for each kind of matrix:

# %% tags=["nbval-ignore-output"]
reported = rounded_by["gptq", 3]
print(reported.model.quantization)

# %% [markdown]
# On the whole of SmolLM2 GPTQ takes longer than fits here. This is how you would do it, and set it beside the numbers
# above:
#
#     better = quant.quantize_model(lm, "gptq", 3, 64, lm.encode(kv.evaluation_text("calibration"))[:8192])
#     kv.perplexity(better, text_ids, context, stride=context)
#
# `data/README.md` has what came of it where this course was made, under "Rounding the chat model".
#
# ## Which matrix minds most?
#
# So far all matrices were treated alike. We round one at a time, harshly, to 2 bits, and leave all others as they are.
#
# **Predict.** Which of a layer's seven matrices does the most harm when it is rounded alone: `q_proj`, `k_proj`,
# `v_proj`, `o_proj`, `gate_proj`, `up_proj` or `down_proj`?

# %%
my_guess = "q_proj"  # PREDICT
asked = "Which kind of matrix does the most harm at 2 bits, on average over the layers?"
kv.results.predict("08.most_sensitive", my_guess, question=asked)

# %% tags=["nbval-ignore-output"]
KINDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
few_ids = test_ids[:1024]
before = kv.perplexity(tiny, few_ids, stride=512)
damage = np.zeros((tiny.config.n_layers, len(KINDS)))
for name in tqdm(weights, leave=False):
    alone = quant.quantize_model(tiny, "rtn", 2, 64, only=name, progress=False)
    place = int(name.split(".")[1]), KINDS.index(name.rpartition(".")[2])
    damage[place] = 100 * (kv.perplexity(alone, few_ids, stride=512) / before - 1)
worst = KINDS[int(damage.mean(0).argmax())]
kv.results.measure("08.most_sensitive", worst, note=f"{damage.mean(0).max():+.1f}% on average")

# %% tags=["nbval-ignore-output"]
row, column = np.unravel_index(damage.argmax(), damage.shape)
kv.plots.show(
    kv.plots.sensitivity(damage, [f"layer {i + 1}" for i in range(len(damage))], KINDS),
    alt=f"Rounded alone to 2 bits, the matrices raise perplexity by {damage.min():+.1f}% to {damage.max():+.1f}%, most "
    f"of all {KINDS[column]} of layer {row + 1}.",
)

# %% tags=["nbval-ignore-output"]
without_worst = damage.copy()
without_worst[row, column] = np.nan
means = np.nanmean(without_worst, axis=0)
print(f"{KINDS[column]} of layer {row + 1}: {damage[row, column]:+.1f}%, the next one {np.nanmax(without_worst):+.1f}%")
print("on average over the layers, without that one:")
order = [KINDS[place] for place in means.argsort()[::-1]]
print(", ".join(f"{kind} {means[KINDS.index(kind)]:+.1f}%" for kind in order))
print(f"The two worst kinds are {order[0]} and {order[1]}; Q4_K_M, below, has more bits for v_proj and down_proj.")

# %% [markdown]
# ## GGUF's mixed types
#
# One matrix can decide about a whole model, and a bit is not worth the same everywhere. Files for llama.cpp use that
# without any calibration: a *mix* gives more bits to the tensors that are known to mind. The best known mix is called
# Q4_K_M. Its rule stands in llama.cpp's source (`src/llama-quant.cpp`; read there, not measured here): Q4_K
# everywhere, but
#
# - the output matrix in Q6_K, and an embedding that is the output too;
# - `attn_v` and `ffn_down` in Q6_K in the first eighth of the layers, the last eighth, and every third in between;
# - in models called 70B, whose values are shared by 8 heads and hence small, the other `attn_v` in Q5_K.
#
# Norms stay in float32. What does that make for Llama 3.1 70B? The sizes of the blocks are those of the `gguf` package.

# %%
import gguf

GGUF_BITS = {kind.name: 8 * size / count for kind, (count, size) in gguf.GGML_QUANT_SIZES.items()}
layers, d, kv_size = shape.n_layers, shape.d_model, shape.n_kv_heads * shape.d_head
eighth = layers // 8
more = {i for i in range(layers) if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2}
parts = Counter()  # type: how many weights
for i in range(layers):
    parts["Q4_K"] += 2 * d * d + d * kv_size + 2 * d * shape.d_ff  # q and o, k, gate and up
    parts["Q6_K" if i in more else "Q5_K"] += d * kv_size  # v
    parts["Q6_K" if i in more else "Q4_K"] += d * shape.d_ff  # down
parts["Q6_K"] += d * shape.vocab_size  # the head
parts["Q4_K"] += d * shape.vocab_size  # the embedding
mixed_bits = sum(GGUF_BITS[kind] * count for kind, count in parts.items()) / sum(parts.values())
for kind, count in parts.items():
    print(f"{kind}: {GGUF_BITS[kind]:.4f} bits, {count / sum(parts.values()):5.1%} of the weights")
print(f"Q4_K_M of Llama 3.1 70B: {mixed_bits:.2f} bits a weight, {total * mixed_bits / 8e9:.1f} GB")

# %% [markdown]
# (K-blocks hold 256 weights, in small groups whose scales are rounded themselves, to 6 or 8 bits. Rows of 576 numbers
# do not divide by 256, so for most of its matrices SmolLM2 would need other types. Whoever made its file chose `Q4_1`
# for all; see the table of types further above.)
#
# Can *we* write such a file? `kv.write_gguf` puts the very codes of a quantized model into `Q4_0` blocks, if it was
# rounded so: symmetric, groups of 32. llama.cpp then continues a story (from the `xllamacpp` wheel, if it is installed:
# `pip install -e ".[peers]"`), and so do we.

# %%
folder = Path(tempfile.mkdtemp(prefix="kvcourse-08-"))
in_blocks = quant.quantize_model(tiny, "gptq", 4, 32, own_ids, symmetric=True, progress=False)
kv.write_gguf(in_blocks, folder / "tiny.gguf")
back = kv.load_model(folder / "tiny.gguf", dtype=torch.float32)
written = in_blocks.model.layers[0].mlp.up_proj.quantized().dequantize()
print(f"{(folder / 'tiny.gguf').stat().st_size:,} bytes; read back as it was: ", end="")
print(torch.equal(back.model.layers[0].mlp.up_proj.weight, written.to(back.model.device)))

# %% tags=["nbval-ignore-output"]
from importlib.util import find_spec

from kvcourse.bench.llama_cpp import agreement, continue_with_llama_cpp

opening, agreed = test_ids[:60].tolist(), None
if find_spec("xllamacpp"):
    theirs = continue_with_llama_cpp(folder / "tiny.gguf", opening, 40)
    agreed = agreement(in_blocks.model, opening, theirs)
    print(f"llama.cpp: ...{tiny.decode(agreed.theirs)}\n   course: ...{tiny.decode(agreed.ours)}")
    parted = "" if agreed.gap is None else f" They part where our two best are {agreed.gap:.3f} apart."
    print(f"The first {agreed.same} of {len(agreed.ours)} tokens are the same.{parted}")
    print(f"Log-probabilities differ by at most {agreed.difference:.3f}.")
else:
    print("xllamacpp is not installed, so llama.cpp does not read the file here.")

# %% [markdown]
# llama.cpp does not compute with quite these numbers: for a product with `Q4_0` it rounds the *inputs* to 8 bits as
# well. So scores differ a little, and two greedy texts part where the two best tokens are closer to each other than
# that.

# %% [markdown]
# ## Another grid: NF4
#
# Weights are spread like a bell: many near zero, few far out. A grid with equal distances spends as many values on the
# far ends as on the middle. **NF4** (QLoRA, arXiv 2305.14314) puts its 16 values where a normal distribution has its
# weights (the outer ones are still used less, as a group's largest number is further out than assumed: arXiv
# 2306.06965). Codes have 4 bits as before, and a group keeps one scale, its largest magnitude. Here are the two grids
# under real weights. The bars at both ends are the largest numbers of the groups, which are 1 or -1 after the division.

# %%
in_groups = torch.cat([w.reshape(-1, 64) for w in weights.values()])
relative = (in_groups / in_groups.abs().amax(1, keepdim=True)).flatten().cpu().numpy()
four_bits = {"INT4, symmetric": np.arange(-8, 8) / 7, "NF4": nf4_levels().numpy()}
kv.plots.show(
    kv.plots.levels(relative, four_bits),
    alt="A bell of weights between two bars, the largest of each group at -1 and 1; INT4 has equal distances and one "
    "value below -1, NF4 has them narrow in the middle and wide at the ends.",
)


# %%
def grid_error(weight, **options):
    return float((quant.rtn(weight, 4, 64, **options).dequantize() - weight).norm() / weight.norm())


kinds = ("symmetric", "zero_point", "minimum", "nf4")
by_grid = {kind: [grid_error(w, kind=kind) for w in weights.values()] for kind in kinds}
for kind, errors_of in by_grid.items():
    taken = 8 * quant.QuantizedTensor.bytes_for((512, 192), 4, 64, kind=kind) / (512 * 192)
    print(f"{kind:<10} mean error {statistics.mean(errors_of):.4f}, {taken:.3f} bits a weight")
nf4_wins = sum(a < b for a, b in zip(by_grid["nf4"], by_grid["symmetric"], strict=True))
print(f"NF4 has the smaller error than symmetric INT4 in {nf4_wins} of {len(weights)} matrices")

# %% [markdown]
# So at the same 4.25 bits NF4 is better than equal steps. Zero point and minimum come to about the same error in
# another way: they follow the group's own lowest and highest number, and pay for it with more bits.
#
# What is it for? **QLoRA** fine-tunes a large model on one GPU: the model's weights stay frozen in NF4, and beside each
# matrix a small one of two thin factors (LoRA) is trained in 16 bits. For each product the weights are dequantized. So
# NF4 is a *storage* type: it wants good values at 4 bits, and needs no arithmetic with codes, whose equal steps an
# integer kernel would use. (QLoRA's own scales have 32 bits, half a bit a weight in groups of 64. It rounds them too,
# and 0.127 are left: cited, section 3.)

# %% [markdown]
# ## What it saves in memory
#
# Now the bill, from allocated bytes: each tensor that a model holds, shared ones once. SmolLM2's embedding is a fifth
# of it, and its head the same matrix, so we round that too (`head_bits`: in 4 bits on the grid of the layers, in 8 bits
# with one scale a row).


# %% tags=["nbval-ignore-output"]
def allocated(module):
    """Bytes of the memory behind all tensors of a module."""
    storages = [tensor.untyped_storage() for tensor in [*module.parameters(), *module.buffers()]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


half = torch.bfloat16  # what kernels for few bits compute in
forms = {"float32": lm.model, "bfloat16": copy.deepcopy(lm.model).to(half)}
for name, bits, size, path in (
    ("8 bits", 8, None, "auto"),
    ("4 bits", 4, 64, "auto"),
    ("4 bits, no kernel", 4, 64, "dequantize"),
):
    how = {"symmetric": True, "head_bits": bits, "dtype": half, "path": path}
    forms[name] = quant.quantize_model(lm.model, "rtn", bits, size, progress=False, **how)
memory = {name: allocated(form) for name, form in forms.items()}
for name, nbytes in memory.items():
    print(f"{name:<18} {nbytes / 1e6:6.1f} MB, {8 * nbytes / parameters(lm.config):6.3f} bits a weight")

# %% [markdown]
# Is it what the formulas say, or is an unpacked copy hidden somewhere? The report counts the bytes of the form that is
# saved; after a few steps the model must not hold more. (The form in which the int4 kernel reads adds a second number
# beside each scale.)

# %%
for form in forms.values():
    form(torch.zeros(1, 3, dtype=torch.int64))
unchanged = all(allocated(form) == memory[name] for name, form in forms.items())
plain = sum(p.nbytes for p in forms["4 bits, no kernel"].parameters())  # norms
as_reported = memory["4 bits, no kernel"] == forms["4 bits, no kernel"].quantization.nbytes + plain
print(f"after use as many bytes as before: {unchanged}; bytes as in the report: {as_reported}")

# %% [markdown]
# ## What it saves in time
#
# A step reads all these bytes, so with a quarter of the bytes it could take a quarter of the time. Could: somebody must
# multiply with 4-bit codes *without* writing the weights out in 16 bits first. That is a **kernel**, and there is one
# for some forms, on some machines, for some numbers of rows. Where there is none, the weight is dequantized at each
# step: its few bytes are read, many are written, and read again. `QuantLinear` says which way it goes.

# %% tags=["nbval-ignore-output"]
for name in ("8 bits", "4 bits", "4 bits, no kernel"):
    layers_of = [module for module in forms[name].modules() if isinstance(module, quant.QuantLinear)]
    for path, count in Counter(layer.path for layer in layers_of).items():
        reason = next((layer.reason for layer in layers_of if layer.path == path and layer.reason), "")
        print(f"{name:<18} {count} of {len(layers_of)} matrices: {path}. {reason or ''}")
ceilings = kv.measure_ceilings(lm.model.device, half, rounds=1)
least = {}
for name in forms:
    least[name] = kv.roofline(kv.flops(lm.config, 1, 64), memory[name], ceilings).seconds
print(f"memory ceiling {ceilings.bytes_per_second / 1e9:.1f} GB/s")

# %% [markdown]
# **Predict.** One decode step of SmolLM2: how many times as fast is it with 4 bits as in bfloat16?

# %%
my_guess = 4  # PREDICT
asked = "A decode step at 4 bits: how many times as fast as in bfloat16?"
kv.results.predict("08.faster_4_bits", my_guess, unit="times", question=asked)


# %% tags=["nbval-ignore-output"]
def step_seconds(form, repeats=7):
    """Median seconds of one more token after 64."""
    cache = kv.DenseCache(form.config, max_len=65, dtype=form.dtype, device=form.device)
    cache.lengths, readings = [64], []
    for _ in range(repeats):
        watch = Stopwatch(form.device)
        form(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
        readings.append(watch.read())
        cache.lengths = [64]
    return statistics.median(readings)


took = {name: step_seconds(form) for name, form in forms.items()}
for name, seconds in took.items():
    print(f"{name:<18} {1e3 * seconds:7.1f} ms a step; reading alone {1e3 * least[name]:5.1f} ms")
faster, possible = took["bfloat16"] / took["4 bits"], least["bfloat16"] / least["4 bits"]
kv.results.measure("08.faster_4_bits", faster, unit="times", bound=possible, note="bound: roofline")
slower = took["4 bits, no kernel"] / took["bfloat16"]
kv.results.measure("08.no_kernel", slower, unit="times", note="4 bits, dequantized at each step, against bfloat16")

# %% tags=["nbval-ignore-output"]
bars = {}
for name, form in forms.items():
    in_layers = allocated(form.layers)
    bars[name] = in_layers / 1e6, (memory[name] - in_layers) / 1e6, 1e3 * took[name], 1e3 * least[name]
kv.plots.show(
    kv.plots.before_and_after(bars),
    alt=f"With 4 bits the model takes {memory['4 bits'] / memory['bfloat16']:.0%} of the memory of bfloat16, a step "
    f"{took['4 bits'] / took['bfloat16']:.0%} of the time; dequantized at each step, "
    f"{took['4 bits, no kernel'] / took['bfloat16']:.0%}.",
)

# %% [markdown]
# Fewer bits *always* save memory. Time they save only with a kernel, for few rows at a time, and seldom all that the
# bytes promise: a step has other work too, the smaller the model the more (notebook 03). A kernel that is missing costs
# more than the bits save. So this course promises no speed. (A form can also be faster than "reading alone": if it fits
# the processor's own memory, it does not come from the main memory any more.)
#
# ## 70 billion weights on a laptop
#
# Now the sentence that made 4 bits famous: "Llama 70B runs on a laptop with 64 GB". Weights, cache (in 16 bits,
# notebook 04), and the system take their part. How much of the memory can a model have? On a Mac the graphics processor
# gets three quarters of it unless told otherwise (llama.cpp issue 1870 shows 49,152 MiB with 64 GB). And some gigabytes
# for the system must stay in any case; we allow 90%. One thing more: for this course a GB is 10^9 bytes, but a memory
# that is sold as 64 GB has 64 × 2^30 bytes, 7% more. We work out both, as the last few gigabytes decide.

# %%
laptops = {"64 x 10^9 bytes": kv.DEVICES["laptop 64 GB"], "64 x 2^30 bytes": 64 * 2**30}
grids_of_4 = {"groups of 64, symmetric": real[3], "Q4_K_M": mixed_bits, "groups of 32, minimum": real[4]}
fits = {}  # of each grid, for each memory: tokens in three quarters, in 90%
for name, each in grids_of_4.items():
    print(f"{name}, {each:.2f} bits: weights {kv.weight_bytes(shape, each) / 1e9:.1f} GB; room for a context of")
    for memory_of, size in laptops.items():
        quarters, most = (kv.longest_context(shape, size, weight_bits=each, usable=part) for part in (0.75, 0.9))
        fits[name, memory_of] = quarters, most
        print(f"   {quarters:,} tokens in three quarters of {memory_of}, {most:,} in 90%")

# %%
sixteen = kv.weight_bytes(shape, 16) / 1e9
holding = [device for device, room in kv.DEVICES.items() if sixteen * 1e9 <= room]
print(f"In 16 bits, {sixteen:.1f} GB, it fits on {', '.join(holding) or 'none'} of {', '.join(kv.DEVICES)}.")
lengths, counted = [2**n for n in range(9, 18)], "64 x 10^9 bytes"
curves = {
    f"{name} weights": [(kv.weight_bytes(shape, each) + kv.cache_bytes(shape, n)) / 1e9 for n in lengths]
    for name, each in {"16-bit": 16, "8.5-bit": GGUF_BITS["Q8_0"], "Q4_K_M": mixed_bits}.items()
}
kv.plots.show(
    kv.plots.memory_by_length(lengths, curves, {"laptop 64 GB": 64, "three quarters of it": 48, "H200 141 GB": 141}),
    alt=f"With Q4_K_M weights 90% of the laptop's 64 GB are enough for {fits['Q4_K_M', counted][1]:,} tokens, three "
    f"quarters for {fits['Q4_K_M', counted][0]:,}; in 16 bits the weights alone, {sixteen:.1f} GB, are a little more "
    "than an H200 has.",
)

# %% [markdown]
# It runs, with a context that depends on the last few gigabytes; of the model's own 131,072 tokens the cache alone
# would take most of the laptop. And how fast? A step reads all weights. A laptop that reads 400 GB a second (an Apple
# M-series Max, by its maker) cannot be faster than this:

# %%
for name, each in {"16-bit": 16, "Q4_K_M": mixed_bits}.items():
    needed = kv.weight_bytes(shape, each)
    remark = "" if needed < 64 * 2**30 else " (but would not fit)"
    print(f"{name:<7} {400e9 / needed:5.1f} tokens a second at most{remark}")

# %% [markdown]
# ## Keep it
#
# Rounding is done once, and what is kept is the packed form. Saved and loaded again, a model must give the same scores
# to the last bit: nothing is rounded a second time.

# %%
quant.save(reported, folder / "tiny-3-bits")
again = quant.load(folder / "tiny-3-bits", device=tiny.model.device)
equal = torch.equal(again(few), reported.model(few))
saved = sum(path.stat().st_size for path in (folder / "tiny-3-bits").iterdir())
print(f"saved, loaded, the same scores to the bit: {equal}; {saved / 1e6:.2f} MB on disk")

# %% [markdown]
# ## Summary

# %% tags=["nbval-ignore-output"]
kv.results.summary("08")

# %% [markdown]
# Your guesses beside what was measured: within the band they were at most a factor of two off. The farther from 1, the
# more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("08")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# Seven statements can be judged now. The code works it out from what was measured above.
#
# - **20.** "Fewer bits for each weight: FP32 4 bytes, FP16 2, INT8 1, INT4 1/2." Wrong as said if memory gave out other
#   sizes; else it holds.
# - **21.** "A 70B model takes 280, 140, 70, 35 or 17.5 GB." Wrong as said if the arithmetic is; it holds with a
#   condition if grids in use take over 3% more than their codes.
# - **22.** "0.237 becomes the nearest of 16 grid values." Wrong as said if a grid gave another than its nearest value;
#   it holds with a condition if what 0.237 becomes depends on the kind of grid or on its neighbors, or if GPTQ rounds
#   weights to others than the nearest.

# %% tags=["nbval-ignore-output"]
sizes_of = [bytes_each[torch.float32], bytes_each[torch.float16], bytes_each[torch.int8], bytes_each["4 bits, packed"]]
as_said = sizes_of == [4, 2, 1, 0.5]
kv.results.verdict(
    20,
    "holds" if as_said else "wrong as said",
    f"Allocated for a number: {', '.join(map(str, sizes_of))} bytes, the 4-bit ones packed two to a byte.",
)
codes_alone = [70 * bits / 8 for bits in (32, 16, 8, 4, 2)]
dearer = max(each / use[0] for each, use in zip(real[2:], uses[2:], strict=True)) - 1
right_sum = codes_alone == [280, 140, 70, 35, 17.5]
kv.results.verdict(
    21,
    "wrong as said" if not right_sum else "holds with a condition" if dearer > 0.03 else "holds",
    f"That is what the codes take. With their scales, 4 bits take {real[3]:.2f} to {real[4]:.2f} bits a weight, "
    f"{70 * real[3] / 8:.1f} to {70 * real[4] / 8:.1f} GB for 70 billion; Q4_K_M {mixed_bits:.2f} bits.",
)
differ = max(becomes.values()) - min(becomes.values()) > 0.01
listed = ", ".join(f"{value:.3f} ({kind})" for kind, value in becomes.items())
kv.results.verdict(
    22,
    "wrong as said" if not nearest_always else "holds with a condition" if differ or not_nearest > 0 else "holds",
    f"It becomes the nearest value of its grid, and which that is depends on the grid: {listed}. GPTQ chooses another "
    f"than the nearest for {not_nearest:.0%} of the weights of a matrix.",
)

# %% [markdown]
# - **23.** "The loss of quality is small at INT8, modest at INT4, large below." Rounded to nearest, perplexity must
#   rise by at most 1% at 8 bits, by more at 4 and again at 3 and 2, and at 2 bits must at least double, for both
#   models (with a stand-in there is one model only); else it is wrong as said. It holds with a condition if 4 bits cost
#   one of them over 5%, or if GPTQ at 3 bits costs less than RTN at 4 bits cost one of them.
# - **24.** "GPTQ, AWQ and GGUF do not treat all weights alike." Wrong as said unless GPTQ gave some weights other
#   values than the nearest, AWQ had a smaller error of the output than RTN on a text that it was not calibrated on, and
#   the chat model's file has matrices of several types (without such a file: Q4_K_M, cited). It holds with a condition
#   if, with uncorrelated inputs, GPTQ is RTN, or if on the whole of `tiny-gqa` at 3 bits AWQ leaves over 90% of RTN's
#   rise.

# %% tags=["nbval-ignore-output"]
chat_rises = [perplexity / reading - 1 for perplexity in chat]
both = {tiny.name: rises["RTN"]}
both.setdefault(lm.name, chat_rises)  # a stand-in is tiny-gqa itself
in_order = all(r[0] <= 0.01 and r[0] < r[1] < r[2] < r[3] and r[3] >= 1 for r in both.values())
dear, good = max(r[1] for r in both.values()), rises["GPTQ"][2]
conditions = [f"4 bits cost {name} {r[1]:.1%}" for name, r in both.items() if r[1] > 0.05]
if good < dear:
    conditions.append(f"with GPTQ 3 bits cost {tiny.name} {good:.1%}, less than the {dear:.1%} of 4 bits to nearest")
kv.results.verdict(
    23,
    "wrong as said" if not in_order else "holds with a condition" if conditions else "holds",
    f"For {'one model' if len(both) == 1 else 'two models'}, perplexity rises with 8, 4, 3 and 2 bits in groups of 64, "
    "to nearest, by "
    + "; ".join(f"{', '.join(times_or_percent(1 + rise) for rise in r)} ({name})" for name, r in both.items())
    + "."
    + (f" But {'; '.join(conditions)}." if conditions else ""),
)

# %% tags=["nbval-ignore-output"]
matrix_types = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1} or set(parts)
three_ideas = not_nearest > 0 and awq_share < 1 and len(matrix_types) > 1
conditions = ["with uncorrelated inputs GPTQ is rounding to nearest, code by code"] * exact_tie
if awq_left[3] > 0.9:
    conditions.append(f"on the whole of {tiny.name} AWQ leaves {awq_left[3]:.0%} of RTN's rise at 3 bits")
kv.results.verdict(
    24,
    "wrong as said" if not three_ideas else "holds with a condition" if conditions else "holds",
    f"Three ideas: GPTQ lets later columns make up for errors (output error {output_ratio:.0%} of RTN's, for a matrix "
    f"of {tiny.name} at 3 bits in rows), AWQ scales the channels of large inputs ({awq_share:.0%}, for a matrix of "
    f"{lm.name} at 3 bits in groups of 64), and the GGUF {'file' if source else 'mix Q4_K_M (cited)'} has matrices in "
    f"{', '.join(sorted(matrix_types))}." + (f" But {'; and '.join(conditions)}." if conditions else ""),
)

# %% [markdown]
# - **26.** "Llama 70B runs on a 64 GB laptop in 4 bits, where FP16 needs a cluster." Wrong as said if no context fits
#   at 90% of the memory with any of the 4-bit grids. It holds with a condition if less than the model's own context
#   fits with one of them, or if two of the largest devices above are enough for 16 bits, which is hardly a cluster.
# - **27.** "QLoRA's 4 bits are another grid for the same weights." Wrong as said unless NF4's distances differ, and it
#   takes as many bits a weight as symmetric INT4. It holds with a condition if it does not have the smaller error in
#   every matrix.

# %% tags=["nbval-ignore-output"]
least_room, most_room = min(pair[0] for pair in fits.values()), max(pair[1] for pair in fits.values())
two = sixteen <= 2 * kv.DEVICES["H200 141 GB"] / 1e9
conditions = []
if most_room < shape.max_seq_len or least_room < most_room:
    conditions.append(
        f"of its {shape.max_seq_len:,} tokens of context {least_room:,} to {most_room:,} fit, depending on the grid, "
        "the share of the memory and what a GB is"
    )
conditions += [f"{sixteen:.1f} GB in 16 bits need two devices of 141 GB, not a cluster"] * two
kv.results.verdict(
    26,
    "wrong as said" if most_room == 0 else "holds with a condition" if conditions else "holds",
    f"Weights of {kv.weight_bytes(shape, real[3]) / 1e9:.1f} to {kv.weight_bytes(shape, real[4]) / 1e9:.1f} GB leave "
    "room for a cache on 64 GB." + (f" But {'; and '.join(conditions)}." if conditions else ""),
)
distances = nf4_levels().diff()
same_bits = quant.nf4(weights[shown], 64).nbytes == quant.rtn(weights[shown], 4, 64, symmetric=True).nbytes
another = float(distances.max() / distances.min()) > 1.01 and same_bits
kv.results.verdict(
    27,
    "wrong as said" if not another else "holds with a condition" if nf4_wins < len(weights) else "holds",
    f"16 values and one scale a group, as INT4, but {distances.min():.3f} to {distances.max():.3f} apart; the error is "
    f"smaller than with symmetric INT4 in {nf4_wins} of {len(weights)} matrices of {tiny.name}.",
)

# %% [markdown]
# **What to remember**
#
# 1. b bits are 2^b values on a grid. A weight is a code; a group shares a scale; the scale is rounded first.
# 2. Count what is really stored: 4 bits are 4.25 to 5. Ask for the memory of the process, not for the name of the type.
# 3. To nearest is good at 8 bits and bad at 2. At 4 bits with groups it cost little in one model here and much in the
#    other: measure yours. A file that was rounded before tells nothing about 4 bits.
# 4. GPTQ: round a column, let the rest make up for it; it needs inputs that go together. AWQ: scale the columns of
#    large inputs, and fold the scale away. GGUF's mixes: more bits where it matters.
# 5. Memory is saved always. Time is saved by a kernel.
#
# ## What the field does today
#
# - GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) checkpoints are run by vLLM and others with kernels such as
#   Marlin (arXiv 2408.11743), near the memory ceiling up to batches of 16 to 32.
# - Newer methods rotate weights and inputs first so that no channel stands out (QuaRot, arXiv 2404.00456), or round
#   several weights together and reach 2 bits that can be used (QuIP#, arXiv 2402.04396; AQLM, arXiv 2401.06118).
# - SmoothQuant (arXiv 2211.10438) folds large input channels into the weights, so that inputs can have 8 bits too. Then
#   arithmetic gets faster as well, not only reading.
# - Hardware brings grids of its own: FP8, and blocks of 4-bit floating point numbers that share a scale (arXiv
#   2310.10537). gpt-oss was released with most weights in MXFP4 (arXiv 2508.10925).
# - llama.cpp's k-quants and their mixes are described in its pull request 1684; an *importance matrix* (pull request
#   4861) is its way to look at inputs.
#
# **Next** in the course comes 09: the same idea for the cache, whose numbers come while the model runs.

# %% tags=["nbval-ignore-output"]
kv.check.progress("08")
