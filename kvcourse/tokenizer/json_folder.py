"""The tokenizer in a Hugging Face folder: `tokenizer.json` and what the files beside it add.

`tokenizer.json` is run by the library that wrote it (`tokenizers`), whatever is in it: byte-level BPE, SentencePiece
BPE with byte fallback, Unigram. The other files say which tokens begin and end a text, and hold the chat template.
"""

import json
import os
from pathlib import Path

import tokenizers

from kvcourse.tokenizer.json_files import end_ids, listed_tokens, named_tokens, read_json, read_template
from kvcourse.tokenizer.json_library import Spelling, build, merge_with

OTHER_FORMATS = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")


def read_folder_vocabulary(path: str | os.PathLike) -> dict | None:
    """The fields of a `Tokenizer`; None when the folder has no tokenizer files. Raises `ValueError`."""
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        refuse_other_formats(folder)
        return None
    data = read_json(file)
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    named = named_tokens(config, folder / "tokenizer_config.json")
    control = [*named.values(), *listed_tokens(config, folder / "tokenizer_config.json")]
    library = build(control, file)
    spelling = Spelling(data.get("decoder"), file)
    added = library.get_added_tokens_decoder()
    special = {id: token for id, token in added.items() if token.special}
    for token in special.values():
        if token.single_word:
            raise ValueError(f"{file}: control token {token.content!r} has single_word, which is not supported.")
    vocabulary = library.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values()) + 1)  # some vocabularies have holes
    for token, id in vocabulary.items():
        tokens[id] = token
    token_bytes = [spelling.bytes_of(token, whole=id in special) for id, token in enumerate(tokens)]
    bos_id, eos_id = (id_of(named.get(name), name, library, folder) for name in ("bos_token", "eos_token"))
    ends, (before, after) = end_ids(folder), edges(library, config, bos_id, eos_id)
    return {
        "tokens": tokens,
        "token_bytes": token_bytes,
        "control": {token.content: id for id, token in special.items()},
        "merge": merge_with(library, data, token_bytes, spelling, file),
        "library": lambda: tokenizers.Tokenizer.from_str(library.to_str()),
        "before": before,
        "after": after,
        "bos_id": bos_id,
        "eos_id": eos_id if eos_id is not None else next(iter(ends), None),
        "stop_ids": {*ends, eos_id} - {None},
        "chat_template": read_template(folder, config),
        "named": named,
        "added_space": spelling.added_space,
        "strips_left": frozenset(token.content for token in special.values() if token.lstrip),
        "strips_right": frozenset(token.content for token in special.values() if token.rstrip),
    }


def refuse_other_formats(folder: Path) -> None:
    found = next((name for name in OTHER_FORMATS if (folder / name).is_file()), None)
    if found:
        raise ValueError(
            f"{folder} has its tokenizer only as {found}, and this package reads tokenizer.json. With the transformers "
            f"library, AutoTokenizer.from_pretrained({json.dumps(str(folder))}).save_pretrained(...) writes one."
        )


def id_of(token: str | None, name: str, library: tokenizers.Tokenizer, folder: Path) -> int | None:
    id = None if token is None else library.token_to_id(token)
    if token is not None and id is None:
        raise ValueError(f"{folder / 'tokenizer_config.json'} names {name} {token!r}, which tokenizer.json lacks.")
    return id


def edges(library: tokenizers.Tokenizer, config: dict, bos_id: int | None, eos_id: int | None):
    """The ids that `encode` puts before and after a text.

    The post-processor in tokenizer.json says it. Only where there is none the flags in tokenizer_config.json count:
    they are older, and transformers (since version 5) ignores them beside a tokenizer.json.
    """
    if library.post_processor is None:
        return edge(config, "bos", bos_id), edge(config, "eos", eos_id)
    encoding = library.encode("a", add_special_tokens=True)
    ids, added = encoding.ids, encoding.special_tokens_mask
    start = added.index(0) if 0 in added else len(ids)
    return ids[:start], [id for id, mask in zip(ids[start:], added[start:], strict=True) if mask]


def edge(config: dict, end: str, id: int | None) -> list[int]:
    if not config.get(f"add_{end}_token"):
        return []
    if id is None:
        raise ValueError(f"tokenizer_config.json has add_{end}_token, but names no {end}_token.")
    return [id]
