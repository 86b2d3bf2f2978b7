"""A model together with its tokenizer: text in, text out."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcourse.config import ModelConfig
from kvcourse.device import resolve
from kvcourse.generation import decode, warm_up
from kvcourse.metrics import Generation
from kvcourse.model import Transformer
from kvcourse.texts import Texts
from kvcourse.tokenizer import StreamDecoder, Tokenizer
from kvcourse.weights.fetch import COURSE_MODELS, meant, model_file
from kvcourse.weights.fields import short
from kvcourse.weights.hf_folder import Folder
from kvcourse.weights.hub import hub_folder

COMPILED = ("float32", "bfloat16", "float16", "int8", "int4")  # the kinds of weights that `kv.compiled` makes


@dataclass(frozen=True)
class LM:
    """A language model that can be talked to: `model` computes, `tokenizer` translates between text and ids.

    A checkpoint without a tokenizer has `tokenizer` None: token ids work, and text raises `ValueError`.
    """

    model: Transformer
    tokenizer: Tokenizer | None
    name: str

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def text(self) -> Tokenizer:
        """The tokenizer, or `ValueError` when the checkpoint brought none."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name} came without a tokenizer: give token ids to lm.model, or add its tokenizer.")
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without a chat template. Of control tokens there are only those that the model's own
        tokenizer puts around every text: a course model's ids begin with its `<|end|>`, as its training did."""
        return self.text.encode(text)

    def decode(self, ids) -> str:
        """Text of token ids, without control tokens such as the end-of-answer mark."""
        return self.text.decode(ids)

    def chat(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation up to where the model's answer begins, by the model's chat template."""
        return self.text.chat(messages)

    def prompt_ids(self, prompt: str | list[dict]) -> list[int]:
        """Ids that `stream` starts from: text given to a chat model is one user's message."""
        if isinstance(prompt, str) and self.text.chat_template is None:
            return self.encode(prompt)
        return self.chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    def stream(self, prompt: str | list[dict], max_new_tokens: int = 256, *, stop=None, **options) -> "TextStream":
        """Answer a text or a conversation, piece by piece:

            answer = lm.stream("Why is the sky blue?")
            for piece in answer:
                print(piece, end="", flush=True)
            answer.generation.ttft

        The answer ends at one of the model's own stop tokens (`stop_ids=` overrides them), before one of the strings
        in `stop` (None: there are none), or after `max_new_tokens`. Other options are those of `generate`:
        temperature, top_k, top_p, seed, cache. Requests that cannot work raise `ValueError` here, not at the first
        piece.
        """
        ids = self.prompt_ids(prompt)
        options = {"stop_ids": self.tokenizer.stop_ids} | options
        decoder = StreamDecoder(self.tokenizer, () if stop is None else stop)
        return TextStream(Texts(self.model, ids, max_new_tokens, **options), decoder)


class TextStream:
    """An answer being written: iterate for its pieces of text. A token is computed when a piece is asked for.

    After the loop `generation` has the tokens and times; a slow reader's time counts in the gaps.
    """

    def __init__(self, texts: Texts, decoder: StreamDecoder):
        self.texts, self.decoder = texts, decoder
        self.pieces = self.run()

    @property
    def generation(self) -> Generation:
        return self.texts.rows[0].generation

    def __iter__(self):
        return self

    def __next__(self) -> str:
        return next(self.pieces)

    def run(self):
        for _ in decode(self.texts.model, self.texts):
            piece = self.decoder.push(self.generation.ids[-1])
            if piece:
                yield piece
            if self.decoder.stopped:
                self.generation.stop_reason = "stop"
                return
        rest = self.decoder.flush()
        if self.decoder.stopped:
            self.generation.stop_reason = "stop"
        if rest:
            yield rest


def load_model(
    name: str | os.PathLike, dtype: torch.dtype | str | None = None, device=None, *, compiled: str | bool = False
) -> LM:
    """Load a model and run it once, so that the first timing is not a first run. `name` is one of

    - a course model: `"tiny-mha"`, `"tiny-gqa"`, `"tiny-mqa"` or `"tiny-window"`, which travel with the course, or the
      chat model `"smollm2-135m"`, fetched if need be;
    - a folder with a Hugging Face checkpoint (`config.json` and safetensors), or a `.gguf` file;
    - the id of such a checkpoint on the Hugging Face hub, `"owner/name"`, downloaded if need be.

    With `KVCOURSE_OFFLINE=1` nothing is downloaded: a course model that is on this computer is used, and where it is
    not, `"tiny-gqa"` is loaded in its place; a printed line says so, and the `name` of what is returned is then
    `"tiny-gqa"`. Any other name means that model or an error.

    `compiled=True` gives the model as `kv.compiled` makes it, `compiled="int8"` with that kind of weights.

    Models of the Llama, Mistral, Qwen2 and Qwen3 families can be run. dtype and device default to those the course uses
    on this machine. Raises `ValueError` for an unknown name, a damaged file or a model that this package would compute
    wrongly, `FileNotFoundError` for a missing file, `RuntimeError` for what could not be downloaded, or overflows when
    it is run.
    """
    device, dtype = resolve(device, dtype)
    if not isinstance(compiled, bool):
        require_kind(compiled)
    if device.type == "meta":
        raise ValueError('device="meta" has shapes without numbers, so a model cannot be loaded there: use "cpu".')
    path = find_model(name)
    if path.is_dir():
        checkpoint = Folder(path)
        tokenizer = Tokenizer.from_folder(path)
    else:
        from kvcourse.weights.gguf_file import GGUFModel  # imports a library that takes a while

        checkpoint = GGUFModel(path)
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    config = checkpoint.config
    if tokenizer is not None:
        fit(tokenizer, config.vocab_size, path)
    state = checkpoint.read(dtype, device)  # the long part comes after everything that can be refused
    model = Transformer(config, device="meta", dtype=dtype)  # shapes without memory: the weights are put in place
    model.load_state_dict(state, assign=True)
    lm = LM(model, tokenizer, short_name(name, path))
    if compiled is not False:
        from kvcourse.fast.make import compiled as make

        lm = make(lm, None if compiled is True else compiled)
    warm_up(lm.model)
    return lm


def require_kind(compiled: str) -> str:
    """`compiled` if it is a kind of weights that `kv.compiled` knows, else `ValueError`: before a model is loaded."""
    if compiled not in COMPILED:
        raise ValueError(f"compiled={compiled!r} must be one of {', '.join(COMPILED)}, or True: as the weights are.")
    return compiled


def fit(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """Give the tokenizer all ids of the model at `path`; `ValueError` when it has ids that the model lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{path} has {tokenizer.vocab_size} tokens but embeddings for only {vocab_size}.")
    bad = max(tokenizer.stop_ids, default=0)
    if bad >= vocab_size:
        raise ValueError(
            f"{path}: eos_token_id {bad} in generation_config.json or config.json is outside the vocabulary: ids go "
            f"from 0 to {vocab_size - 1}."
        )
    tokenizer.extend(vocab_size)


def find_model(name: str | os.PathLike) -> Path:
    """The file or folder of a model given by name, path or hub id. A path that exists comes before a hub id."""
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str):
        raise ValueError(f"A model is given by its name or path, a string; got {name!r}.")
    if text in COURSE_MODELS:
        return model_file(text)
    path = local(text)
    if text and os.path.exists(path):  # Path.exists fails on a name that is too long
        if path.suffix in (".json", ".safetensors") and path.is_file():
            raise ValueError(f"{path} is one file of a checkpoint: give the folder that it is in, {path.parent}.")
        return path
    if isinstance(name, str) and HUB_ID.fullmatch(text):
        return from_hub(text)
    if path.suffix == ".gguf" or len(path.parts) > 1 or not isinstance(name, str):
        raise FileNotFoundError(f"There is no file or folder {path}: give a .gguf file or a Hugging Face folder.")
    raise ValueError(
        f"There is no model {short(text)}.{meant(text)} Give one of {', '.join(COURSE_MODELS)}, a folder with a "
        "Hugging Face checkpoint, a .gguf file, or a hub id such as owner/name."
    )


def local(text: str) -> Path:
    return Path(os.path.expanduser(text))  # Path.expanduser fails where there is no such user


def from_hub(repo_id: str) -> Path:
    """The folder of a checkpoint of the hub. What goes wrong may be that a path was meant, so it is said too."""
    try:
        return hub_folder(repo_id)
    except (ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"{error} (There is no folder {repo_id} here, so it was taken for a model on the hub.)") from error


# Two parts of letters, digits and "-_.", which begin with a letter or digit: neither "./name" nor "../name".
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)")


def short_name(name: str | os.PathLike, path: Path) -> str:
    """What to call a model: the name it was asked for by, or its file's or folder's. What is loaded in place of another
    course model is called what it is."""
    if str(name) in COURSE_MODELS and path.is_dir():
        return path.name
    if str(name) in COURSE_MODELS or not local(os.fspath(name)).exists():
        return str(name)
    return path.stem if path.is_file() else path.resolve().name
