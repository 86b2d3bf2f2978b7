"""The tokenizer that a GGUF file carries in its metadata, under `tokenizer.ggml.*`.

Two kinds: "gpt2", byte-level BPE with a list of merges in the order they were learned (Llama 3, Qwen, SmolLM), and
"llama", SentencePiece BPE with a score for each token (Llama 2, Mistral). What stands for a missing key is what
llama.cpp uses (src/llama-vocab.cpp, `llama_vocab::impl::load`).
"""

import unicodedata

import tokenizers
from tokenizers import models

from kvcourse.tokenizer.gguf_library import byte_level_library, sentencepiece_library
from kvcourse.tokenizer.pretokenizers import CUTS
from kvcourse.tokenizer.sentencepiece import ScoredMerges
from kvcourse.tokenizer.spelling import byte_level, byte_named, missing_bytes, spaced
from kvcourse.tokenizer.text import any_of, check_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of token in `tokenizer.ggml.token_type`
# Many files name one end only, though the model writes another as well: a chat model ends its turn, not the text.
STOP_TOKENS = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"}


def read_gguf_vocabulary(metadata: dict) -> dict | None:
    """The fields of a `Tokenizer`; None when the file says nothing about one. Raises `ValueError`."""
    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if not ggml or ggml.get("model") in ("none", "no_vocab"):
        return None
    kinds = {"gpt2": byte_level_vocabulary, "llama": sentencepiece_vocabulary}
    model = required(ggml, "model")
    if model not in kinds:
        raise ValueError(f"Tokenizer model {model!r} is not supported: this package reads {' and '.join(kinds)}.")
    tokens = list(required(ggml, "tokens"))
    types = list(ggml.get("token_type", [NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise ValueError(
            f"The file lists {len(tokens)} tokens, but tokenizer.ggml.token_type has {len(types)} entries."
        )
    control = of_kind(tokens, types, CONTROL, UNKNOWN)
    fields, (default_bos, default_eos, add_bos) = kinds[model](ggml, tokens, types)
    bos_id, eos_id = id_of(ggml, "bos", default_bos, len(tokens)), id_of(ggml, "eos", default_eos, len(tokens))
    stop_ids = {id_of(ggml, end, None, len(tokens)) for end in ("eot", "eom")}  # end of turn, of message
    named = {"bos_token": bos_id, "eos_token": eos_id}
    return fields | {
        "tokens": [*tokens],  # a list of its own: it may be extended
        "control": control,
        "bos_id": bos_id,
        "eos_id": eos_id,
        "before": edge(ggml, "bos", bos_id, add_bos),
        "after": edge(ggml, "eos", eos_id, False),
        "stop_ids": {eos_id, *stop_ids, *map(control.get, STOP_TOKENS)} - {None},
        "chat_template": metadata.get("tokenizer.chat_template"),
        "named": {name: tokens[id] for name, id in named.items() if id is not None},
    }


def byte_level_vocabulary(ggml: dict, tokens: list[str], types: list[int]) -> tuple[dict, tuple]:
    """Byte-level BPE. The merging is done by the `tokenizers` library.

    Returns fields, and the defaults: BOS id, EOS id, whether a text begins with BOS."""
    pre = ggml.get("pre")
    if pre not in CUTS:
        raise ValueError(f"Pre-tokenizer {pre!r} is not supported: this package knows {', '.join(CUTS)}.")
    cut = CUTS[pre]
    # Only normal tokens are written in the byte alphabet; unused ones are holes in the vocabulary, filled with names.
    token_bytes = [byte_level(t) if kind == NORMAL else t.encode() for t, kind in zip(tokens, types, strict=True)]
    missing = missing_bytes(token_bytes)
    merges = [tuple(merge.split(" ")) for merge in required(ggml, "merges")]
    control, user_defined = of_kind(tokens, types, CONTROL, UNKNOWN), of_kind(tokens, types, USER_DEFINED)
    ids = {token: id for id, token in enumerate(tokens) if types[id] not in (CONTROL, UNKNOWN)}  # never from text
    try:
        library = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=cut.whole_words))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"The file's tokenizer.ggml.merges do not fit its tokens: {error}.") from error
    library.pre_tokenizer = cut.pre_tokenizer

    def merge(text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if cut.composed else text
        check_bytes(text, missing)
        return library.encode(text, add_special_tokens=False).ids

    fields = {
        "token_bytes": token_bytes,
        "merge": keep_whole(user_defined, merge),
        "library": lambda: byte_level_library(tokens, merges, cut, [*control], [*user_defined]),
    }
    return fields, (None, None, cut.add_bos)


def sentencepiece_vocabulary(ggml: dict, tokens: list[str], types: list[int]) -> tuple[dict, tuple]:
    """SentencePiece BPE. Text that spells a control token or a byte's name ("<0x0A>") merges to neither."""
    scores = required(ggml, "scores")
    if len(scores) != len(tokens):
        raise ValueError(f"The file lists {len(tokens)} tokens, but tokenizer.ggml.scores has {len(scores)} entries.")
    names = {id: byte_named(token) for id, token in enumerate(tokens) if types[id] == BYTE}
    if None in names.values():
        bad = next(tokens[id] for id, byte in names.items() if byte is None)
        raise ValueError(f"Token {bad!r} is marked as a byte, but a byte's token is written like '<0x0A>'.")
    token_bytes = [
        names.get(id) or (spaced(token) if types[id] == NORMAL else token.encode()) for id, token in enumerate(tokens)
    ]
    control, user_defined = of_kind(tokens, types, CONTROL, UNKNOWN), of_kind(tokens, types, USER_DEFINED)
    unknown = next(iter(of_kind(tokens, types, UNKNOWN)), None)
    ids = of_kind(tokens, types, NORMAL, USER_DEFINED)
    scored = {token: float(scores[id]) for token, id in ids.items()}
    pieces = ScoredMerges(ids, scored, {byte[0]: id for id, byte in names.items()})
    add_space = bool(ggml.get("add_space_prefix", True))

    def merge(text: str) -> list[int]:  # a space comes before every stretch of text, as in llama.cpp
        return pieces(f" {text}" if add_space else text)

    fields = {
        "token_bytes": token_bytes,
        "merge": keep_whole(user_defined, merge),
        "library": lambda: sentencepiece_library(tokens, scored, unknown, add_space, [*control], [*user_defined]),
        "added_space": add_space,
    }
    return fields, (1, 2, True)


def of_kind(tokens: list[str], types: list[int], *kinds: int) -> dict[str, int]:
    """{token: id} of the tokens of these kinds."""
    return {token: id for id, token in enumerate(tokens) if types[id] in kinds}


def keep_whole(user_defined: dict[str, int], merge):
    """`merge` for text in which a user-defined token is one token wherever it stands."""
    whole = any_of(user_defined)

    def ids_of(text: str, first: bool) -> list[int]:
        parts = whole.split(text)  # one group in the pattern: between, match, between, match, ..., between
        return [id for i, part in enumerate(parts) if part for id in ([user_defined[part]] if i % 2 else merge(part))]

    return ids_of


def required(ggml: dict, name: str):
    value = ggml.get(name)
    if value is None or len(value) == 0:
        raise ValueError(f"The file's metadata has no tokenizer.ggml.{name}: it carries no usable tokenizer.")
    return value


def id_of(ggml: dict, name: str, default: int | None, count: int) -> int | None:
    id = ggml.get(f"{name}_token_id", default)
    if id is not None and not 0 <= id < count:
        raise ValueError(f"tokenizer.ggml.{name}_token_id is {id}, but the file has only {count} tokens.")
    return id


def edge(ggml: dict, end: str, id: int | None, default: bool) -> list[int]:
    """The ids that `encode` puts at this end of a text."""
    if not ggml.get(f"add_{end}_token", default):
        return []
    if id is None:
        raise ValueError(f"This tokenizer puts a token at the {end.upper()}, but has no tokenizer.ggml.{end}_token_id.")
    return [id]
