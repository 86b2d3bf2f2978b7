"""A tokenizer as the files of a Hugging Face folder: the way back of `json_folder`."""

from collections.abc import Iterable

import tokenizers
from tokenizers import processors

from kvcourse.model_folder import as_text
from kvcourse.tokenizer.base import Tokenizer


def tokenizer_files(tokenizer: Tokenizer | None, max_seq_len: int) -> dict[str, bytes]:
    """{name: content} of the files that say how a model reads and writes text; none for a model without a tokenizer.

    Raises `ValueError` for a tokenizer that tokenizer.json has no form for.
    """
    if tokenizer is None:
        return {}
    library = tokenizer.library()
    if library.post_processor is None and (tokenizer.before or tokenizer.after):
        library.post_processor = around(library, tokenizer.before, tokenizer.after)
    ends = sorted(tokenizer.stop_ids, key=lambda id: (id != tokenizer.eos_id, id))
    others = [token for token in tokenizer.control if token not in tokenizer.named.values()]
    more = {"additional_special_tokens": others, "chat_template": tokenizer.chat_template}
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return library_files(library, tokenizer.named, max_seq_len, ids, **more)


def library_files(
    library: tokenizers.Tokenizer, named: dict[str, str], max_seq_len: int, ids: dict, **more
) -> dict[str, bytes]:
    """The files for a tokenizer of the `tokenizers` library. `named`: {"bos_token": "<s>", ...}; `ids`: the content of
    generation_config.json; `more` fields for tokenizer_config.json. Empty fields are left out."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_seq_len,
        **{name: value for name, value in more.items() if value},
    }
    return {
        "generation_config.json": as_text({name: id for name, id in ids.items() if id not in (None, [])}),
        "tokenizer.json": (library.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": as_text(settings),
    }


def around(library: tokenizers.Tokenizer, before: Iterable[int], after: Iterable[int]):
    """What puts these ids around every text."""
    start, end = ([library.id_to_token(id) for id in ids] for ids in (before, after))
    return processors.TemplateProcessing(
        single=[*start, "$A", *end],
        pair=[*start, "$A", *end, *(f"{token}:1" for token in start), "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=list(zip([*start, *end], [*before, *after], strict=True)),
    )
