# %% [markdown]
# # 7. Prefix caching and the bill of a chat
#
# **Time:** about 75 minutes · **Device:** any (CPU is enough)
#
# **You will be able to**
#
# - say how much of a chat is read again and again, and measure what it saves to keep it: tokens, waiting time, money;
# - write the chained hash by which an engine knows its pages, and say what else its key must carry;
# - tell beforehand how many tokens of a prompt will be found, and write prompts that are found;
# - read from a pool of blocks what goes when memory is short, and say when a cache that is nearly large enough is
#   useless;
# - make up the bill of a chat, and say which part of it grows with the square of its turns.
#
# {{colab_badge}}

# %% tags=["setup"]
# SETUP

# %% tags=["nbval-ignore-output"]
import random
import statistics
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from kvcourse.serving import prefix
from kvcourse.serving.bill import PRICES, chat_tokens, invoice, measured_rates, usage
from kvcourse.serving.blocks import BlockPool, BlockTable
from kvcourse.serving.engine import Engine
from kvcourse.serving.prefix import Identity, PrefixIndex, chain
from kvcourse.serving.replay import replay
from kvcourse.serving.workload import agent_branches, chat

checkpoint = "smollm2-135m"  # or your own, with a context of 512 tokens or more
lm = kv.load_model(checkpoint)
model, config = lm.model, lm.config
tiny = kv.load_model("tiny-gqa", dtype=torch.float64)  # in float64, equal means equal
where = {"dtype": torch.float64, "device": tiny.model.device}
print(f"{lm.name} on {model.device} in {model.dtype}; tiny-gqa in float64")

# %% [markdown]
# ## A chat is read again and again
#
# A model remembers nothing from one request to the next. All it knows of a conversation is what stands in the prompt.
# So at each turn a chat program sends everything: the instructions (the *system prompt*), all questions and answers so
# far, and the new question at the end. Here is the assistant of a small library.

# %%
rules = [
    "You are the assistant of the public library of a small harbor town.",
    "Answer in one or two short sentences, friendly and plain.",
    "The library is open from nine to six, on Saturdays until noon, and closed on Sundays.",
    "A card is free for all who live in the town, and five dollars a year for visitors.",
    "Books may be kept for three weeks and films for one. Each can be renewed twice, unless somebody waits for it.",
    "There is no fine for what comes back late, but nothing new can be taken until it is back.",
    "Books for children are on the ground floor, novels on the first, science and maps on the second.",
    "The reading room under the roof looks over the harbor. It has twelve places, which must be booked.",
    "Old newspapers of the town can be read on film in the cellar, on weekdays.",
    "If you do not know something, say so, and name the desk that may know it: the ground floor, or the archive.",
    "Never tell who has borrowed a book.",
]
questions = [
    "When are you open on Saturday?",
    "How long may I keep a novel?",
    "And if somebody is waiting for it?",
    "Where do I find maps of the coast?",
    "May I read them there all afternoon?",
]

# %% [markdown]
# A chat model wants its own marks around each message; its template puts them in. After the first turn only the marks
# and the new question are added to what is there: the answer is not cut into tokens anew, but taken as the model made
# it. (A program that sends *text* has it cut again, and now and then the same letters give other tokens. Keep that in
# mind for later.)

# %%
if not lm.tokenizer.chat_template:  # the model that stands in has a short context: fewer rules
    while len(lm.encode(" ".join(rules))) > config.max_seq_len // 3:
        rules.pop()


def first_prompt(question):
    """Ids of the rules and the first question, up to where the answer begins."""
    if not lm.tokenizer.chat_template:
        return lm.encode(" ".join([*rules, question]))
    return lm.chat([{"role": "system", "content": " ".join(rules)}, {"role": "user", "content": question}])


def next_turn(question):
    """Ids that end an answer and bring the next question."""
    if not lm.tokenizer.chat_template:
        return lm.encode(question)[1:]  # not the token that begins a text
    asked = [{"role": "user", "content": "?"}]
    more = [*asked, {"role": "assistant", "content": ""}, {"role": "user", "content": question}]
    return lm.chat(more)[len(lm.chat(asked)) :]


# %% [markdown]
# The engine of notebook 06 serves the chat. For now it throws away all pages when an answer ends.

# %% tags=["nbval-ignore-output"]
reply = 8  # tokens of each answer: short, so that this notebook does not take long


def talk(engine):
    """Ask all questions, one after the other, in one conversation; what was served at each turn."""
    text, turns = [], []
    for question in questions:
        text = text + next_turn(question) if text else first_prompt(question)
        number = engine.submit(text, reply)
        turns.append(engine.run()[number])
        text = text + turns[-1].ids
    return turns


plain = talk(Engine(model, num_blocks=64, prefix_caching=False))
for question, answer in zip(questions, plain, strict=True):
    print(f"{answer.prompt_length:>4} tokens of prompt: ... {question}")
print(f"The first answer, cut short: {lm.decode(plain[0].ids).strip()}")

# %% [markdown]
# **Predict.** Of all tokens of prompt that were sent in these five turns: how many percent had been sent, or made, in
# an earlier turn?

# %%
my_guess = 50  # PREDICT
asked = "Tokens of prompt that had been sent or made in an earlier turn?"
kv.results.predict("07.seen_before", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
sent = [answer.prompt_length for answer in plain]
earlier = [0] + [answer.prompt_length + reply for answer in plain[:-1]]
kv.results.measure("07.seen_before", 100 * sum(earlier) / sum(sent), unit="%", note=f"{sum(sent):,} tokens sent")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.chat_prompts(earlier, np.subtract(sent, earlier)),
    alt=f"The prompts grow from {sent[0]} to {sent[-1]} tokens; all but a few of each are those of the turn before.",
)

# %% [markdown]
# All this is computed again at each turn, though it gives the same keys and values each time. The pages were there. All
# that is missing is a way to find them.
#
# ## The same tokens are not the same pages
#
# First a trap. Suppose a block of 16 tokens was computed before, and the same 16 tokens come again. May its keys and
# values be used? Here the same sentence stands behind two beginnings of the same length. We compare its values, layer
# by layer.

# %%
sentence = tiny.encode("Mia put the red kite in the shed.")[1:]
beginnings = [tiny.encode(text)[:8] for text in ("Leo had four apples and a ball.", "Ann went to the shop at noon.")]


def values_at_the_end(ids, n):
    """Values of the last `n` tokens in all layers, (layers, KV heads, n, d_head)."""
    cache = kv.DenseCache(tiny.config, max_len=len(ids), **where)
    tiny.model(torch.tensor([ids]), cache=cache)
    return cache.values[:, 0, :, -n:]


one, other = (values_at_the_end(beginning + sentence, len(sentence)) for beginning in beginnings)
for layer in range(tiny.config.n_layers):
    same = torch.allclose(one[layer], other[layer], atol=1e-9)
    print(f"layer {layer + 1}: the same values for the same sentence: {same}")

# %% [markdown]
# In the first layer a token knows only itself (and its place in the text, by which its key is turned). From the second
# layer on it carries what it has seen. So keys and values belong to a token **and everything before it**. A block can
# be used again just when the whole text up to its end is the same.
#
# One could compare whole beginnings, but a prompt of a hundred blocks would be compared from the start a hundred times.
# The trick is a **chain** of hashes. A *hash* turns any data into a short number: always the same for the same data,
# and practically never the same for other data. The *key* of a block, by which it is looked up, is a hash of its own
# tokens *and of the key of the block before it*. That one has the block before in it, and so on. One short key then
# stands for the whole beginning. (Such a key has nothing to do with the keys of attention.)
#
# ### Exercise: block_keys
#
# ●●○ · 8 minutes
#
# Write the keys of a text: a list with one key for each **full** block of `block_size` tokens. Two blocks must have the
# same key just when the texts up to their ends are the same. What a key is, is up to you; Python's `hash` of a tuple of
# numbers will do here.
#
# Why it matters: this is the heart of automatic prefix caching. With the parent left out of the key, an engine answers
# from somebody else's text, and no error tells anybody.
#
# <details><summary>Hint 1</summary>Keep a <code>parent</code>, which is 0 at the start. In a loop over the full blocks,
# <code>hash((parent, tuple(block)))</code> is the next key, and the parent of the one after.</details>
# <details><summary>Hint 2</summary><code>range(block_size, len(tokens) + 1, block_size)</code> gives the ends of the
# full blocks.</details>


# %% tags=["exercise"]
def block_keys(tokens, block_size):
    """One key for each full block; equal just where all tokens up to its end are equal."""
    # SOLUTION
    keys, parent = [], 0
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash((parent, tuple(tokens[end - block_size : end])))
        keys.append(parent)
    return keys
    # END SOLUTION


# %%
kv.check.block_keys(block_keys)

# %% [markdown]
# The package's `chain` makes one link. Watch a change travel: in the second line one token of the second block is
# another.


# %%
def chained(tokens, block_size):
    """Keys of the full blocks, by the package's `chain`."""
    key, keys = b"", []
    for i in range(len(tokens) // block_size):
        key = chain(key, tokens[i * block_size : (i + 1) * block_size])
        keys.append(key)
    return keys


numbers = list(range(16))
for tokens in (numbers, [*numbers[:6], 99, *numbers[7:]]):
    print("  ".join(key.hex()[:8] for key in chained(tokens, 4)))

# %% [markdown]
# Two texts of different tokens could, in principle, get the same hash, and then one would be answered from the other's
# pages. With a simple hash somebody can even arrange it. So the package does not trust the hash: it finds a block by
# it, and then compares tokens and parent. We try the worst, a "hash" that is always the same.

# %%
a, b = list(range(12)), [50, 51, 52, 53, *range(4, 12)]


def new_index(num_blocks, block_size):
    """An empty pool, and an index of what its blocks hold."""
    return PrefixIndex(BlockPool(num_blocks, block_size), Identity("an example", "float32"))


def serve(index, tokens):
    """What an engine does with a prompt, all but the arithmetic; returns how many tokens were found."""
    pool = index.pool
    table = BlockTable(pool, index.match(tokens))  # blocks that are known already
    found = len(table.blocks) * pool.block_size
    table.reserve(found, len(tokens))  # blocks for the rest
    index.publish(tokens, table.blocks, found, len(tokens))  # the rest was computed: from now on it can be found
    table.free()  # the text has ended
    return found


with mock.patch.object(prefix, "chain", lambda parent, tokens: b"always the same"):
    index = new_index(num_blocks=16, block_size=4)
    print("first a, then b, then a again, where all hashes are equal:", [serve(index, text) for text in (a, b, a)])
index = new_index(num_blocks=16, block_size=4)
print("with the real hash:", [serve(index, text) for text in (a, b, a)])

# %% [markdown]
# With colliding hashes some blocks are not found any more. None is ever found wrongly.
#
# The first link of the chain is not empty, either. Keys and values also depend on the model, on the numbers they are
# kept in, on the window, on quantization. An index carries all that as its `Identity`, hashed before the first token.
#
# `serve` above is worth a second look: match, reserve, publish, free. That is all there is to prefix caching, and the
# order matters. A block is **published only after** it was computed. Let two requests with the same prompt come in the
# same step:

# %%
engine, prompt = Engine(tiny.model, num_blocks=32, block_size=4), (beginnings[0] + sentence)[:14]
together = [engine.submit(prompt, 2) for _ in range(2)]
served = engine.run()
print("found by two that come together:", [served[number].cached_tokens for number in together])
later = engine.submit(prompt, 2)
served |= engine.run()
print("found by one that comes later:  ", served[later].cached_tokens)
print("all three get the same answer:  ", len({tuple(answer.ids) for answer in served.values()}) == 1)

# %% [markdown]
# An engine that publishes at once lets the second request read pages in which nothing stands yet (reported for
# nano-vllm, issue 208: wrong counts, and at worst a crash). Ours computes the prompt twice. It wastes some work, once,
# and is right.
#
# ## Only full blocks, and never all of it
#
# The prompt above has 14 tokens, and 12 were found: the last block is not full. Three reasons speak for full blocks
# only:
#
# - A block that is not full is still being written to, by its owner. Sharing it means copying it at the next token.
# - With each token its key would be another one; a full block's key is final.
# - It saves little: at most `block_size` - 1 tokens, once for each request.
#
# And there is a second rule. Let the same prompt come twice, for several lengths, in blocks of 4:

# %%
for length in (3, 4, 5, 7, 8, 9, 12, 13):
    index = new_index(num_blocks=16, block_size=4)
    serve(index, numbers[:length])
    found = serve(index, numbers[:length])
    print(f"{length:>2} tokens: the second time {found:>2} are found, {length - found} computed")

# %% [markdown]
# Of 8 tokens only 4 are found, although both blocks are known. If all were found there would be nothing to run through
# the model. But the next token is chosen from the *scores* after the last one, and scores are not kept, only keys and
# values. So at least one token is always left to compute; and as blocks are used whole, all of its block. (nano-vllm
# crashed on this, pull request 199; vLLM for a while computed only the last token, and lost the block for later
# prompts, pull request 11186.)
#
# ### Exercise: found_tokens
#
# ●●○ · 6 minutes
#
# `computed` is a list of tokens whose keys and values lie in blocks, `prompt` another list. Write how many tokens of
# `prompt` are found: only full blocks of `block_size`, from the beginning on, and at least one token of the prompt must
# be left to compute.
#
# Why it matters: this number is on your bill, as "cached tokens". You should be able to say it beforehand.
#
# <details><summary>Hint 1</summary>How many tokens do the two share at the beginning? Count until the first
# difference.</details>
# <details><summary>Hint 2</summary>No more than <code>len(prompt) - 1</code> may be found; round down to a multiple of
# <code>block_size</code> after that.</details>


# %% tags=["exercise"]
def found_tokens(computed, prompt, block_size):
    """Tokens of the prompt that need not be computed."""
    # SOLUTION
    shared = 0
    while shared < min(len(computed), len(prompt)) and computed[shared] == prompt[shared]:
        shared += 1
    return min(shared, len(prompt) - 1) // block_size * block_size
    # END SOLUTION


# %%
kv.check.found_tokens(found_tokens)

# %% [markdown]
# So small blocks find more. What do they cost? Each block is an entry in tables and an address for the memory to jump
# to; notebook 06 measured it. Here is the chat above, its answers included, with blocks of several sizes:

# %% tags=["nbval-ignore-output"]
whole = first_prompt(questions[0])
for question, answer in zip([*questions[1:], None], plain, strict=True):
    whole = whole + answer.ids + (next_turn(question) if question else [])
for block_size in (1, 4, 16, 64, 256):
    index = new_index(num_blocks=len(whole), block_size=block_size)
    found = 0
    for length in sent:
        found += serve(index, whole[:length])
        serve(index, whole[: length + reply - 1])  # the answer was computed too, all but its last token
    print(f"blocks of {block_size:>3}: {found / sum(sent):4.0%} of {sum(sent):,} tokens found, {len(index):>3} entries")

# %% [markdown]
# ## The chat, with its pages kept
#
# Now the same chat with prefix caching. The engine does what `serve` does, with the arithmetic; it looks a request up
# when it lets it in, and publishes blocks as they fill, those of the answer included.
#
# **Predict.** Time to first token of the last turn, with prefix caching, in percent of that without?

# %%
my_guess = 50  # PREDICT
asked = "TTFT of the last turn, with prefix caching against without?"
kv.results.predict("07.ttft_last", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
talks = {"without": [], "with prefix caching": []}
for _ in range(3):  # in turns, so that a slow moment of the machine meets both; the talk above was the warm-up
    for name, caching in (("without", False), ("with prefix caching", True)):
        talks[name].append(talk(Engine(model, num_blocks=64, prefix_caching=caching)))
kept = talks["with prefix caching"][0]  # all three find the same
ttft = {
    name: [statistics.median(turn.ttft for turn in turns) for turns in zip(*three, strict=True)]
    for name, three in talks.items()
}
for answer, old, new in zip(kept, *ttft.values(), strict=True):
    left = answer.prompt_length - answer.cached_tokens
    times = f"{1e3 * old:6.0f} ms without, {1e3 * new:6.0f} ms with"
    print(f"{answer.prompt_length:>4} tokens: {answer.cached_tokens:>3} found, {left:>3} computed; TTFT {times}")

# %% tags=["nbval-ignore-output"]
left_share = (kept[-1].prompt_length - kept[-1].cached_tokens) / plain[-1].prompt_length
ttft_share = ttft["with prefix caching"][-1] / ttft["without"][-1]
kv.results.measure("07.ttft_last", 100 * ttft_share, unit="%", bound=100 * left_share, note="bound: tokens computed")

# %% tags=["nbval-ignore-output"]
found_each = [answer.cached_tokens for answer in kept]
kv.plots.show(
    kv.plots.turns_with_and_without(found_each, np.subtract(sent, found_each), ttft),
    alt=f"With prefix caching {sent[-1] - found_each[-1]} of {sent[-1]} tokens are computed at the last turn; its TTFT "
    f"is {1e3 * ttft['with prefix caching'][-1]:,.0f} ms, and {1e3 * ttft['without'][-1]:,.0f} ms without.",
)

# %% [markdown]
# The first turn is as slow as before; somebody has to compute it. From the second on, TTFT no longer grows with the
# chat. It need not fall as far as the tokens do: notebook 03 showed that a pass over few tokens still takes the time of
# reading all the weights. And the rest of the answer, the gaps between its tokens?

# %% tags=["nbval-ignore-output"]
for name, three in talks.items():
    gaps = [gap for turns in three for turn in turns for gap in turn.itl]
    print(f"{name + ':':<20} a gap of {1e3 * statistics.median(gaps):.1f} ms between tokens (median of {len(gaps)})")
said = [[answer.ids for answer in turns] for three in talks.values() for turns in three]
print("the same answers in all six talks:", all(each == said[0] for each in said))

# %% [markdown]
# Each token of an answer reads all keys and values before it, whoever computed them. So prefix caching does nothing for
# decode: as far as the two lines differ, it is the noise of the machine.
#
# ## One changed character
#
# A habit of many programs is to tell the model what time it is, at the very top: `It is 12:00:01. You are ...`. One
# second later it is `12:00:02`.
#
# **Predict.** The library's rules are sent twice, with the time in front of them; only this one character is another.
# The blocks have 16 tokens. How many tokens of the second prompt are found?

# %%
my_guess = 100  # PREDICT
kv.results.predict("07.front_change", my_guess, unit="tokens", question="One character at the front changed: found?")

# %% tags=["nbval-ignore-output"]
index, text = new_index(num_blocks=256, block_size=16), " ".join(rules)
known, ticked = (lm.encode(f"It is 12:00:0{second}. {text}") for second in (1, 2))
serve(index, known)
front = kv.results.measure("07.front_change", serve(index, ticked), unit="tokens", note=f"of {len(ticked)}").measured
front_share = front / len(ticked)
print("the first tokens:", [lm.decode([token]) for token in ticked[:12]])
known, ticked = (lm.encode(f"{text} It is 12:00:0{second}.") for second in (1, 2))
serve(index, known)
print(f"with the time at the end: {serve(index, ticked)} of {len(ticked)}")

# %% [markdown]
# Everything behind the change is lost, for good reason: those tokens have *seen* it. See how the place of the change
# decides. Scrub it through the text, with blocks of several sizes. (In the picture each box is a token, and a dot
# stands for a space.)


# %% tags=["nbval-ignore-output"]
story = tiny.encode("Mia put the red kite in the shed. Then Mia and Leo went to the shop and bought four apples.")[:28]
ending = tiny.encode("Where is the red kite now?")[1:]
another = tiny.encode("a blue")[-1]


def pieces(ids):
    """The text of each token; the one that begins a text has no letters."""
    return [tiny.decode([token]) or "start" for token in ids]


def draw(changed_at, block_size):
    """The known text, and the prompt with one token changed: what is found of it."""
    changed = [*story[:changed_at], another, *story[changed_at + 1 :], *ending]
    index = new_index(num_blocks=64, block_size=block_size)
    serve(index, story)
    found, full = serve(index, changed), len(story) // block_size * block_size
    figure = kv.plots.prefix_match(pieces(story), pieces(changed), full, found, block_size)
    return figure, f"Token {changed_at} is changed: {found} of {len(changed)} tokens of the prompt are found."


figure, alt = draw(18, 4)
kv.plots.show(figure, alt=alt)

# %% tags=["nbval-ignore-output"]
kv.widgets.explore(draw, changed_at=(0, len(story) - 1, 1, 18), block_size=[4, 1, 8, 16])

# %%
text, places = list(range(96)), range(96)
steps = {}
for block_size in (4, 16, 32):
    row = []
    for place in places:
        index = new_index(num_blocks=64, block_size=block_size)
        serve(index, text)
        row.append(serve(index, [*text[:place], 999, *text[place + 1 :]]))
    steps[f"blocks of {block_size}"] = row
kv.plots.show(
    kv.plots.found_by_change(places, steps, len(text)),
    alt="Tokens found against the place of the change: a staircase under the diagonal, with steps as wide as a block.",
)

# %% [markdown]
# From this follows how to write prompts that are found. Six ways to go on from a conversation that the engine knows:

# %%
draws = random.Random(0)
message = [[draws.randrange(2000) for _ in range(40)] for _ in range(8)]  # rules, 6 messages, and the next question
system, talked, ask = message[0], sum(message[1:7], []), message[7]
ways = {
    "goes on": system + talked + ask,
    "the time in front": [7, 8] + system + talked + ask,
    "the time with the question": system + talked + [7, 8] + ask,
    "the rules in another order": system[20:] + system[:20] + talked + ask,
    "oldest message dropped": system + talked[40:] + ask,
    "earlier answer edited": system + talked[:100] + [7] + talked[101:] + ask,
}
for way, prompt in ways.items():
    index = new_index(num_blocks=64, block_size=16)
    serve(index, system + talked)
    print(f"{way:<27} {serve(index, prompt):>3} of {len(prompt)} tokens found")

# %% [markdown]
# What stays the same goes to the front, what changes goes to the end, and what was said is not touched. The last three
# ways are the ones that happen by accident: a dict of tools printed in another order, a chat that is cut at the front
# to fit the context, an answer that was tidied up (or cut into tokens anew). Nothing breaks, the answers are right;
# only the bill tells. So look at the number of cached tokens in what the provider returns.
#
# ## An agent that branches
#
# A chat is a line. An *agent* is a program that lets a model work on a task step by step: it sends the text so far,
# does what the answer says (looks something up, runs some code), writes what came of it below, and sends it all again.
# An agent that tries several ways at once, or people who ask about one document, make a **tree**: one beginning, many
# ends. Here three ways go on from one answer, and three from each of those.

# %%
branching = agent_branches(branches=3, depth=2, system=128, seed=0, instruction=16, answer=16, vocab_size=2000)
print(f"{len(branching)} requests; each goes on from: {[arrival.after for arrival in branching]}")

# %% [markdown]
# **Predict.** How many percent of the tokens that must be computed without prefix caching are computed with it? (All of
# them count: prompts, and answers as they are made.)

# %%
my_guess = 50  # PREDICT
asked = "An agent of 13 requests: tokens computed, with prefix caching against without?"
kv.results.predict("07.agent_computed", my_guess, unit="%", question=asked)

# %%
agent = {}
for name, caching in (("without", False), ("with", True)):
    engine = Engine(tiny.model, num_blocks=256, prefix_caching=caching)
    agent[name] = replay(engine, branching)
    print(
        f"{name:<8} {agent[name].computed_tokens:>5,} tokens computed, at most {agent[name].peak_blocks} blocks in use"
    )
answers = {name: [answer.ids for answer in run.served] for name, run in agent.items()}
print("the same answers:", answers["with"] == answers["without"])

# %% tags=["nbval-ignore-output"]
agent_share = agent["with"].computed_tokens / agent["without"].computed_tokens
kv.results.measure("07.agent_computed", 100 * agent_share, unit="%")

# %% [markdown]
# The oracle is one text alone: the last branch, written by `generate`, which knows nothing of pages and neighbors.

# %%
texts = []
for arrival, answer in zip(branching, agent["with"].served, strict=True):
    before = [] if arrival.after is None else texts[arrival.after]
    texts.append(before + arrival.prompt + answer.ids)
alone = kv.generate(tiny.model, texts[-1][:-16], 16)
print("the last branch, alone, gets the same tokens:", alone.ids == answers["with"][-1])

# %% [markdown]
# And the memory? The nine last requests run at the same time. What each found, the first `cached_tokens` of its prompt,
# lies in blocks that it shares; the rest lies in blocks of its own.

# %%
held = []
for text, answer in zip(texts[4:], agent["with"].served[4:], strict=True):
    blocks, shared = chained(text, 16), answer.cached_tokens // 16
    held.append(blocks[:shared] + [(answer.id, block) for block in range(shared, len(blocks))])
kv.plots.show(
    kv.plots.shared_blocks(held),
    alt="Nine texts as rows of blocks: the first ten are shared by all nine, the next by three each, the last three by "
    "none.",
)
distinct = len({block for blocks in held for block in blocks})
print(f"blocks of the nine texts: {sum(map(len, held))} if each had its own, {distinct} as they are held")
print(f"at most in use, counted while the steps ran: {agent['with'].peak_blocks}")

# %% [markdown]
# What is shared lies in memory once, however many texts use it at the same time. The counts of notebook 06, who holds a
# block, are all it takes.
#
# Now look at block 11. Three texts each have the same tokens there, and yet each has a block of its own. It ends with
# the last token of the answer they go on from, and that token was not run through the model when the answer ended. So
# the block was not full, and nobody could find it. The three come together and compute it in one step, each for itself,
# as the two with one prompt did above. That is where the peak comes from: ten blocks for all, one for each three, and
# three for each text alone, one of which could have been shared.
#
# ## When memory is short
#
# Blocks of texts that have ended cost nothing as long as nobody else wants them: they count as free, and are taken when
# a new text needs room. Then what was in them is **evicted**. Which should go first?
#
# - Not one that somebody is reading.
# - Not one on which another known block depends: a block is only found from the beginning of its text on, so without it
#   all that follows is lost. Only the ends go, the *leaves* of the tree.
# - Of these the one that was not used for longest.
#
# ### Exercise: next_to_go
#
# ●●○ · 6 minutes
#
# `blocks` is a dict: `{name: (parent, users, last_used)}`. `parent` is the name of the block before it in its text, or
# None; `users` how many texts that are running hold it; `last_used` a time. Write which block goes next (its name), or
# None when all of them must stay.
#
# Why it matters: evict a beginning, and its ends stay in memory for nothing. No one can reach them any more.
#
# <details><summary>Hint 1</summary>The names that occur as a <code>parent</code> are no leaves.</details>
# <details><summary>Hint 2</summary><code>min(names, key=lambda name: blocks[name][2], default=None)</code> takes the
# least recently used.</details>


# %% tags=["exercise"]
def next_to_go(blocks):
    """The least recently used leaf that nobody holds; None if there is none."""
    # SOLUTION
    parents = {parent for parent, _, _ in blocks.values()}
    leaves = [name for name, (_, users, _) in blocks.items() if users == 0 and name not in parents]
    return min(leaves, key=lambda name: blocks[name][2], default=None)
    # END SOLUTION


# %%
kv.check.next_to_go(next_to_go)

# %% [markdown]
# Must an engine search a tree for the next leaf each time? There is an elegant way around it (vLLM does the same): free
# blocks stand in one queue, and a text that ends gives back its blocks **last first**. So its end stands in the queue
# before its beginning, and taking from the front is taking leaves first, the least recently used before others.
#
# Three people, A, B and C, send prompts of three full blocks and a last token. The first block, the rules, is the same
# for all. The pool has 6 places: one for the rules, two each for the blocks of two people, and one for the last token
# of whoever is served. They come in turn.

# %%
draws = random.Random(1)
rules_block = [draws.randrange(2000) for _ in range(4)]
prompts = [rules_block + [draws.randrange(2000) for _ in range(9)] for _ in "ABC"]
index, holds, columns, hits = new_index(num_blocks=6, block_size=4), {}, [], []
for number in [0, 1, 2] * 3:
    hits.append(set(index.lookup(prompts[number])))
    serve(index, prompts[number])
    places = index.lookup(prompts[number])  # where its three blocks lie now
    holds.update(zip(places, ["rules", (number, 1), (number, 2)], strict=True))
    columns.append([holds[place] if place in index.pool.kept else None for place in range(6)])
    print("ABC"[number], "found", len(hits[-1]), "of 3 blocks")

# %%
kv.plots.show(
    kv.plots.pool_history(columns, hits, [*"ABC"] * 3),
    alt="Six places over nine requests: each of A, B, C finds only the block of the rules, since its own two were "
    "taken by the one before it.",
)

# %% [markdown]
# (A white place holds nothing that can be found: there lay the last token, in a block that is not full.)
#
# Two of three fit, and yet each finds only the rules. Follow A: its blocks are the least recently used when C
# comes, so C takes them, just before A comes back. Then A takes those of B. The queue always gives away what will be
# wanted next.
#
# Now larger: eight conversations, each of 384 tokens below a common system prompt of 128, come back in turn, again and
# again.
#
# **Predict.** The pool has room for seven of the eight. What share of the tokens of their prompts is found? (With room
# for all it is nearly everything.)

# %%
my_guess = 85  # PREDICT
kv.results.predict(
    "07.pool_short", my_guess, unit="%", question="Room for 7 of 8 chats that come in turn: tokens found?"
)


# %%
def share_found(num_blocks, order):
    """Share of the tokens found in a pool of so many blocks of 16; each chat's first visit does not count."""
    draws = random.Random(2)
    system = [draws.randrange(2000) for _ in range(128)]
    chats = [system + [draws.randrange(2000) for _ in range(384 + 1)] for _ in range(8)]
    index = new_index(num_blocks, block_size=16)
    for tokens in chats:
        serve(index, tokens)
    index.hits = index.queries = 0
    for number in order:
        serve(index, chats[number])
    return index.hits / index.queries


draws = random.Random(3)
orders = {"in turn": list(range(8)) * 5, "in random order": [draws.randrange(8) for _ in range(40)]}
room = {chats: 8 + int(24 * chats) + 1 for chats in (1, 2, 3, 4, 5, 6, 7, 7.25, 7.5, 7.75, 8, 9)}  # in blocks
shares = {name: [share_found(blocks, order) for blocks in room.values()] for name, order in orders.items()}
by_room = dict(zip(room, shares["in turn"], strict=True))
for name, row in shares.items():
    print(f"{name}:", ", ".join(f"{share:.0%} ({chats})" for chats, share in zip(room, row, strict=True)))

# %%
kv.results.measure("07.pool_short", 100 * by_room[7], unit="%", note=f"with room for 8: {by_room[8]:.0%}")

# %%
kv.plots.show(
    kv.plots.hit_rate_by_pool(list(room.values()), shares, room[8]),
    alt="Tokens found against blocks: in turn only the system prompt is found until nearly all eight chats fit; in "
    "random order the share grows steadily.",
)

# %% [markdown]
# A cliff. Each block that the pool lacks is missed by every chat at every visit; when it lacks as many as one chat has,
# nothing but the system prompt is found. This is the known worst case of "least recently used", and people who wait for
# their turn are just that. (In random order more memory pays as one would think.) So engines do more than evict: they
# serve those first whose pages are still there, send a chat to the machine that served it before, or move pages to
# slower memory instead of dropping them.
#
# ## What a found token costs
#
# Found is not free. A token that is computed attends to all before it, found or not, so the keys and values of the
# found ones are read. And somebody paid for the memory in which they lay.
#
# **Predict.** How much does a found token add to TTFT, in percent of a token that must be computed?

# %%
my_guess = 10  # PREDICT
asked = "A found token against a computed one: time it adds to TTFT?"
kv.results.predict("07.found_cost", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
lengths = config.fitting([64, 512, 1024], room=17)
roomy = Engine(model, num_blocks=2 + sum(-(-n // 16) + 5 for n in lengths), max_batch_tokens=2048)
ids = iter(random.Random(4).choices(range(config.vocab_size), k=10_000))


def wait(prompt):
    """Seconds to first token."""
    number = roomy.submit(prompt, 1)
    return roomy.run()[number].ttft


fresh, again = [], []
for n in lengths:
    beginning = [next(ids) for _ in range(n // 16 * 16)]
    fresh.append(wait([*beginning, next(ids)]))
    again.append(statistics.median(wait(beginning + [next(ids) for _ in range(16)]) for _ in range(3)))
    print(f"{n:>5,} tokens: computed {1e3 * fresh[-1]:7.0f} ms; found, and 16 more computed: {1e3 * again[-1]:5.0f} ms")

# %% tags=["nbval-ignore-output"]
more = lengths[-1] - lengths[0]
computed_second, found_second = (max(row[-1] - row[0], 0) / more for row in (fresh, again))
by_count = (kv.flops(config, 16, lengths[-1]).total - kv.flops(config, 16, lengths[0]).total) / (
    kv.flops(config, lengths[-1]).total - kv.flops(config, lengths[0]).total
)
found_cost = 100 * found_second / computed_second
kv.results.measure("07.found_cost", found_cost, unit="%", bound=100 * by_count, note="bound: operations")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.found_or_computed(lengths, fresh, again),
    alt=f"TTFT against the length of the prompt: computed it rises to {1e3 * fresh[-1]:,.0f} ms; with all but the last "
    f"16 tokens found it stays near {1e3 * again[-1]:,.0f} ms.",
)

# %% [markdown]
# What about the memory? Suppose memory is what the machine is paid for. A pool that is full of kept pages could be
# filled anew in some time T, by computing. A page that lies unused for longer than T has cost more than computing it
# again. (For databases this is an old rule: keep in memory what is read more often than every five minutes; Gray and
# Putzolu, 1987. Below, see how long providers keep pages.)

# %% tags=["nbval-ignore-output"]
memory = 4e9  # bytes of pages, an example
tokens_held = memory / kv.cache_bytes(config, 1, bits=8 * model.dtype.itemsize)
worth_keeping = tokens_held * computed_second
print(f"{memory / 1e9:.0f} GB hold {tokens_held:,.0f} tokens; to compute them again takes {worth_keeping:,.0f} s")

# %% [markdown]
# ## The bill
#
# Providers write three numbers on a bill: tokens of prompt that were computed, tokens of prompt that were found, tokens
# of answer.
#
# ### Exercise: request_price
#
# ●○○ · 4 minutes
#
# Write the price of a request in dollars. `prices` holds the dollars for a **million** tokens: of uncached input, of
# cached input and of output. `prompt_tokens` counts all of the prompt; `cached_tokens` of these were found.
#
# Why it matters: some interfaces count the cached tokens within the prompt's (this one does), others beside them. Who
# mixes them up pays, or bills, twice.
#
# <details><summary>Hint 1</summary>How many tokens of the prompt were not found?</details>
# <details><summary>Hint 2</summary>Three products, added up, divided by a million.</details>


# %% tags=["exercise"]
def request_price(prompt_tokens, cached_tokens, output_tokens, prices):
    """Dollars for one request."""
    # SOLUTION
    uncached, cached, output = prices
    fresh = prompt_tokens - cached_tokens
    return (fresh * uncached + cached_tokens * cached + output_tokens * output) / 1e6
    # END SOLUTION


# %%
kv.check.request_price(request_price)

# %% [markdown]
# Now a trace: three people chat at the same time, four turns each, below the same rules. We replay it with and without
# prefix caching (`replay` lets them come by a virtual clock, as in notebook 06). The words are made up, time does not
# depend on them. From the run without we take the speeds of this machine; at a rent of a dollar an hour they give its
# prices.

# %% tags=["nbval-ignore-output"]
rules_ids = first_prompt("")[:176]  # 11 full blocks (of a model with a short context, what there is)
sizes = {"system": len(rules_ids), "user": 24, "answer": 8}
trace = chat(4, rules_ids, seed=0, user=24, answer=8, chats=3, rate=2.0, think=0.5, vocab_size=config.vocab_size)
runs = {}
for name, caching in (("without", False), ("with", True)):
    runs[name] = replay(Engine(model, num_blocks=96, prefix_caching=caching), trace)
    waited = f"TTFT {1e3 * runs[name].ttft_percentile(50):,.0f} ms (median)"
    print(f"{name:<8} {runs[name].computed_tokens:>6,} tokens computed in {runs[name].busy:5.1f} s, {waited}")

# %% tags=["nbval-ignore-output"]
dollars_per_hour = 1.00  # an example
prefill_speed, decode_speed = runs["without"].prefill_speed, runs["without"].decode_speed
own = measured_rates(prefill_speed, decode_speed, dollars_per_hour)
found_price = 1e6 * found_second * dollars_per_hour / 3600
own = replace(own, cached_input=found_price)
print(f"{prefill_speed:,.1f} tokens of prompt a second, {decode_speed:,.1f} of answers: for a million tokens")
print(f"uncached input ${own.input:.2f}, cached input ${own.cached_input:.4f}, output ${own.output:.2f}")

# %% tags=["nbval-ignore-output"]
used = {name: usage(run.served) for name, run in runs.items()}
for name, run in runs.items():
    print(f"{name} prefix caching\n{invoice(used[name], own, caching=name == 'with')}")
    print(f"rent of the machine while it computed: ${run.busy * dollars_per_hour / 3600:.6f}\n")

# %% [markdown]
# The invoice counts otherwise than the machine did. Its input is only the prompts'; the tokens of an answer run through
# the model too, all but the last, while the invoice has all of them as output. So "tokens computed" above is the
# uncached input and the output together, less one for each of the twelve answers.
#
# Without caching, bill and rent agree: the prices come from that run. With caching the rent is a test of these prices.
# If it is higher than the bill, a few tokens at a time are dearer than many, as TTFT has shown above.
#
# And the price lists? They are cited, not measured. Each was read on the day that stands beside it; the package's
# `serving/bill.py` says on which page. Some providers take more than the input price for what they are going to keep
# ("write"). Then what is sent only once is dearer with caching than without.

# %%
for name, rates in PRICES.items():
    write = f", write ${rates.cache_write:.2f}" if rates.cache_write else ""
    part = f"cached ${rates.cached_input:.3f} ({rates.cached_input / rates.input:.0%} of input)"
    print(f"{name:<20} {rates.read}  input ${rates.input:.2f}{write}, {part}, output ${rates.output:.2f}")
    first = rates.cache_write or rates.input
    once, twice = first / rates.input - 1, 1 - (first + rates.cached_input) / (2 * rates.input)
    print(f"{'':<20} {rates.note}")
    print(f"{'':<20} with caching, tokens used once cost {once:.0%} more, tokens used twice {twice:.0%} less")

# %% [markdown]
# One thing stands between these lists and our trace: its prompts have some 200 to 300 tokens, and providers do not keep
# so little: a least of 1,024 tokens is usual, and for some models it is another one (see the pages on prompt caching of
# OpenAI and Anthropic). So read the percentages as those of a chat with the same proportions, all of it ten times as
# long: prompts of two thousand tokens and more, found in blocks of 160. Ten times each count is ten times each bill,
# and the percentage stays. The same goes for the chats further below.
#
# **Predict.** The same trace at the first of these price lists: the bill with prefix caching, in percent of the bill
# without?

# %%
my_guess = 50  # PREDICT
first_list = next(iter(PRICES))
asked = f"Three chats at the prices of {first_list}: bill with prefix caching against without?"
kv.results.predict("07.bill", my_guess, unit="%", question=asked)

# %% tags=["nbval-ignore-output"]
bills, ratio, output_part = {}, {}, {}
for name, rates in {"this machine": own, **PRICES}.items():
    invoices = {run: invoice(used[run], rates, caching=run == "with") for run in runs}
    bills[name] = {run: [line.dollars for line in bill.lines] for run, bill in invoices.items()}
    ratio[name] = invoices["with"].total / invoices["without"].total
    output_part[name] = bills[name]["with"][2] / invoices["with"].total
    print(f"{name:<20} {ratio[name]:4.0%} of the bill without; {output_part[name]:4.0%} of what is left is output")
kv.results.measure("07.bill", 100 * ratio[first_list], unit="%", note=first_list)
kv.results.measure("07.bill_here", 100 * ratio["this machine"], unit="%", note="at rates measured here")

# %% tags=["nbval-ignore-output"]
kv.plots.show(
    kv.plots.bills(bills),
    alt=f"The bill with prefix caching is {ratio['this machine']:.0%} of that without at this machine's rates, and "
    f"{min(list(ratio.values())[1:]):.0%} to {max(list(ratio.values())[1:]):.0%} at published prices.",
)

# %% [markdown]
# Where two lists give the same percentage, compare their prices above: each price of the one is half of the other's.
# The bill is half as high, with caching and without, so the share is the same.
#
# ## Square and straight line
#
# What becomes of a longer chat? Turn k sends the system prompt, k questions and k - 1 answers.
#
# ### Exercise: tokens_computed
#
# ●●○ · 6 minutes
#
# Write how many tokens of prompt a chat of `turns` turns computes in all. The system prompt has `system` tokens, each
# question `question`, each answer `reply`. Without `caching` each turn computes its whole prompt. With it, everything
# is found that was ever run through the model (take blocks of one token). Mind one token: the last one of each answer
# was chosen and sent to the user, but not run through the model.
#
# Why it matters: this is the difference between a chat that gets dearer with each turn and one that does not.
#
# <details><summary>Hint 1</summary>Without: add up <code>system + k * question + (k - 1) * reply</code> for k from 1 to
# <code>turns</code>.</details>
# <details><summary>Hint 2</summary>With: the first turn computes system and question; each later one its question, and
# the one token that is left of the answer before.</details>


# %% tags=["exercise"]
def tokens_computed(turns, system, question, reply, caching):
    """Tokens of prompt that are run through the model in a whole chat."""
    # SOLUTION
    if caching:
        return system + turns * question + (turns - 1)
    return sum(system + turn * question + (turn - 1) * reply for turn in range(1, turns + 1))
    # END SOLUTION


# %%
kv.check.tokens_computed(tokens_computed)

# %% [markdown]
# The package's `chat_tokens` does the same for blocks of any size. The first chat of the trace above must agree with
# it, turn by turn: that is what the engine really computed.

# %%
computed = {}
for name, block_size in (("without", None), ("with", 16)):
    chat_one = runs[name].served[:4]  # its turns follow one another
    computed[name] = np.cumsum([answer.prompt_length - answer.cached_tokens for answer in chat_one])
    closed = [chat_tokens(n, **sizes, block_size=block_size).uncached for n in (1, 2, 3, 4)]
    print(f"{name:<8} as the formula says, turn by turn: {closed == computed[name].tolist()}")
    ratio_of_turns = chat_tokens(200, **sizes, block_size=block_size).uncached
    ratio_of_turns /= chat_tokens(100, **sizes, block_size=block_size).uncached
    print(f"{'':<8} 200 turns against 100: {ratio_of_turns:.1f} times the tokens")

# %% tags=["nbval-ignore-output"]
turns, growth, dollars = list(range(1, 25)), {}, {}
for name, block_size in (("without", None), ("with", 16)):
    counts = [chat_tokens(n, **sizes, block_size=block_size) for n in turns]
    growth[name] = [count.uncached for count in counts]
    dollars[name] = [invoice(count, PRICES[first_list], caching=name == "with").total for count in counts]
kv.plots.show(
    kv.plots.chat_growth(turns, growth, dollars, computed),
    alt=f"After {turns[-1]} turns {growth['without'][-1]:,} tokens are computed without prefix caching, along a "
    f"parabola, and {growth['with'][-1]:,} with it, along a line; the bill is ${dollars['without'][-1]:.3f} or "
    f"${dollars['with'][-1]:.3f}.",
)

# %% [markdown]
# The tokens computed have become a straight line. (Not all of the work: each of them still attends to all the earlier
# ones, found or not.) Has the bill? Look at what it is made of:

# %% tags=["nbval-ignore-output"]
first_rates = PRICES[first_list]
for n in (10, 100, 1000):
    count = chat_tokens(n, **sizes, block_size=16)
    parts = [line.dollars for line in invoice(count, first_rates).lines]
    total = sum(parts)
    print(f"{n:>5,} turns: ${total:9.4f}; cached input {parts[1] / total:4.0%}, output {parts[2] / total:4.0%} of it")
cached_square = chat_tokens(1000, **sizes, block_size=16).cached / chat_tokens(500, **sizes, block_size=16).cached
print(f"cached tokens on the bill, 1,000 turns against 500: {cached_square:.1f} times")

# %% [markdown]
# Found tokens are counted again at each turn, so their number grows with the square of the turns. At a small price this
# part is small for long, and in the end it is nearly all of the bill. The cache turned the square of the *tokens
# computed* into a line; it made the square of the *bill* cheaper, by the ratio of two prices. (It is not unfair: each
# new token looks at all the old ones. But it is why long-running agents make summaries, and begin a new text with
# them.)
#
# ## Summary

# %% tags=["nbval-ignore-output"]
kv.results.summary("07")

# %% [markdown]
# Your guesses beside what was measured: within the band they were at most a factor of two off. The farther from 1, the
# more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("07")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# Statement **12** can be judged now: "prefix caching makes agents and chats affordable". The code works it out from
# what was measured above.
#
# - It is wrong as said unless, with prefix caching, the last turn of the chat waits at most half as long for its first
#   token, the agent computes at most half of the tokens, and the bill of the three chats falls by at least a fifth, at
#   the rates of this machine and at every price list.
# - It holds with a condition if one of these is so: a changed character at the front undoes it (fewer than one in ten
#   tokens are found); a pool with room for seven chats of eight finds less than half of what one with room for all
#   does; or the bill of a long chat still grows by more than three times when its turns double.
# - Else it holds.

# %% tags=["nbval-ignore-output"]
cheaper = ttft_share <= 0.5 and agent_share <= 0.5 and max(ratio.values()) <= 0.8
grows = invoice(chat_tokens(1000, **sizes, block_size=16), first_rates).total
grows /= invoice(chat_tokens(500, **sizes, block_size=16), first_rates).total
conditions = [f"{front} tokens were found after one changed character at the front"] * (front_share < 0.1)
if by_room[7] < by_room[8] / 2:
    conditions.append(f"with room for seven chats of eight {by_room[7]:.0%} were found, not {by_room[8]:.0%}")
if grows > 3:
    conditions.append(f"found tokens are billed at each turn: 1,000 turns cost {grows:.1f} times as much as 500")
kv.results.verdict(
    12,
    "wrong as said" if not cheaper else "holds with a condition" if conditions else "holds",
    f"TTFT of the last turn is {ttft_share:.0%} of that without, the agent computes {agent_share:.0%}, and the bill of "
    f"the chats is {ratio['this machine']:.0%} here and {min(list(ratio.values())[1:]):.0%} to "
    f"{max(list(ratio.values())[1:]):.0%} at published prices."
    + (f" But {'; '.join(conditions)}." if conditions else ""),
)

# %% [markdown]
# **What to remember**
#
# 1. A request is the whole conversation. Nearly all of it was computed before, and its pages are still there.
# 2. Keys and values belong to a token and all before it. A block's key is a hash of its tokens and its parent's key;
#    compare the tokens too.
# 3. Full blocks, from the beginning, at least one token left over: so many are found. One change, and all behind it is
#    new. Put what stays in front.
# 4. Publish after computing, give back last first, evict leaves. A pool that is a little too small can be as good as
#    none.
# 5. TTFT falls, the gaps do not. The tokens that a chat computes become a straight line; attention still reads all
#    earlier ones, and the bill keeps a square, at the price of found tokens.
#
# ## What the field does today
#
# - vLLM's automatic prefix caching hashes full blocks with their parent, keeps free blocks in one queue and gives back
#   the blocks of a text last first (its design document "Automatic Prefix Caching"); a `cache_salt` in the first block
#   keeps users apart, because a short TTFT tells that somebody sent the same text before.
# - RadixAttention in SGLang (arXiv 2312.07104) keeps a tree of prefixes, evicts the least recently used leaf, and
#   serves requests with the longest found prefix first.
# - Mooncake (arXiv 2407.00079) builds a whole service around kept pages, in the main memory and on the disks of many
#   machines, and sends requests where their pages are.
# - CacheBlend (arXiv 2405.16444) uses pages of documents that are *not* at the beginning, and repairs them by computing
#   some of their tokens again; Prompt Cache (arXiv 2311.04934) gives parts of a prompt fixed places.
# - Makers of agents write their prompts for the cache: nothing that changes in front, only additions at the end, tools
#   that stay where they are ("Context Engineering for AI Agents: Lessons from Building Manus", July 2025).
# - Providers differ: some cache by themselves, some want marks in the prompt, some take more for what they keep. Their
#   price lists say which, and for how long.
#
# **Next** in the course comes 08: the weights themselves, in fewer bits.

# %% tags=["nbval-ignore-output"]
kv.check.progress("07")
