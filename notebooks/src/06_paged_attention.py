# %% [markdown]
# # 6. Paged attention and continuous batching
#
# **Time:** about 90 minutes · **Device:** any (CPU is enough)
#
# **You will be able to**
#
# - say how much of the memory a server reserves for texts ever holds any, and why pages nearly end the waste;
# - keep the books of a pool of pages by hand: block tables, slots, a free list, reference counts, copy on write;
# - read a live memory map: who holds which page, what is shared, what happens when the pages run out;
# - let texts come and go in every step, and say what that does to throughput and to waiting, at any load;
# - choose the two numbers of such an engine, the size of a page and the tokens of a step, by what they trade.
#
# {{colab_badge}}

# %% tags=["setup"]
# SETUP

# %% tags=["nbval-ignore-output"]
import random
import statistics
from dataclasses import replace

import numpy as np
import torch
from tqdm.auto import tqdm

from kvcourse.caches.packed import PackedCache, Piece
from kvcourse.caches.pages import Pages
from kvcourse.layers import attention
from kvcourse.metrics import Stopwatch
from kvcourse.serving.blocks import BlockPool, BlockTable
from kvcourse.serving.dry_run import DryEngine, linear_cost
from kvcourse.serving.replay import replay
from kvcourse.serving.snapshot import snapshot
from kvcourse.serving.static import replay_static
from kvcourse.serving.waste import in_pages, in_pieces, reserved
from kvcourse.serving.workload import Arrival, mixed_lengths, poisson

checkpoint = "smollm2-135m"  # or your own, with a context of 512 tokens or more
lm = kv.load_model(checkpoint)
model, config = lm.model, lm.config
tiny = kv.load_model("tiny-gqa", dtype=torch.float64, device="cpu")  # rounding is out of the way: equal ids are equal
print(f"{lm.name} on {model.device} in {model.dtype} where time is measured,\ntiny-gqa where texts are compared")

# %% [markdown]
# ## Memory that holds nothing
#
# A cache is allocated before the text is written, and nobody knows how long an answer gets: the model decides that,
# token by token. Count the memory in **slots**: a slot has room for the keys and values of one token, in all layers. A
# server that gives each text one piece of memory must give it slots for the longest text that it allows. How many of
# them ever hold a token?
#
# We need a workload. People send prompts of all lengths and get answers of all lengths; most are short, and a few are
# very long. `mixed_lengths` draws such pairs from a seed.

# %%
longest = 2048
lengths = mixed_lengths(300, seed=0, prompt=128, answer=192, longest=longest // 2)
prompts, answers = zip(*lengths, strict=True)
for name, numbers in (("prompt", prompts), ("answer", answers)):
    print(f"{name}: {min(numbers)} to {max(numbers):,} tokens, half of them below {statistics.median(numbers):.0f}")

# %% [markdown]
# A text with a prompt of p tokens and an answer of n stays for n steps. In the first step it holds p tokens, and in
# each further step one more. So there are two kinds of waste: slots that will hold a token *later*, and slots that
# *never* will.
#
# **Predict.** Every text reserves 2,048 slots. Over the lives of all these texts: how many percent of what they have
# reserved holds a token?

# %%
my_guess = 50  # PREDICT
asked = "Every text reserves room for the longest: how much of it holds a token?"
kv.results.predict("06.useful_reserved", my_guess, unit="%", question=asked)

# %% [markdown]
# A server could reserve less if it knew the length of each answer. Three ways of reserving, from none to full
# knowledge:


# %%
def shares(slots):
    """What the memory set aside holds over all lives: tokens, slots used later, slots never used, as shares of 1."""
    tokens = later = never = 0
    for p, n in lengths:
        for held in range(p, p + n):
            set_aside, needed = slots(p, n, held), p + n - 1  # the last token made is never stored
            tokens += held
            later += min(set_aside, needed) - held
            never += max(set_aside - needed, 0)
    return np.array([tokens, later, never]) / (tokens + later + never)


ways = {
    "the longest text": shares(lambda p, n, held: longest),
    "answer rounded up to 2, 4, 8 ...": shares(lambda p, n, held: min(p + 2 ** (n - 1).bit_length(), longest)),
    "exactly what it will need": shares(lambda p, n, held: p + n - 1),
}
for name, (tokens, later, never) in ways.items():
    print(f"{name:<33} {tokens:5.1%} hold a token, {later:5.1%} will, {never:5.1%} never")

# %%
by_package = reserved([Arrival(0, [0] * p, n) for p, n in lengths], max_len=longest)
by_hand = [share[0] for share in ways.values()]
assert np.allclose(by_hand, [by_package.share(way) for way in ("maximum", "power_of_two", "known")])
kv.results.measure("06.useful_reserved", 100 * by_hand[0], unit="%")

# %% [markdown]
# The second and third way are not to be had: they ask for the length of an answer before it is written. The authors of
# vLLM measured servers that reserve in these three ways, and found that 20.4% to 38.2% of the cache memory held tokens
# (arXiv 2309.06180, figure 2; they count the holes between texts as well, which come later here). And memory limits how
# many texts run at once, and with that how much one pass through the weights is worth (notebook 03).
#
# Even knowing the future would not be enough: a text that gets its slots in one piece holds those of its last token
# from the first step on. It has to get them *as it grows*.
#
# ## Pages
#
# Operating systems met this problem in the 1960s. Programs do not get memory in one piece, but in **pages** of one
# size, and a table says which page of the program lies where. A program sees its pages as if they stood in a row.
#
# The cache can be cut in the same way. A page of the cache is called a **block**; this notebook uses both words for it.
# The memory is one **pool** of blocks of, say, 16 slots. A text takes a block when it needs one, any that is free, and
# writes the number down in its **block table**. Block i of the text holds its tokens from 16 i on.
#
# ### Exercise: blocks_for
#
# ●○○ · 3 minutes
#
# Write how many blocks a text of `length` tokens takes, and how many slots in them hold no token, as a pair
# `(blocks, empty)`.
#
# Why it matters: this pair is all of the waste that is left. On average half a block for each text.
#
# <details><summary>Hint 1</summary>A part of a block is taken whole, so round up; <code>-(-a // b)</code> does.
# </details>
# <details><summary>Hint 2</summary>Empty is what the blocks have room for, less the tokens.</details>


# %% tags=["exercise"]
def blocks_for(length, block_size):
    """How many blocks the text takes, and how many of their slots are empty."""
    # SOLUTION
    blocks = -(-length // block_size)
    return blocks, blocks * block_size - length
    # END SOLUTION


# %%
kv.check.blocks_for(blocks_for)

# %% [markdown]
# **Predict.** The same texts, in blocks of 16 slots that are taken one by one. How many percent of what they have taken
# holds a token?

# %%
my_guess = 80  # PREDICT
kv.results.predict("06.useful_pages", my_guess, unit="%", question="Blocks of 16 slots: how much holds a token?")

# %%
ways["blocks of 16, as it grows"] = shares(lambda p, n, held: -(-held // 16) * 16)
useful = ways["blocks of 16, as it grows"][0]
assert np.isclose(useful, by_package.share("pages"))
kv.results.measure("06.useful_pages", 100 * useful, unit="%")

# %%
cited = {"vLLM paper: servers that reserve": (0.204, 0.382), "vLLM paper: pages": (0.963, 0.963)}
kv.plots.show(
    kv.plots.memory_shares(ways, cited),
    alt=f"Of the memory set aside, {by_hand[0]:.0%} holds a token where the longest text is reserved, "
    f"{by_hand[2]:.0%} where the length is known before, and {useful:.0%} in blocks of 16.",
)

# %% [markdown]
# ## Through the table
#
# A token at position p is in block p // 16 of its text. The table says which block of the pool that is, and p % 16 is
# the place in it. Real memory, here with blocks of 4 so that it fits the page: two texts share a pool of 8 blocks. The
# first grows, the second comes and goes, and the first grows on.

# %%
pool = BlockPool(num_blocks=8, block_size=4)
first, second = BlockTable(pool), BlockTable(pool)
first.reserve(0, 3)  # afterwards there is room for tokens 0, 1 and 2
second.reserve(0, 8)
first.reserve(3, 6)
second.free()
first.reserve(6, 10)
print(f"the first text has the blocks {first.blocks}; {pool.free_blocks} of {pool.num_blocks} blocks are free")

# %%
read = tiny.encode("Mia put the red kite in the shed.")[:10]
pieces = [tiny.decode([token]) or "start" for token in read]
kv.plots.show(
    kv.plots.block_table(pieces, first.blocks, 4, 8),
    alt=f"Three blocks of a text of ten tokens and where they lie in the pool: in blocks {first.blocks}.",
)

# %% [markdown]
# ### Exercise: slot_mapping
#
# ●●○ · 6 minutes
#
# `table` is the block table of a text: `table[i]` is the block of the pool that holds its tokens from `i * block_size`
# on. Block b of the pool has the slots from `b * block_size` on. Write the slots of the tokens `start` to `stop - 1` of
# the text, as a list.
#
# Why it matters: these numbers are what attention gets. Engines call them the slot mapping and work them out in every
# step. One that is wrong reads another reader's text.
#
# <details><summary>Hint 1</summary>For one position: which block of the text is it in, and where in that block?
# </details>
# <details><summary>Hint 2</summary><code>table[position // block_size]</code> is the block of the pool.</details>


# %% tags=["exercise"]
def slot_mapping(table, block_size, start, stop):
    """The slots of tokens start to stop - 1 of the text with these blocks."""
    # SOLUTION
    return [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]
    # END SOLUTION


# %%
kv.check.slot_mapping(slot_mapping)

# %% [markdown]
# Now the attention. There is nothing to it: take the keys and values at those slots and attend as always. It is *the
# same* attention over the same numbers; only where they were read differs. All other slots of this pool hold NaN, "not
# a number", which would spoil whatever it touches.

# %%
torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 10, 16), torch.randn(1, 4, 10, 16)  # one query, ten tokens
keys, values = torch.full((2, 1, 4, 32, 16), torch.nan)  # a pool of 8 blocks of 4 slots
slots = first.slots(0, 10)
keys[:, :, slots], values[:, :, slots] = k, v
in_one_piece = attention(q, k, v)
through_the_table = attention(q, keys[:, :, slots], values[:, :, slots])
print(f"slots {slots}")
print(f"equal to the last bit: {torch.equal(in_one_piece, through_the_table)}")

# %% [markdown]
# So "paged attention" is no new attention and no approximation. The keys were turned by their positions before they
# were stored, so each brings its place along, and nobody minds where it lies. The package's `PagedCache` does this in
# all layers, for any number of texts. Whole texts written through it must be those written through a dense cache:

# %%
story = tiny.encode("Mia put the red kite in the shed. Then Mia and Leo went to the shop and bought four apples. ") * 3
unequal = [story[:40], story[:7], story[5:28]]
paged = kv.PagedCache(tiny.config, batch_size=3, max_len=80, block_size=4, dtype=torch.float64, device="cpu")
through_pages = kv.generate(tiny.model, unequal, 30, cache=paged)
dense_answers = kv.generate(tiny.model, unequal, 30)
same_tokens = [one.ids for one in through_pages] == [one.ids for one in dense_answers]
print(f"three texts of different lengths, 30 tokens each, the same tokens: {same_tokens}")

# %% [markdown]
# ## What the detour costs
#
# In an operating system the processor itself looks up the pages, at next to no cost. Here we do. `gather` is what you
# have just seen: it copies the keys and values of each text side by side, in every layer of every step, and only then
# attends. `direct` reads a few blocks at a time and uses them where they lie, so no context is copied. Engines for GPUs
# read through the table *inside* the kernel; the vLLM paper reports 20% to 26% more time for its attention kernel than
# for one that reads in a row (section 7.1; attention alone, not the whole step).
#
# **Predict.** Four texts of 1,000 tokens each (or half of your model's context, if that is less). How many times as
# long does a step take that gathers through the table as one with a dense cache?

# %%
my_guess = 2  # PREDICT
asked = "A step through the table, against one with a dense cache?"
kv.results.predict("06.step_gather", my_guess, unit="times", question=asked)

# %% tags=["nbval-ignore-output"]
texts, context = 4, min(1000, config.max_seq_len // 2)
here = {"dtype": model.dtype, "device": model.device}


def paged_step(block_size, way="gather"):
    """A function that runs the last token of each text, whose blocks are scattered over a pool."""
    each = -(-context // block_size)
    pages = Pages(config, texts * each, block_size, **here)
    pages.fill(0.01)  # memory that was never written is not really there, and reading it would be too quick
    order = random.Random(0).sample(range(texts * each), texts * each)
    packed, new = PackedCache(pages, way), torch.zeros(1, texts, dtype=torch.int64)
    packed.pieces = [Piece(order[i * each : (i + 1) * each], context - 1, context) for i in range(texts)]
    return lambda: model(new, cache=packed, last_only=True)


# %% tags=["nbval-ignore-output"]
def dense_step():
    """The same with a dense cache."""
    cache, new = kv.DenseCache(config, texts, context, **here), torch.zeros(texts, 1, dtype=torch.int64)
    cache.keys.fill_(0.01)
    cache.values.fill_(0.01)

    def step():
        cache.lengths = [context - 1] * texts
        return model(new, cache=cache, last_only=True)

    return step


# %% tags=["nbval-ignore-output"]
def in_turns(steps, rounds=7):
    """Median seconds of each step; they take turns, so that what disturbs one disturbs all."""
    seconds = {name: [] for name in steps}
    for _ in range(rounds + 1):  # the first round warms up
        for name, step in steps.items():
            watch = Stopwatch(model.device)
            step()
            seconds[name].append(watch.read())
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


by_way = in_turns({"dense": dense_step(), "gather": paged_step(16), "direct": paged_step(16, "direct")})
for name, seconds in by_way.items():
    print(f"{name:<8} {1e3 * seconds:6.1f} ms, {seconds / by_way['dense']:.2f} times")
note = f"{texts} texts of {context} tokens"
moved = kv.bytes_moved(config, 1, context - 1, texts, bits=8 * model.dtype.itemsize)
bound = 1 + 2 * moved.cache_read / moved.total  # what a copy costs: it is written, and read again
kv.results.measure("06.step_gather", by_way["gather"] / by_way["dense"], unit="times", bound=bound, note=note)
kv.results.measure("06.step_direct", by_way["direct"] / by_way["dense"], unit="times", note=note)
detour = min(by_way["gather"], by_way["direct"]) / by_way["dense"]

# %% [markdown]
# The bound counts bytes: a dense step reads the weights and the cache, and `gather` moves each key and value three
# times (it reads it, writes the copy, and reads the copy). So the detour costs little where the weights are most of
# what is read, and more with each token of context. That is why engines do not gather.

# %% [markdown]
# ## The books by hand
#
# Who keeps track of the blocks? A **free list** names those that nobody holds. And because one block may be in several
# tables (soon you will see why), each has a **reference count**: how many tables hold it. That is all there is. A block
# is free when its count is 0, and only then.
#
# ### Exercise: give_back
#
# ●●○ · 6 minutes
#
# A text has ended. `table` are its blocks, `refs[b]` is how many texts hold block b, `free` lists the free blocks.
# Return the new `(refs, free)`. You may change the lists you were given; the order of the free blocks does not matter.
#
# Why it matters: a block that is given back too early is written to by somebody else while it is still read. One that
# is never given back is gone until the server starts again. And one that is given back twice stopped vLLM with "Double
# free!" where texts shared blocks and outgrew a sliding window (notebook 05; vLLM's issue 1556).
#
# <details><summary>Hint 1</summary>First take 1 off the count of each block, then look at it.</details>
# <details><summary>Hint 2</summary>A block joins the free list when its count has become 0.</details>


# %% tags=["exercise"]
def give_back(table, refs, free):
    """The counts and the free blocks after the text with these blocks has ended."""
    # SOLUTION
    for block in table:
        refs[block] -= 1
        if refs[block] == 0:
            free.append(block)
    return refs, free
    # END SOLUTION


# %%
kv.check.give_back(give_back)

# %% [markdown]
# The package's `BlockPool` and `BlockTable` do the same, and refuse what would spoil the books. Books can be audited.
# We let chance do two thousand things to a pool and count everything again after each one:

# %%
chance, books, held = random.Random(0), BlockPool(num_blocks=40, block_size=4), []  # of each text: table and length
for _ in range(2000):
    action = chance.choice(["new", "grow", "grow", "fork", "end", "end"])
    if action == "new" or not held:
        held.append((BlockTable(books), 0))
    i = chance.randrange(len(held))
    table, length = held[i]
    if action == "grow" and table.shortage(length, length + 5) <= books.free_blocks:
        table.reserve(length, length + 5)
        held[i] = table, length + 5
    elif action == "fork":
        held.append((table.fork(length), length))  # a second text that begins with the same tokens
    elif action == "end":
        table.free()
        held.pop(i)
    counted = [sum(block in table.blocks for table, _ in held) for block in range(books.num_blocks)]
    assert books.refs == counted and books.free_blocks == counted.count(0)
    assert books.free_blocks + books.used_blocks == books.num_blocks
print("2,000 random operations, and the books were right after each;")
print(f"{len(held)} texts are left")

# %% [markdown]
# ## A live memory map
#
# Now the real thing. `kv.Engine` serves many texts with one model: it has a pool of pages, and in each step it decides
# which tokens run. How it decides comes later. First let us watch its memory. Five texts come at different times; after
# each step we take a snapshot of the books.


# %%
def watch(engine, arrivals):
    """Play a trace to an engine, one step a tick of the clock; return what became of it, plans and snapshots."""
    plans, film = [], []

    def look(clock):
        plans.append(engine.plan)
        film.append(snapshot(engine.scheduler))

    return replay(engine, arrivals, step_cost=linear_cost(1, 0), on_step=look), plans, film


# %%
trace = [(0, 40, 14), (0, 9, 30), (3, 21, 9), (6, 30, 25), (12, 50, 12)]  # comes at step, prompt, answer
arrivals = [Arrival(at, story[:prompt], answer) for at, prompt, answer in trace]
engine = kv.Engine(tiny.model, num_blocks=24, block_size=8, prefix_caching=False)
_, _, film = watch(engine, arrivals)
for step in (0, 8, 14, 20):
    shot = film[step]
    print(f"step {step:>2}: texts {list(shot.running)} hold {shot.used} blocks with {shot.filled} tokens")
busy = [shot for shot in film if shot.used]
print(f"over all steps {sum(s.filled for s in busy) / sum(8 * s.used for s in busy):.0%} of the slots taken are filled")


# %% tags=["nbval-ignore-output"]
def draw(step):
    """The pool after so many steps, and a sentence about it."""
    shot = film[step]
    title = f"After step {step}: {len(shot.running)} texts run, {shot.used} of {len(shot.blocks)} blocks are taken"
    figure = kv.plots.memory_map(shot, range(len(trace)), title=title)
    return figure, f"{title}; each text's blocks are where there was room, and only its last one is partly empty."


figure, alt = draw(14)
kv.plots.show(figure, alt=alt)

# %% [markdown]
# Move through time. Watch a text end, and whose blocks the next one gets.

# %% tags=["nbval-ignore-output"]
kv.widgets.explore(draw, step=(0, len(film) - 1, 1, 14))

# %% [markdown]
# ## Holes
#
# Pages have a second merit, and it is the older one. When texts come and go and each has one piece of memory, holes are
# left between them. There may be room enough for the next text in all, and nowhere in one piece. This is called
# *external fragmentation*. We let a simple server place texts in one piece of exactly the right size (it is an oracle,
# it knows the length of every answer) at the first place where they fit. `in_pieces` plays that server. Beside it, the
# same memory in pages. We look at both after each step, when those who have their last token have left.

# %%
memory_slots, queue = 512, mixed_lengths(60, seed=2, prompt=40, answer=24, longest=90)
pieces_map, refused = in_pieces(queue, memory_slots)
dry = DryEngine(memory_slots // 16, 16, prefix_caching=False, max_batch_tokens=memory_slots)
in_paged_memory, _, pages_film = watch(dry, [Arrival(0, [0] * p, n) for p, n in queue])
pages_map = in_pages(pages_film)
maps = {"in one piece": pieces_map, "in pages of 16": pages_map}
for name, addresses in maps.items():
    tokens, later, free = (100 * share for share in addresses.shares)
    print(f"{name:<15} {addresses.owner.shape[1]} steps; of 100 slots {tokens:.0f} hold a token,")
    print(f"{'':<15} {later:.0f} wait for one and {free:.0f} are free")
filled = {name: addresses.shares[0] for name, addresses in maps.items()}
extra = in_paged_memory.computed_tokens / sum(p + n - 1 for p, n in queue) - 1
print(f"in one piece, the next text waited in {len(refused)} steps")
print("    though there was room enough in all")
print("in pages, texts gave all their blocks back and started again")
print(f"    {in_paged_memory.preemptions} times: {extra:.0%} more tokens were computed")

# %% [markdown]
# `DryEngine` is the engine without the model: the same books and the same scheduler, and every token is a made-up one.
# What a schedule does depends on lengths, not on words.

# %%
kv.plots.show(
    kv.plots.address_maps(maps, {"in one piece": refused}),
    alt=f"In one piece, texts are bands with light, reserved parts and white holes between; in {len(refused)} steps "
    "(triangles) a text waited although there was room. In pages texts lie scattered in blocks, less is light or "
    f"white, and all are done after {pages_map.owner.shape[1]} steps.",
)

# %% [markdown]
# In one piece some slots wait for later tokens of their text, and others are free, many of them in holes. Pages end
# both kinds: a text has only what it needs now, and any free block is as good as any other, so a text waits only when
# there are not enough blocks. What remains is the empty part of each last block, *internal* fragmentation, below one
# block a text. In return some texts had to give their blocks back and start again; the section after the next says why.
#
# ## Three answers to one question
#
# Now why reference counts. Chat services show several answers to choose from, and programs draw many answers and take
# the most frequent one. All of them have the same prompt, so the same keys and values for it. In pages they can have
# them *once*: three tables name the same blocks.
#
# Until they write. The last block of the prompt is usually not full, and the answers go on in it, each with other
# tokens. So before one of them writes to a block that others hold as well, it takes a block of its own and copies. This
# is **copy on write**, and operating systems have done it for as long as they have had pages.
#
# ### Exercise: copy_on_write
#
# ●●○ · 6 minutes
#
# The tokens `start` to `stop - 1` of a text are going to be written. Return the list of those blocks of its `table`
# that must be copied before, in order. `refs[b]` is how many tables hold block b. The table may still lack the blocks
# for the last tokens; new blocks are taken for those later, and they need no copy.
#
# Why it matters: copy too little, and one reader's answer turns up in another's. Copy too much, and sharing saves
# nothing.
#
# <details><summary>Hint 1</summary>Which places of the table do these tokens fall into? Only those are written to.
# </details>
# <details><summary>Hint 2</summary><code>table[start // block_size : ...]</code>, to the block of token
# <code>stop - 1</code>; a slice may end behind the table.</details>


# %% tags=["exercise"]
def copy_on_write(table, refs, start, stop, block_size):
    """The blocks that must be copied before these tokens are written."""
    # SOLUTION
    written = table[start // block_size : (stop - 1) // block_size + 1]
    return [block for block in written if refs[block] > 1]
    # END SOLUTION


# %%
kv.check.copy_on_write(copy_on_write)

# %% [markdown]
# **Predict.** A prompt of 23 tokens, blocks of 4, three answers of 12 tokens each. How many blocks are copied in all?

# %%
my_guess = 3  # PREDICT
asked = "Three answers to a prompt of 23 tokens, blocks of 4: blocks copied?"
kv.results.predict("06.copies", my_guess, question=asked)

# %%
question, wanted, options = story[:23], 12, {"temperature": 0.8, "seed": 3}
engine = kv.Engine(tiny.model, num_blocks=24, block_size=4, prefix_caching=False)
samples = engine.submit_samples(question, 3, wanted, **options)
sampled_film, in_use = [], []
while engine.unfinished:
    engine.step()
    sampled_film.append(snapshot(engine.scheduler))
    in_use.append(engine.plan.used_blocks)  # while the step ran; after it, who has ended has left
kv.results.measure("06.copies", engine.stats.copied_blocks)
most, shared, each = max(in_use), len(question) // 4, books.blocks_for(len(question) + wanted - 1)  # blocks of 4, too
assert most == shared + 3 * (each - shared)
print(f"at most {most} blocks at once, {shared} shared and 3 x {each - shared} of their own; ", end="")
apart = 3 * each
print(f"three texts that share nothing would hold {apart}")

# %% [markdown]
# The first answer keeps the block; each of the others copies it before it writes. And do the three disturb each other?
# Each must be the answer that the same question and the same seed give alone. Answer i draws with seed 3 + i:

# %%
alone = [kv.generate(tiny.model, question, wanted, temperature=0.8, seed=3 + i).ids for i in range(3)]
undisturbed = [engine.results[id].ids for id in samples] == alone
print(f"each answer as if it were alone: {undisturbed}")
for ids in alone:
    print(f"  ...{tiny.decode(question[-5:])}|{tiny.decode(ids)}")

# %% [markdown]
# Here is the moment after the copies, with the five full blocks of the prompt held three times. Text 0 is one token
# ahead: the others share what it has computed, and read only the last token of the prompt once more, for scores of
# their own.

# %%
shot = next(shot for shot in sampled_film if len(shot.running) == 3)
kv.plots.show(
    kv.plots.memory_map(shot, samples, title=f"Three answers have begun; {shot.shared} blocks are shared"),
    alt=f"{shot.shared} striped blocks are held by three texts; then each text has a block of its own.",
)

# %% [markdown]
# ## When the pages run out
#
# Nothing is reserved, so an engine can promise more than it has: it lets texts in as long as there are blocks for what
# they have *now*. If they all grow, there comes a step in which one needs a block and none is free.
#
# Then somebody must go. The engine takes the text that came last, gives its blocks back, and lets it wait again
# (**preemption**). Its tokens are still known, only their keys and values are gone; when there is room, they are
# computed again, prompt and answer so far in one prefill. Three texts that cannot all fit:

# %%
arrivals = [Arrival(0, story[:22], 30), Arrival(0, story[4:20], 28), Arrival(2, story[9:24], 24)]
engine = kv.Engine(tiny.model, num_blocks=13, block_size=8, prefix_caching=False, max_batch_tokens=64)
played, plans, _ = watch(engine, arrivals)
solo = [kv.generate(tiny.model, a.prompt, a.max_new_tokens).ids for a in arrivals]
as_alone = [one.ids for one in played.served] == solo
needed = sum(len(a.prompt) + a.max_new_tokens - 1 for a in arrivals)
recomputed = played.computed_tokens / needed - 1
print(f"preemptions: {played.preemptions}; {played.computed_tokens} tokens computed where {needed} would have done")
print(f"every text has the tokens that it gets alone: {as_alone}")


# %%
def doing(played, plans):
    """For each text what it does in each step, for the picture."""
    did, reached = {}, {}
    for step, plan in enumerate(plans):
        for request, start, stop in plan.chunks:
            what = "decode" if start >= request.prompt_length else "prefill"
            what = "again" if start < reached.get(request.id, 0) else what
            did.setdefault(request.id, {})[step] = what
            reached[request.id] = max(stop, reached.get(request.id, 0))
    spans = {}
    for id, steps in sorted(did.items()):
        came = round(played.came[id])
        spans[f"text {id}"] = [(steps.get(step, "wait"), step, step + 1) for step in range(came, max(steps) + 1)]
    return spans


kv.plots.show(
    kv.plots.who_runs({"13 blocks of 8 for three texts": doing(played, plans)}),
    alt="The text that came last loses its pages, waits, is computed again in one step and goes on to its end.",
)

# %% [markdown]
# Nobody's answer changed; somebody waited, and work was done twice. Two things are unlike the pages of an operating
# system here. That one moves a page to disk and goes on, as long as nobody touches it. In attention every step touches
# *every* page of a text, so half a text is of no use: all its pages go, or none. And a page that was given up need not
# be saved anywhere, because it can be computed again. (The vLLM paper calls the first all-or-nothing eviction and
# compares the second with swapping to the memory of the CPU, section 4.5.)
#
# A text in the engine must also never wait for ever. As long as others run, the earliest one is never the one that has
# to go, so it ends; then another one is the earliest. And a text that would not fit into the empty pool is refused at
# once:

# %%
try:
    engine.submit(story[:60], 60)
except ValueError as error:
    print(error)

# %% [markdown]
# ## More texts in the same memory
#
# What was the gain? Reserving is a special case of pages: pages as large as the longest text, of which each text takes
# one. So the same engine can play both. The pool has 4,096 slots, once in 8 pages of 512, once in 256 pages of 16. A
# hundred and fifty requests wait at its door:

# %%
crowd = mixed_lengths(150, seed=0, prompt=48, answer=32, longest=256)
per_prompt, per_answer = (statistics.mean(numbers) for numbers in zip(*crowd, strict=True))
print(f"on average a prompt of {per_prompt:.0f} tokens and an answer of {per_answer:.0f}")

# %% [markdown]
# **Predict.** How many times as many texts run at once, at most?

# %%
my_guess = 3  # PREDICT
asked = "The same memory in pages of 16 instead of whole texts: how many times as many run at once?"
kv.results.predict("06.texts_at_once", my_guess, unit="times", question=asked)

# %%
cuts = {"reserved: 8 pages of 512": (8, 512), "256 pages of 16": (256, 16)}
running = {}
for name, (num_blocks, block_size) in cuts.items():
    dry = DryEngine(num_blocks, block_size, prefix_caching=False)
    played, _, shots = watch(dry, [Arrival(0, [0] * p, n) for p, n in crowd])
    running[name] = [len(shot.running) for shot in shots]
    print(f"{name:<25} {max(running[name]):>3} at once, {len(shots):>3} steps, {played.preemptions} preemptions")
few, many = (max(numbers) for numbers in running.values())
kv.results.measure("06.texts_at_once", many / few, unit="times")

# %%
kv.plots.show(
    kv.plots.running_texts(running),
    alt=f"With whole texts reserved 8 run at once for a long time; in pages of 16 up to {many}, and all are done in "
    f"{len(running['256 pages of 16'])} steps instead of {len(running['reserved: 8 pages of 512'])}.",
)

# %% [markdown]
# The line of the pages starts low and climbs: a step takes a limited number of tokens (512 here), so not all can enter
# in the first. And the gain has a price, printed above: some texts were let in, did not fit when all had grown, and had
# to be computed again.
#
# ## Static and continuous batching
#
# Texts come and go in every step here. It was not always so. A plain loop over `kv.generate` takes a batch of texts,
# runs until the longest answer is done, and takes the next batch: **static batching**. Who is done early keeps an empty
# place; who comes late waits for the whole batch. Deciding anew in each step was the idea of Orca (OSDI 2022) and is
# called **continuous batching**. Twelve texts, four places:


# %%
def static_chart(lengths, places):
    """What each text does in each step when batches are filled once."""
    spans, start = {}, 0
    for i in range(0, len(lengths), places):
        batch = [n for _, n in lengths[i : i + places]]
        end = start + max(batch)
        for j, n in enumerate(batch, i):
            did = ["wait"] * start + ["prefill"] + ["decode"] * (n - 1) + ["idle"] * (end - start - n)
            spans[f"text {j}"] = [(what, step, step + 1) for step, what in enumerate(did)]
        start = end
    return spans


twelve = mixed_lengths(12, seed=3, prompt=24, answer=8, longest=40)
dry = DryEngine(64, 16, prefix_caching=False, max_running=4)
played, plans, _ = watch(dry, [Arrival(0, [0] * p, n) for p, n in twelve])
charts = {"static": static_chart(twelve, 4), "continuous": doing(played, plans)}
ends = {name: max(spans[-1][2] for spans in chart.values()) for name, chart in charts.items()}
print(f"steps until all are done: {ends}")

# %%
kv.plots.show(
    kv.plots.who_runs(charts),
    alt=f"Static: short answers leave empty places until the longest of their batch is done, {ends['static']} steps in "
    f"all. Continuous: the next text takes a place at once, {ends['continuous']} steps.",
)

# %% [markdown]
# Steps are not seconds: a step in which a prompt is read takes longer than one in which four tokens are made. So now by
# the clock, with the larger model. Twenty requests wait; both ways have eight places.
#
# **Predict.** How many times as many tokens a second does continuous batching make?

# %%
my_guess = 1.5  # PREDICT
asked = "Twenty requests, eight places: tokens a second, continuous against static?"
kv.results.predict("06.continuous_speed", my_guess, unit="times", question=asked)

# %% tags=["nbval-ignore-output"]
kv.warm_up(model)


def at_once(lengths):
    """Requests of these lengths, with random tokens, that are all there at the start."""
    drawn = poisson(1, len(lengths), lengths=lengths, vocab_size=config.vocab_size)
    return [Arrival(0, arrival.prompt, arrival.max_new_tokens) for arrival in drawn]


rush = at_once(mixed_lengths(20, seed=3, prompt=24, answer=10, longest=24))
by_clock = {"static, 8 places": replay_static(model, rush, 8)}
for name, places in (("continuous, 8 places", 8), ("continuous, 20 places", 20)):
    by_clock[name] = replay(kv.Engine(model, 128, 16, prefix_caching=False, max_running=places), rush)
for name, played in by_clock.items():
    print(f"{name:<22} {played.output_tokens} tokens in {played.seconds:4.1f} s, {played.throughput:6.1f} a second")
speed = {name: played.throughput for name, played in by_clock.items()}
gain = speed["continuous, 8 places"] / speed["static, 8 places"]
in_steps = [len(by_clock[name].ticks) for name in ("static, 8 places", "continuous, 8 places")]
kv.results.measure("06.continuous_speed", gain, unit="times", bound=in_steps[0] / in_steps[1], note="bound: by steps")

# %% [markdown]
# The bound is the ratio of the numbers of steps. Time gains less: a step in which more places are taken, or in which a
# prompt is read, takes longer. The line with 20 places is what pages are for: the same memory has room for more texts,
# and more texts share each pass through the weights.
#
# ## Under load
#
# People do not wait in front of the door until all have come. They come at random, whether the server keeps up or not
# (an *open loop*), and each looks at two things: how long until the first token, and how long between tokens. An
# average hides those who wait longest, so servers are judged by percentiles: p50 is what half of them do not exceed,
# p95 what 95% do not exceed. To see how these depend on the load we would have to run the model for many minutes. There
# is a shortcut that engineers of servers use: measure what a step costs, by what it computes, and let the *real*
# scheduler play with these times.
#
# Every step reads all weights, whatever it does. Then each text that gets a token costs something, and each token of a
# prompt. Three numbers, from three measurements of the engine: steps for one text, for sixteen, and one for a prompt of
# 64 tokens.


# %% tags=["nbval-ignore-output"]
def seconds_of_a_step(lengths):
    """Median seconds of the steps that the engine takes for requests of these lengths, without the first if it can."""
    played = [replay(kv.Engine(model, 128, 16, prefix_caching=False), at_once(lengths)) for _ in range(3)]
    return statistics.median(tick.seconds for one in played for tick in one.ticks[1:] or one.ticks)


one, sixteen = seconds_of_a_step([(8, 6)]), seconds_of_a_step([(8, 6)] * 16)
prompt_tokens = 64
prompt = seconds_of_a_step([(prompt_tokens, 1)])
per_text = max(0, sixteen - one) / 15  # a difference that noise makes negative counts as none
per_step = max(0, one - per_text)
per_prompt_token = max(0, prompt - per_step) / prompt_tokens
said = f"{1e3 * per_text:.2f} ms for each text that gets a token"
print(f"a step: {1e3 * per_step:.1f} ms, {said}, {1e3 * per_prompt_token:.2f} ms for each token of a prompt")


# %% tags=["nbval-ignore-output"]
def step_cost(plan):
    """Seconds of a step on this machine, from what it computes."""
    tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
    made = sum(chunk.start >= chunk.request.prompt_length for chunk in plan.chunks)
    return per_step + per_text * made + per_prompt_token * (tokens - made)


# %% [markdown]
# Before we believe it, it has to foretell what we have measured by the clock. It may come out some tenths too fast: a
# step in which prompts are read beside texts that decode does both one after the other, and short pieces use the
# machine less well than the prompt of 64 tokens did. That is good enough to compare servers that differ by more; do not
# read single milliseconds from what follows.

# %% tags=["nbval-ignore-output"]
foretold = {"static, 8 places": replay_static(None, rush, 8, step_cost=step_cost)}
for name, places in (("continuous, 8 places", 8), ("continuous, 20 places", 20)):
    foretold[name] = replay(DryEngine(128, 16, prefix_caching=False, max_running=places), rush, step_cost)
for name, played in foretold.items():
    print(f"{name:<22} foretold {played.throughput:6.1f} tokens a second, measured {speed[name]:6.1f}: ", end="")
    print(f"{played.throughput / speed[name]:.2f} times")

# %% [markdown]
# Now the crowd of above comes at random (Poisson arrivals: the gaps are exponential, as of people who know nothing of
# each other). 150 random gaps are not exactly as long as they are on average, so we stretch them until the rate is the
# one asked for:


# %%
drawn = poisson(1, len(crowd), lengths=crowd)


def at_rate(rate):
    """The crowd, coming at random, `rate` a second."""
    stretch = len(crowd) / rate / drawn[-1].at
    return [replace(arrival, at=stretch * arrival.at) for arrival in drawn]


# %% [markdown]
# Three servers with the same memory of 4,096 slots: static batches of 8; continuous, with whole texts reserved;
# continuous, in pages of 16. First all come at once, which shows what each can do at most; then at six rates, up to
# more than the best can do.

# %% tags=["nbval-ignore-output"]
servers = {
    "static, 8 reserved": lambda arrivals: replay_static(None, arrivals, 8, step_cost=step_cost),
    "continuous, 8 reserved": lambda arrivals: replay(DryEngine(8, 512, prefix_caching=False), arrivals, step_cost),
    "continuous, pages": lambda arrivals: replay(DryEngine(256, 16, prefix_caching=False), arrivals, step_cost),
}
in_a_rush = {name: serve(at_once(crowd)) for name, serve in servers.items()}
capacity = {name: played.throughput / per_answer for name, played in in_a_rush.items()}
rates = [share * capacity["continuous, pages"] for share in (0.1, 0.3, 0.5, 0.7, 1, 1.6)]
loads = {name: [serve(at_rate(rate)) for rate in rates] for name, serve in servers.items()}
for name, rate in capacity.items():
    print(f"{name:<23} keeps up to {rate:.2f} requests a second")

# %% tags=["nbval-ignore-output"]
curves = {
    name: {
        "throughput": [played.throughput for played in row],
        "ttft": {p: [played.ttft_percentile(p) for played in row] for p in (50, 95)},
        "itl": {p: [played.itl_percentile(p) for played in row] for p in (50, 95)},
    }
    for name, row in loads.items()
}
kv.results.measure("06.load_gain", capacity["continuous, pages"] / capacity["static, 8 reserved"], unit="times")
at = 2
waits = {name: played[at].ttft_percentile(95) for name, played in loads.items()}
said = ", ".join(f"{seconds:.2f} s ({name})" for name, seconds in waits.items())
kv.plots.show(
    kv.plots.load_curves(rates, curves, [rate * per_answer for rate in rates]),
    alt=f"At {rates[at]:.2f} requests a second 95% have their first token within {said}. Each server follows what is "
    "asked for until it is full; from there on its queue grows, and with it the time to the first token.",
)

# %% [markdown]
# Three things to read off.
#
# - *Left:* each server makes what it is asked for until it is full (a little less, as the clock runs until the last
#   answer is done). What differs is where that is.
# - *Middle:* where only 8 texts have a place, the wait for the first token rises near that point, and beyond it the
#   queue grows as long as people keep coming: the time to first token is time spent in a queue. With pages nearly all
#   are let in at once, so the wait stays short until more is asked for than they can do.
# - *Right:* they pay here. The more texts share a step, and the more prompts are read in it, the longer everybody waits
#   for the next token. That is the price of throughput, and why a server that promises a speed must turn people away.
#   In a static batch no prompt comes between two tokens, so p50 and p95 lie on each other once all batches are full;
#   and on the p50 of the other server with 8 places, where most steps read no prompt either.
#
# ## A long prompt comes in
#
# There is one thing that disturbs readers more than company. Somebody sends a long prompt. If it is read in one step,
# that step takes long, and everybody else's next token comes when it is over. The engine therefore gives each step a
# **budget** of tokens. Those who decode come first, with one token each; what is left goes to prompts, in pieces. This
# is **chunked prefill** (Sarathi, arXiv 2308.16369; in a server, Sarathi-Serve, arXiv 2403.02310).
#
# ### Exercise: share_budget
#
# ●●● · 8 minutes
#
# Write how many tokens of each running text are computed in a step of at most `budget` tokens. `left` says how many
# each has left to compute, in order of arrival: 1 for a text that decodes, more for one whose prompt is being read.
# Those that decode come first, then the prompts in order of arrival, each as far as the budget goes. Return a list of
# the same length.
#
# Why it matters: this is the heart of a scheduler. Everything that a reader feels is decided here.
#
# <details><summary>Hint 1</summary>Start with a list of zeros. Go through the texts twice: first those with 1 left,
# then the others.</details>
# <details><summary>Hint 2</summary>Each takes <code>min(left[i], budget)</code>, and what it took is gone from the
# budget.</details>


# %% tags=["exercise"]
def share_budget(left, budget):
    """How many tokens of each text run in this step."""
    # SOLUTION
    taken = [0] * len(left)
    for decodes in (True, False):
        for i, wanted in enumerate(left):
            if (wanted == 1) == decodes:
                taken[i] = min(wanted, budget)
                budget -= taken[i]
    return taken
    # END SOLUTION


# %%
kv.check.share_budget(share_budget)

# %% [markdown]
# Four people are reading when a prompt of 512 tokens comes in (half of your model's context, if that is less). We run
# it with three budgets. In the largest the whole prompt fits.
#
# **Predict.** The longest gap that a reader sees: how many times as long is it with the largest budget as with the
# smallest, 32? The three measured costs are enough to work it out.

# %%
my_guess = 5  # PREDICT
asked = "Longest gap of a reader: prompt read in one step, against steps of 32 tokens?"
kv.results.predict("06.longest_gap", my_guess, unit="times", question=asked)

# %% tags=["nbval-ignore-output"]
long_prompt = min(512, config.max_seq_len // 2)
budgets = [32, 128, 2 * long_prompt]
readers = at_once([(8, 32)] * 4)
visitor = Arrival(8 * (per_step + 4 * per_text), at_once([(long_prompt, 1)])[0].prompt, 2)
gaps, ttft = {}, {}
for budget in tqdm(budgets, leave=False):
    engine = kv.Engine(model, 64, 16, prefix_caching=False, max_batch_tokens=budget)
    played = replay(engine, [*readers, visitor])
    when, seconds = [], []
    for came, reader in zip(played.came[:-1], played.served[:-1], strict=True):
        when += [came + moment - visitor.at for moment in reader.arrivals[1:]]
        seconds += reader.itl
    gaps[budget], ttft[budget] = (when, seconds), played.served[-1].ttft
longest_gap = {  # of those that ended after the long prompt had come
    budget: max(gap for t, gap in zip(*of_readers, strict=True) if t >= 0) for budget, of_readers in gaps.items()
}

# %% tags=["nbval-ignore-output"]
for budget in budgets:
    print(f"at most {budget:>5,} tokens a step: longest gap {1e3 * longest_gap[budget]:5.0f} ms, ", end="")
    print(f"first token of the long prompt after {1e3 * ttft[budget]:5.0f} ms")
kv.results.measure("06.longest_gap", longest_gap[budgets[-1]] / longest_gap[32], unit="times")
late = ttft[32] / ttft[budgets[-1]]
kv.results.measure("06.late_first_token", late, unit="times", note="steps of 32 against one step")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.chunked_prefill(gaps, ttft),
    alt=f"With the prompt in one step the readers see a gap of {1e3 * longest_gap[budgets[-1]]:.0f} ms; in steps of 32 "
    f"tokens the longest is {1e3 * longest_gap[32]:.0f} ms, and the long prompt's first token comes {late:.1f} times "
    "as late.",
)

# %% [markdown]
# So the budget moves waiting from one person to another. A small one keeps the gaps of the readers short, and the long
# prompt pays: it is read in many pieces, each shares its step with the readers, and small pieces use the machine less
# well (notebook 03). There is no right value, only a promise to be kept: choose the largest budget whose steps are as
# short as the gap that you have promised.
#
# ## How large is a page?
#
# The last number. A small page wastes little: half a page for each text. A large one needs a shorter table, and less
# looking up for a kernel that reads whole pages. The two ends: a page of one token wastes nothing, and a page as large
# as the longest text is reserving, as you have seen.

# %% tags=["nbval-ignore-output"]
page_sizes = [1, 4, 16, 64, 256]
empty = [1 - shares(lambda p, n, held, size=size: -(-held // size) * size)[0] for size in page_sizes]
steps = {(way, size): paged_step(size, way) for way in ("gather", "direct") for size in page_sizes}
by_size = in_turns(steps | {"dense": dense_step()}, rounds=3)
for size, share in zip(page_sizes, empty, strict=True):
    print(f"{size:>4} tokens: {share:5.1%} of the slots taken are empty, a step takes ", end="")
    print(", ".join(f"{1e3 * by_size[way, size]:5.1f} ms ({way})" for way in ("gather", "direct")))
lines = {way: [by_size[way, size] for size in page_sizes] for way in ("gather", "direct")}
lines["dense"] = [by_size["dense"]] * len(page_sizes)

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.page_sizes(page_sizes, empty, lines),
    alt=f"From pages of 1 to pages of 256 tokens the empty slots grow from {empty[0]:.0%} to {empty[-1]:.0%}; a step "
    f"takes {1e3 * min(lines['gather']):.0f} to {1e3 * max(lines['gather']):.0f} ms (gather).",
)

# %% [markdown]
# On the left the empty slots grow with the page: half of one for each text. On the right, look at your own curves: is
# there a size from which on larger pages save no time? The page to choose is about that one, for beyond it a larger
# page only wastes more. Sixteen is the default of the vLLM paper (section 7.2), found in this way on a GPU. There is a
# third thing that speaks for small pages: only whole pages can be shared with a text that comes later. That is the
# matter of the next notebook.
#
# ## Summary

# %% tags=["nbval-ignore-output"]
kv.results.summary("06")

# %% [markdown]
# Your guesses beside what was measured: within the band they were at most a factor of two off. The farther from 1, the
# more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("06")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# Statement **19** can be judged now: "paged attention treats the cache as pages of virtual memory". The code works it
# out from what was measured above.
#
# - It is wrong as said unless pages did here what pages of virtual memory do: texts scattered over the pool got the
#   tokens that they get in one piece of memory; more of the memory held tokens than where the longest text is reserved,
#   and more than where texts got exactly the right size in one piece, holes and all; what was shared was stored once,
#   copied when written to, and disturbed nobody; a text that had lost its pages went on as if nothing had been.
# - It holds with a condition if one of these is so, for then the likeness ends there: a step through the table took
#   more than 1.05 times as long as one without (virtual memory is looked up by the processor, and costs a program
#   nothing that it notices); or a text that lost its pages had to be computed again (there, every page goes and comes
#   by itself; the second is so by the way this engine is built).
# - Else it holds.

# %% tags=["nbval-ignore-output"]
likeness = [
    same_tokens,
    undisturbed,
    as_alone,
    useful > by_hand[0],
    filled["in pages of 16"] > filled["in one piece"],
    most < apart,
]
conditions = [f"a step through the table took {detour:.2f} times as long as one without"] * (detour > 1.05)
again = f"a text that lost its pages had to be computed again, {recomputed:.0%} more tokens in all"
conditions += [again] * (recomputed > 0)
kv.results.verdict(
    19,
    "wrong as said" if not all(likeness) else "holds with a condition" if conditions else "holds",
    f"In pages {useful:.0%} of the memory taken held tokens, where the longest text is reserved {by_hand[0]:.0%}; "
    f"{many / few:.1f} times as many texts ran in the same memory; scattered, sharing and preempted texts got the "
    "tokens that they get alone." + f" But {' and '.join(conditions)}." * bool(conditions),
)

# %% [markdown]
# **What to remember**
#
# 1. Nobody knows how long an answer gets, so reserving wastes most of the memory. Pages are taken as a text grows; what
#    is lost is half a page for each text.
# 2. Paged attention is the same attention, with an index before it. The books are a table for each text, a count for
#    each block and a list of free ones.
# 3. Texts with the same beginning hold the same blocks. Who writes to one that others hold copies it first.
# 4. When pages run out, one text loses all of its own, and is computed again. Its answer does not change.
# 5. Decide anew in every step who runs. Throughput rises with the texts that run together; waiting rises with the load,
#    and without end where more is asked for than can be done.
# 6. The token budget of a step trades the gaps of those who read against the first token of those who come.
#
# ## What the field does today
#
# - PagedAttention and vLLM (arXiv 2309.06180, SOSP 2023) brought pages, sharing with copy on write and preemption, and
#   reported 2 to 4 times the throughput of the servers before at the same latency. Iteration-level scheduling is from
#   Orca (Yu et al., OSDI 2022).
# - vLLM today preempts by computing again, as here; its documentation ("Optimization and Tuning") describes chunked
#   prefill with decodes first and the setting `max_num_batched_tokens`, our budget. NVIDIA's TensorRT-LLM calls
#   continuous batching "in-flight batching"; its cache is a pool of blocks, too.
# - Sarathi-Serve (arXiv 2403.02310) brought chunked prefill to a server and measured what it does to the gaps.
# - vAttention (arXiv 2405.04437) asks why not let the GPU's own virtual memory do it: memory is reserved in one piece
#   of *addresses*, and pages are put behind them as the text grows, so any kernel works unchanged.
# - The copies that a plain cache makes for several answers (Hugging Face Transformers repeats the prompt for each of
#   `num_return_sequences`) are what sharing saves.
#
# **Next** in the course comes 07: texts that come later find the pages of those before them.

# %% tags=["nbval-ignore-output"]
kv.check.progress("06")
