"""The same file in llama.cpp: how it continues a text, and how far the course's own model agrees.

llama.cpp comes as the Python package `xllamacpp`, with the library inside. It computes with the packed weights as they
are, and rounds the activations for that: to 8 bits in groups of 32 before a product with Q4_0, Q4_1 or Q8_0, and to
float16 with F16 (`vec_dot_type` in ggml's src/ggml-cpu/ggml-cpu.c). So logits differ a little, and greedy texts part
where the two best tokens are closer than that.
"""

import importlib.util
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcourse.generation import generate
from kvcourse.model import Transformer
from kvcourse.require import require_whole
from kvcourse.weights.gguf_file import open_gguf


@dataclass(frozen=True)
class Continuation:
    """What llama.cpp wrote: `tokens`, and for each the log-probabilities of the likeliest tokens, {id: log p}."""

    tokens: list[int]
    log_probs: list[dict[int, float]]


@dataclass(frozen=True)
class Agreement:
    """Two greedy continuations of a text. The first `same` tokens are equal.

    `difference`: the largest difference of a log-probability between the two programs, at any of the steps up to where
    they part, among llama.cpp's likeliest tokens. `gap`, where they part: by how much the course's model scores its own
    token above llama.cpp's; `their_gap`: by how much llama.cpp scores its own token above the course's (None when that
    is not among its likeliest). Both gaps are None when all tokens are equal.
    """

    ours: list[int]
    theirs: list[int]
    same: int
    difference: float
    gap: float | None
    their_gap: float | None


def continue_with_llama_cpp(path: str | os.PathLike, ids, n: int, top: int = 10) -> Continuation:
    """Let llama.cpp continue the text `ids` greedily by n tokens, or up to the model's token for the end, which is then
    the last. Keys and values are kept in float32, and its messages are switched off.

    `top` is how many of the likeliest tokens are given at each step. Raises `ValueError` for ids that are no text of
    the model or do not fit its context with n more, and for a file that is damaged or that llama.cpp cannot run,
    `FileNotFoundError` when there is none, `RuntimeError` when xllamacpp is not installed.
    """
    check_installed()
    import xllamacpp

    n, top, path = require_whole("n", n), require_whole("top", top), Path(path)
    ids = [int(id) for id in ids]
    metadata, _ = open_gguf(path)
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length", 0)
    if not ids or len(ids) + n > context:
        raise ValueError(
            f"{len(ids)} tokens and {n} new ones must be at least 1 and 1, and fit a context of {context}."
        )
    require_tokenizer(path, metadata)
    settings = base_settings(path, context)
    settings.warmup = False
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = start_server(settings)
    answer = server.handle_completions(
        {"prompt": ids, "max_tokens": n, "temperature": 0, "logprobs": top, "cache_prompt": False}
    )
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if "error" in answer:
        raise ValueError(f"llama.cpp does not continue this text: {answer['error']['message']}.")
    steps = answer["choices"][0]["logprobs"]["content"]
    likeliest = [{entry["id"]: entry["logprob"] for entry in step["top_logprobs"]} for step in steps]
    return Continuation([step["id"] for step in steps], likeliest)


def main_type(tensors: dict) -> str:
    """The type that most bytes of a file's tensors are in, "Q4_1" say."""
    sizes = Counter()
    for tensor in tensors.values():
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return sizes.most_common(1)[0][0]


def require_tokenizer(path: Path, metadata: dict) -> None:
    """Raise `ValueError` for a file without a tokenizer."""
    if metadata.get("tokenizer.ggml.model", "none") == "none":
        raise ValueError(f"{path} has no tokenizer, and llama.cpp ends the program over that: write it with source=.")


def base_settings(path: Path, context: int):
    """llama.cpp's own settings, for the file at `path`, one text of at most `context` tokens, on the CPU with as many
    threads as PyTorch has, and silent."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.verbosity = context, 1, 0, -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    return settings


def start_server(settings):
    """llama.cpp with its model loaded. It is asked from here; while it lives, it listens on a free port of this
    computer too. Raises `ValueError` for a file that it cannot run."""
    import xllamacpp

    try:
        return xllamacpp.Server(settings)
    except RuntimeError as error:
        path = settings.model.path
        raise ValueError(f"llama.cpp cannot run {path}: its architecture or a tensor is not as it expects.") from error


def check_installed() -> None:
    """Raise `RuntimeError` with what to do unless xllamacpp is installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise RuntimeError("xllamacpp, which has llama.cpp inside, is not installed: pip install xllamacpp")


@torch.inference_mode()
def agreement(model: Transformer, ids, theirs: Continuation) -> Agreement:
    """Continue `ids` greedily by as many tokens as `theirs` has, and compare."""
    ids = [int(id) for id in ids]
    ours = generate(model, ids, len(theirs.tokens)).ids
    pairs = zip(ours, theirs.tokens, strict=True)
    same = next((i for i, (our, their) in enumerate(pairs) if our != their), len(ours))
    logits = model(torch.tensor([ids + ours[:same]]))[0, len(ids) - 1 :].float()
    steps = list(zip(logits.log_softmax(-1), theirs.log_probs, strict=False))  # up to where they part
    difference = max(abs(scores[id].item() - p) for scores, likeliest in steps for id, p in likeliest.items())
    gap = their_gap = None
    if same < len(ours):
        (scores, likeliest), our, their = steps[same], ours[same], theirs.tokens[same]
        gap = (scores[our] - scores[their]).item()
        their_gap = likeliest[their] - likeliest[our] if our in likeliest else None
    return Agreement(ours, theirs.tokens, same, difference, gap, their_gap)
