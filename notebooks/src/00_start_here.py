# %% [markdown]
# # 0. Start here
#
# **Time:** about 30 minutes · **Device:** any (CPU is enough)
#
# **You will be able to**
#
# - say what a token is, and what a chat model really gets to read
# - ask a real language model a question and record when each token of its answer arrives
# - read the three figures that everybody in this field reports: TTFT, ITL and TPOT
# - decide whether an answer arrives faster than a person can read it
#
# {{colab_badge}}

# %% tags=["setup"]
# SETUP

# %% [markdown]
# ## How this course works
#
# This course explains why large language models answer as fast as they do. You do not have to believe any of it: each
# notebook measures what it says, on the machine you sit at. Three things come up again and again.
#
# - **Predict, then measure.** Before each main measurement you write down a guess. A wrong guess is worth more than
#   none. Then a line or two show your guess, the *bound* and the measured value. The bound is what a count
#   or a formula predicts, or the largest difference that is allowed; a note says which. Where there is no bound,
#   it is left out.
# - **Exercises.** A function stops with `raise NotImplementedError("your turn")`. Put your code there and run the cell
#   below it: `kv.check` says whether the answer is right, and if not, what is wrong. Later cells never use your
#   function, so you may skip an exercise and come back. `kv.check.progress()` shows what is done and how long the rest
#   takes; `kv.check.reset("00")` forgets what you did in notebook 00.
# - **Solutions** are in the folder `notebooks/solutions` of the course's repository: the same notebooks, worked, with
#   their outputs. Copies handed out in a class come without them.
#
# Run the cells from top to bottom with Shift+Enter. If something looks odd, choose *Restart Kernel and Run All Cells*:
# guesses, results and progress are kept in a file and survive the restart. Sliders need a running kernel: after
# reopening a notebook, run their cell again.
#
# The course tests 29 plain statements about fast inference: the dict `kvcourse.statements.STATEMENTS` holds them, and
# each verdict prints the statement that it is about.

# %% [markdown]
# ## Is everything here?
#
# `kvcourse doctor` checks what the course needs. Each line below is `ok`, or says what to do: `look` means that the
# course works but you should know this, `fix` that something is missing. The full report, with versions and folders,
# is what `kvcourse doctor` prints in a terminal.

# %% tags=["nbval-ignore-output"]
from kvcourse.cli import doctor

findings = doctor.examine()
for finding in findings:
    brief = finding.status == "ok" and finding.topic not in ("device", "threads")
    print(f"ok    {finding.topic}" if brief else finding)

to_fix = [finding.topic for finding in findings if finding.status == "fix"]
print(f"\nPut right first: {', '.join(to_fix)}" if to_fix else "\nEverything is here.")

# %% [markdown]
# ## The model
#
# The course works with a real chat model: SmolLM2-135M-Instruct, published by Hugging Face under the Apache 2.0
# license ([arXiv 2502.02737](https://arxiv.org/abs/2502.02737)). It is small, so that it runs on a laptop without a
# GPU. It is built like its large relatives; only the numbers are smaller.
#
# If the model is not on this computer yet, the next cell downloads it once. The download is a 4-bit version of 93 MB.
# On loading, each weight is expanded to an ordinary 32- or 16-bit number. That is why the memory printed below is
# larger, and why the answers differ a little from those of the published model.

# %% tags=["nbval-ignore-output"]
lm = kv.load_model("smollm2-135m")
print(f"{lm.name} computes on {lm.model.device} in {lm.model.dtype}")

# %% [markdown]
# A language model is a list of matrices and a recipe for multiplying with them. These numbers fix all their shapes.
# You will meet each of them again; for now two matter. The **parameters** are the numbers that were learned in
# training. To make one token, the model has to read all of them.

# %%
from kvcourse.cost import parameters

config = lm.config
print(f"layers            {config.n_layers}")
print(f"attention heads   {config.n_heads} for queries, {config.n_kv_heads} for keys and values")
print(f"width             {config.d_model}")
print(f"vocabulary        {config.vocab_size:,} tokens")
print(f"longest text      {config.max_seq_len:,} tokens")
print(f"parameters        {parameters(config):,}")
for bits in (32, 16):
    print(f"as {bits}-bit numbers {kv.weight_bytes(config, bits) / 1e6:,.0f} MB")

# %% [markdown]
# ## What a token is
#
# A model reads and writes **tokens**: pieces of text from a fixed vocabulary, each with a number, its **id**. Its
# **tokenizer** cuts text into them. Frequent words are one token, together with the space before them. Rare words are
# cut into several. Below, each line is one token: its id, and the bytes that it stands for.

# %%
sentence = "The baker folds the sourdough at 4 a.m. 🥖"
ids = lm.encode(sentence)
for id in ids:
    print(f"{id:>6}  {lm.tokenizer.bytes_of(id)}")

assert lm.decode(ids) == sentence
print(f"{len(sentence.split())} words, {len(ids)} tokens")

# %% [markdown]
# The last lines are a surprise: the emoji is one character and more than one token. A token is a piece of *bytes*, and
# it may end in the middle of a character. The last exercise of this notebook comes back to that.
#
# A chat model has one more secret. It does not see a question, it sees one long text and continues it. The **chat
# template** writes the conversation into that text, with control tokens such as `<|im_start|>` between the speakers.
# Below, the user's question is the only message we give it. The first turn is a **system message**, which the template
# adds by itself.

# %%
if lm.tokenizer.chat_template:
    chat_ids = lm.chat([{"role": "user", "content": "Why does dough rise?"}])
    print(lm.tokenizer.decode(chat_ids, special=True))
    print(f"({len(chat_ids)} tokens)")
else:
    print(f"{lm.name} has no chat template: it goes on with any text as it stands. A chat model would show here the")
    print("system message, the question and the beginning of an answer, each after a control token and a name.")

# %% [markdown]
# The text ends where the assistant's turn begins. The model's only skill is to say which token comes next. That token
# is put at the end of the text, and the model is asked again. This loop runs until the model makes the token
# `<|im_end|>`, or until we stop it.

# %% [markdown]
# ## Ask a question
#
# You will give the model a text of a few hundred words and ask a question about it. The text and the question together
# are the **prompt**.

# %%
TEXT = """\
A loaf of bread needs four things: flour, water, salt, and time. The first three cost little, and anybody can buy
them. The fourth is what a bakery really sells.

The baker begins in the afternoon of the day before. She mixes flour and water and adds a spoonful of yesterday's
dough. In that spoonful live yeast and bacteria. They eat the sugar that the flour sets free, and they give back gas
and acid. The gas will lift the bread. The acid gives it taste. Nothing can be seen in the first hour. After six hours
the dough has twice its size, it smells of apples, and small bubbles break at its surface.

Around midnight she folds the dough. She pulls one side up and lays it over the middle, then the next side, and so
once around the bowl. Folding does not press the gas out, as kneading would, and still it makes the dough strong. Two
proteins in the flour join into long threads, and each fold lays these threads side by side. A strong dough holds its
gas. A weak one spreads in the oven like a pancake.

At four in the morning the loaves are shaped and rest in baskets. Now temperature decides everything. In a warm room
the dough is ready in an hour; in a cold room it may need five. An apprentice looks at the clock. An experienced baker
presses a finger into the dough and looks at the dent. If it springs back at once, the dough needs more time. If it
comes back slowly and not quite, the loaf can go into the oven. If it stays, the baker has waited too long, and the
bread will be flat.

The oven is hot and full of steam. Steam keeps the skin of the loaf soft for ten minutes, so that it can grow before
the crust becomes hard. Then the steam is let out and the crust turns brown. When a loaf is done it sounds hollow if
you knock on its bottom. It should cool for an hour before it is cut. Almost nobody has the patience, which is why the
first slice is so often a little wet, and always the best.
"""

# %% [markdown]
# The first run with a prompt of a new length pays for memory and for the choice of the fastest routines. Later runs do
# not. So the model reads the prompt once before anything is timed; this is called **warming up**.

# %%
QUESTION = "What are the steps of baking a loaf of bread?"
TEXT = lm.decode(lm.encode(TEXT)[: config.max_seq_len // 3])  # only a model with a short context loses something
PROMPT = f"{TEXT}\n{QUESTION}"
prompt_ids = lm.prompt_ids(PROMPT)
kv.generate(lm.model, prompt_ids, 2)  # once without a clock
print(f"{len(TEXT.split())} words; the whole prompt has {len(prompt_ids)} tokens")

# %% [markdown]
# The model has to read the whole prompt before it can write the first token of its answer. For each later token it
# reads only the token before.
#
# **Predict.** How many times longer does the first token take than a later one? (1: the same time. 10: ten times as
# long.)

# %%
my_guess = 5  # PREDICT
kv.results.predict(
    "00.first_over_later",
    my_guess,
    unit="times",
    question=f"How many times longer does the first token take ({len(prompt_ids)} tokens of prompt)?",
)

# %% [markdown]
# **Measure.** Watch the screen while this cell runs. First there is nothing, then the answer flows: each piece is
# printed the moment its token has been computed. The model is tiny, so do not trust what it says. We look at the
# clock. `stop_ids=()` switches off the model's own stop token, so that the answer does not end early.

# %% tags=["nbval-ignore-output"]
answer = lm.stream(PROMPT, max_new_tokens=80, stop_ids=())
for piece in answer:
    print(piece, end="", flush=True)

generation = answer.generation

# %% [markdown]
# `generation` holds the tokens and, for each, the second at which it arrived. Here are the arrivals as a picture.

# %% tags=["nbval-ignore-output"]
from kvcourse.plots import timeline
from kvcourse.tokenizer import StreamDecoder

decoder = StreamDecoder(lm.tokenizer)
pieces = [decoder.push(id) for id in generation.ids]
ttft, gap = generation.ttft, generation.percentile(50)
kv.plots.show(
    kv.plots.token_timeline(generation.arrivals, pieces),
    alt=f"One tick for each token: the first arrives after {1000 * ttft:,.0f} ms, the others follow, "
    f"the median gap is {1000 * gap:,.0f} ms.",
)

# %% tags=["nbval-ignore-output"]
entry = kv.results.measure("00.first_over_later", ttft / gap, unit="times", note="first token / median gap")
kv.plots.show(
    kv.plots.predict_measure(entry),
    alt=f"The first token took {ttft / gap:.1f} times as long as a later one (median).",
)

# %% [markdown]
# ## Three figures for one answer
#
# Wherever language models are served, the same three figures are reported.
#
# - **TTFT**, time to first token: from sending the prompt to the first token.
# - **ITL**, inter-token latency: the gap between one token and the next. An answer of n tokens has n − 1 gaps.
# - **TPOT**, time per output token: the mean of the gaps, (total − TTFT) / (n − 1).
#
# Beside the mean, look at the 95th **percentile** of the gaps, *p95*: 95 of 100 gaps are shorter. A mean hides a
# stall, a percentile shows it.

# %% tags=["nbval-ignore-output"]
rows = {
    "time to first token (TTFT)": f"{1000 * generation.ttft:9,.1f} ms",
    "median gap (ITL, p50)": f"{1000 * generation.percentile(50):9,.1f} ms",
    "95th percentile of the gaps": f"{1000 * generation.percentile(95):9,.1f} ms",
    "mean gap (TPOT)": f"{1000 * generation.tpot:9,.1f} ms",
    "tokens a second, after the first": f"{generation.tokens_per_second:9,.1f}",
    "the whole answer": f"{1000 * generation.total:9,.1f} ms",
}
for name, value in rows.items():
    print(f"{name:<34}{value}")

# %% [markdown]
# ### Exercise: latencies
#
# ●○○ · 3 minutes
#
# Compute the three figures from the arrivals, a list of seconds since the prompt was sent. Return `(ttft, gaps,
# tpot)`; `gaps` is a list. An answer of a single token has no gap: its `tpot` is `None`.
#
# Why it matters: the first wait can be as long as dozens of gaps. Count it among them, or divide by n instead of n −
# 1, and two tools that measure the same answer report different speeds.
#
# <details><summary>Hint 1</summary>The gaps are differences of neighbors: <code>itertools.pairwise</code> gives the
# pairs.</details>
# <details><summary>Hint 2</summary>The gaps add up to total − TTFT. So TPOT is their sum, divided by how many there
# are.</details>

# %% tags=["exercise"]
from itertools import pairwise


def latencies(arrivals: list[float]) -> tuple[float, list[float], float | None]:
    # SOLUTION
    gaps = [after - before for before, after in pairwise(arrivals)]
    tpot = sum(gaps) / len(gaps) if gaps else None
    return arrivals[0], gaps, tpot
    # END SOLUTION


# %%
kv.check.latencies(latencies)

# %% [markdown]
# ## Faster than you can read?
#
# A gap of so many milliseconds says little to a person. So compare it with reading. A review of 190 studies found that
# adults read English non-fiction silently at 238 words a minute on average; most read between 175 and 300 (Brysbaert
# 2019, *Journal of Memory and Language* 109, 104047). So 300 words a minute, 5 words a second, is a fast reader.
#
# **Predict.** How many words a second does the model write, once the first token is there?

# %%
FAST, AVERAGE = 300 / 60, 238 / 60  # words a second

my_guess = 5  # PREDICT
kv.results.predict("00.words_per_second", my_guess, unit="words/s", question="How fast does the model write?")

# %% [markdown]
# **Measure.** Tokens are not words, so first find out when each *word* was complete.

# %% tags=["nbval-ignore-output"]
from kvcourse import reading

times = reading.word_times(pieces, generation.arrivals)
rate = (len(times) - 1) / (times[-1] - times[0])  # words after the first, for each second after the first
kv.results.measure("00.words_per_second", rate, unit="words/s")
print(f"{len(generation.ids)} tokens made {len(times)} words.")
print(f"A fast reader takes {FAST:.1f} words a second: the model writes at {rate / FAST:.1f} times that speed.")
print(f"An average reader takes {AVERAGE:.1f}: the model writes at {rate / AVERAGE:.1f} times that speed.")

# %% [markdown]
# ### Exercise: word_times
#
# ●●○ · 5 minutes
#
# `pieces` and `arrivals` belong together, one of each for each token. Return a list with the time at which each word
# was complete: when its last piece arrived. Words are what `str.split()` says: a line break ends a word too, and a full
# stop belongs to the word before it. Pieces that show nothing (spaces, line breaks, the empty text of a control token)
# belong to no word. In all other pieces a space can only be the first character, so no piece holds parts of two words.
#
# Why it matters: tokens a second cannot be compared between models with different vocabularies. Words a second can.
#
# <details><summary>Hint 1</summary>Let the text grow piece by piece. <code>len(text.split())</code> says in which word
# you are.</details>
# <details><summary>Hint 2</summary>Keep a dict from the number of the word to the latest arrival. A later piece of the
# same word then replaces the earlier one.</details>


# %% tags=["exercise"]
def word_times(pieces: list[str], arrivals: list[float]) -> list[float]:
    # SOLUTION
    text, latest = "", {}
    for piece, arrival in zip(pieces, arrivals, strict=True):
        text += piece
        if piece.strip():
            latest[len(text.split())] = arrival
    return list(latest.values())
    # END SOLUTION


# %%
kv.check.word_times(word_times)

# %% [markdown]
# Now put a reader in front of the screen. They begin with the first word and read at a steady speed. While there are
# words they have not read, they never wait, whatever the gaps are. They wait when they have caught up with the model.

# %% tags=["nbval-ignore-output"]
average = {f"average reader, {60 * AVERAGE:.0f} words a minute": AVERAGE}


def draw(words_per_second):
    """The picture, and the sentence that says what to see in it."""
    figure = kv.plots.reading(times, words_per_second, average)
    return figure, timeline.reading_sentence(times, words_per_second) + "."


figure, sentence = draw(words_per_second=5)
kv.plots.show(figure, alt=f"Words on the screen and words read. {sentence}")

# %% [markdown]
# Move the slider. At which speed does the reader first wait? And at which speed do they do little else?
#
# You can find your own speed: take the time you need for the text about bread, and divide its number of words (printed
# above) by the seconds.

# %% tags=["nbval-ignore-output"]
fastest = max(20, 2 * round(rate))
kv.widgets.explore(draw, words_per_second=(1, fastest, 1, 5))

# %% [markdown]
# ### Exercise: first_wait
#
# ●●○ · 5 minutes
#
# `times[i]` is when word `i` was complete. The reader begins word 0 at `times[0]` and reads `words_per_second`. Return
# the index of the first word that is not there when they want it. If they never wait, return `len(times)`.
#
# Why it matters: a long gap late in an answer may cost nothing, an equal gap early may stop the reader. Some
# schedulers use exactly this slack to serve somebody else meanwhile (see the end of this notebook).
#
# <details><summary>Hint 1</summary>Until the first wait the reader keeps a steady pace. When do they want word 1? Word
# 2? Word i?</details>
# <details><summary>Hint 2</summary>Word i is wanted at <code>times[0] + i / words_per_second</code>. A word that comes
# exactly then makes nobody wait.</details>


# %% tags=["exercise"]
def first_wait(times: list[float], words_per_second: float) -> int:
    # SOLUTION
    for i, time in enumerate(times):
        if time > times[0] + i / words_per_second:
            return i
    return len(times)
    # END SOLUTION


# %%
kv.check.first_wait(first_wait)

# %% [markdown]
# ## A longer prompt
#
# Now the same question with three prompts: alone, after the text, and after the text repeated: two copies on a CPU, up
# to fourteen on a GPU. The repeated text says nothing new, but the model has to read every copy.

# %% tags=["nbval-ignore-output"]
room_for = config.max_seq_len // len(lm.encode(TEXT)) - 1  # copies, with tokens to spare for question and answer
copies = 2 if lm.model.device.type == "cpu" else min(14, room_for)  # a GPU needs more before its clock notices
prompts = [QUESTION, PROMPT, (copies - 1) * TEXT + PROMPT]
lengths = [len(lm.prompt_ids(prompt)) for prompt in prompts]
print("tokens in the three prompts:", lengths)
print(f"The longest prompt is {lengths[2] / lengths[1]:.1f} times as long as the middle one.")

# %% [markdown]
# **Predict.** From the middle prompt to the longest: by which factor does TTFT grow? And by which factor do the gaps
# grow? (1: not at all.)

# %%
my_ttft_guess = 2  # PREDICT
my_gap_guess = 2  # PREDICT
kv.results.predict("00.ttft_growth", my_ttft_guess, unit="times", question="Longest against middle prompt: TTFT")
kv.results.predict("00.gap_growth", my_gap_guess, unit="times", question="Longest against middle prompt: gaps")

# %% [markdown]
# **Measure.** Each run makes the same number of tokens, again with the model's own stop token switched off.


# %% tags=["nbval-ignore-output"]
def timed(prompt: str, new_tokens: int):
    """Answer without printing, and return when each token arrived."""
    answer = lm.stream(prompt, new_tokens, stop_ids=())
    for _ in answer:
        pass
    return answer.generation


by_length = {}
for length, prompt in zip(lengths, prompts, strict=True):
    timed(prompt, 2)  # warm up
    run = by_length[length] = timed(prompt, 24)
    print(f"{length:>6,} tokens: TTFT {1000 * run.ttft:8,.1f} ms, median gap {1000 * run.percentile(50):6,.1f} ms")

# %% tags=["nbval-ignore-output"]
alone, middle, longest = by_length.values()
kv.results.measure("00.ttft_growth", longest.ttft / middle.ttft, unit="times")
kv.results.measure("00.gap_growth", longest.percentile(50) / middle.percentile(50), unit="times")
kv.plots.show(
    kv.plots.first_and_gaps({f"{length:,} tokens": run.arrivals for length, run in by_length.items()}),
    alt=f"From the middle to the longest prompt the first token comes {longest.ttft / middle.ttft:.1f} times as late; "
    f"the median gap is {longest.percentile(50) / middle.percentile(50):.2f} times as long.",
)

# %% [markdown]
# Making an answer has two phases with different habits. Reading the prompt is called **prefill**; its time shows in
# TTFT. Making one token after the other is called **decode**; its time shows in the gaps. Notebook 03 will take the
# two apart. First, notebooks 01 and 02 ask a question that this picture raises: the text has hundreds of tokens, so
# why does a new one not cost as much as reading it all again?

# %% [markdown]
# ## One answer is one sample
#
# A computer does other things besides. Run the very same prompt three more times and look at the spread before you
# believe a single number. This course takes medians of several runs where it can.

# %% tags=["nbval-ignore-output"]
runs = [generation, *(timed(PROMPT, 30) for _ in range(3))]
ttfts = [1000 * run.ttft for run in runs]
medians = [1000 * run.percentile(50) for run in runs]
longest_gap = max(max(run.itl) / run.percentile(50) for run in runs)
for name, values in {"TTFT": ttfts, "median gap": medians}.items():
    spread = max(values) / min(values)
    print(f"{name:<10} from {min(values):,.1f} to {max(values):,.1f} ms: the slowest {spread:.2f} times the fastest")
print(f"The longest single gap was {longest_gap:.1f} times the median of its run.")
kv.plots.show(
    kv.plots.first_and_gaps({f"run {number}": run.arrivals for number, run in enumerate(runs, 1)}),
    alt=f"Four runs of one prompt: single gaps scatter, up to {longest_gap:.1f} times the median of their run.",
)

# %% [markdown]
# ## Half a character
#
# One detail of streaming is left. The emoji from the beginning arrives as several tokens, and each carries only some
# of its bytes. A program that turns every token into text at once prints garbage. The package's `StreamDecoder` holds
# incomplete bytes back. Below: the bytes of each token, and the text that can be shown when it arrives.

# %%
decoder = StreamDecoder(lm.tokenizer)
for id in lm.encode("fresh 🥖 at 4"):
    print(f"{str(lm.tokenizer.bytes_of(id)):<22} {decoder.push(id)!r}")

# %% [markdown]
# ### Exercise: hold_back
#
# ●●● · optional, 8 minutes
#
# `held` are the bytes that were waiting, `new` the bytes of the next token. Return two things: the text that can be
# shown now, and the bytes that still have to wait. UTF-8 writes a character in one to four bytes. You may assume that
# nothing but the end of the bytes is incomplete.
#
# Why it matters: without it a � stands in the middle of an answer, but only in languages and emoji that the author of
# the program did not try.
#
# <details><summary>Hint 1</summary><code>(held + new).decode()</code> raises <code>UnicodeDecodeError</code> when the
# last character is incomplete. How many bytes can be waiting at most?</details>
# <details><summary>Hint 2</summary>Try to decode everything, then all but the last byte, then all but the last two,
# then all but the last three.</details>


# %% tags=["exercise"]
def hold_back(held: bytes, new: bytes) -> tuple[str, bytes]:
    # SOLUTION
    data = held + new
    for waiting in range(4):
        cut = len(data) - waiting
        try:
            return data[:cut].decode(), data[cut:]
        except UnicodeDecodeError:
            continue  # the cut is inside a character
    raise ValueError("these bytes are not UTF-8")
    # END SOLUTION


# %%
kv.check.hold_back(hold_back)

# %% [markdown]
# ## The course
#
# Eleven notebooks, three lines of thought. The filled ones are in your folder.

# %% tags=["nbval-ignore-output"]
from kvcourse.paths import course_folder

try:
    folder = course_folder() / "notebooks"
    present = {"00"} | {path.name[:2] for path in folder.glob("[0-9][0-9]_*.ipynb")}
    missing = "in the making"
except FileNotFoundError:  # on Colab this notebook comes alone
    present, missing = {"00"}, "see the repository"

others = "" if len(present) == 11 else f"; the others: {missing}"
kv.plots.show(
    kv.plots.course_map(present, here="00", missing=missing),
    alt=f"The eleven notebooks of the course. In your folder: {', '.join(sorted(present))}{others}.",
)

# %% [markdown]
# ## Summary
#
# What you measured, beside what you guessed:

# %% tags=["nbval-ignore-output"]
kv.results.summary("00")

# %% [markdown]
# The second table says whether a number is usual: it gives the range of what was measured on other machines like this
# one. A time out of its range is no mistake, but worth a second run.
#
# And how good were your guesses? Each figure is divided by what was measured, so that a perfect guess stands at 1. We
# score a notebook by how many guesses are near, that is at most a factor of two too large or too small (a word is
# right or not); the median factor says how far off the middle one was. The farther off, the more there was to learn.

# %% tags=["nbval-ignore-output"]
score = kv.results.score("00")
kv.plots.show(kv.plots.guesses(score), alt=str(score))

# %% [markdown]
# The course tests 29 statements about fast inference. This notebook settles the first: *the first token takes long,
# the next ones follow at the speed of a fast reader.* We call the first token late when it takes at least twice as
# long as a gap, and the next ones fast enough when they come at 5 words a second or more. If that is true only for
# long prompts, or the next ones are fast enough only for an average reader, the verdict names the condition.

# %% tags=["nbval-ignore-output"]
ratios = {length: run.ttft / run.percentile(50) for length, run in by_length.items()}
late = [length for length, ratio in ratios.items() if ratio >= 2]
conditions = []
if late and len(late) < len(ratios):
    conditions.append(f"the first token is late only from about {min(late):,} tokens of prompt on")
if AVERAGE <= rate < FAST:
    conditions.append("the next ones keep up with an average reader, but not with a fast one")

wrong = not late or rate < AVERAGE
verdict = "wrong as said" if wrong else "holds with a condition" if conditions else "holds"
because = "First token against a gap: " + ", ".join(f"{r:.1f} times at {n:,} prompt tokens" for n, r in ratios.items())
because += f". Then {rate:.1f} words a second, {rate / FAST:.1f} times a fast reader's speed."
because += "".join(f" Condition: {condition}." for condition in conditions)
kv.results.verdict(1, verdict, because)

# %% tags=["nbval-ignore-output"]
kv.check.progress("00")

# %% [markdown]
# **What to remember**
#
# 1. A model reads and writes tokens, pieces of bytes. Words and characters are our business, not the model's.
# 2. TTFT is the wait for the first token, ITL a gap after it, TPOT the mean gap: (total − TTFT) / (n − 1).
# 3. A longer prompt makes TTFT longer. It changes the gaps much less.
# 4. A reader waits only when they have caught up; before that, a long gap costs nothing.
# 5. One run is one sample. Give a median and a high percentile, and say on which machine.
#
# ## What the field does today
#
# - The serving benchmark of vLLM (`vllm bench serve`) reports mean, median and 99th percentile of TTFT, TPOT and ITL
#   ([vLLM documentation](https://docs.vllm.ai/en/latest/benchmarking/cli/)).
# - MLPerf Inference limits TTFT and TPOT. For Llama 2 70B on a server (version 4.0) the 99th percentile of TTFT must
#   stay within 2 s, that of TPOT within 200 ms, which is about 240 words a minute: reading speed ([MLCommons
#   2024](https://mlcommons.org/2024/03/mlperf-llama2-70b/)). The interactive version added in 5.0 asks for 450 ms and
#   40 ms ([MLCommons 2025](https://mlcommons.org/2025/04/llm-inference-v5/)).
# - DistServe ([arXiv 2401.09670](https://arxiv.org/abs/2401.09670)) gives TTFT and TPOT a limit each and runs prefill
#   and decode on different GPUs, so that one does not disturb the other.
# - Andes ([arXiv 2404.16283](https://arxiv.org/abs/2404.16283)) schedules by the reader: a user who still has words to
#   read can wait, one who has caught up cannot. That is `first_wait`, put to work.
#
# **Next:** notebook 01 takes the loop apart. It makes text in the slowest possible way, recomputing everything for
# each token, and counts what that costs.
