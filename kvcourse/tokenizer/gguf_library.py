"""The tokenizer of a GGUF file, built for the `tokenizers` library, as tokenizer.json describes it: for other programs.

Here control tokens are in the library too, and the text of a control token is read as one unless the library is told
otherwise, as other programs expect.
"""

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from kvcourse.tokenizer.pretokenizers import Cut
from kvcourse.tokenizer.spelling import SPACE


def byte_level_library(
    tokens: list[str], merges: list[tuple[str, str]], cut: Cut, control: list[str], user_defined: list[str]
) -> tokenizers.Tokenizer:
    """Byte-level BPE with `merges` in their order, cut into words by `cut`."""
    library = tokenizers.Tokenizer(models.BPE(vocab=ids_of(tokens), merges=merges, ignore_merges=cut.whole_words))
    library.normalizer = normalizers.NFC() if cut.composed else None
    library.pre_tokenizer = cut.pre_tokenizer
    library.decoder = decoders.ByteLevel()
    return with_added(library, control, user_defined)


def sentencepiece_library(
    tokens: list[str],
    scores: dict[str, float],
    unknown: str | None,
    add_space: bool,
    control: list[str],
    user_defined: list[str],
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: each way to make one of the tokens in `scores` of two others is a merge, the best score first.

    Raises `ValueError` for two tokens with one score, of which SentencePiece joins the leftmost: merges have an order;
    and for a vocabulary without which the library would drop characters silently.
    """
    ids, apart = ids_of(tokens), {token for token in user_defined if SPACE not in token}  # cut out before the merging
    if unknown is None and not all(f"<0x{byte:02X}>" in ids for byte in range(256)):
        raise ValueError(
            "The vocabulary has neither a token for each byte nor one for what is unknown: text would be lost."
        )
    joined = sorted((t for t in scores if len(t) > 1 and t not in apart), key=lambda t: -scores[t])
    for a, b in zip(joined, joined[1:], strict=False):
        if scores[a] == scores[b]:
            raise ValueError(f"Tokens {a!r} and {b!r} have the same score, and tokenizer.json has merges in an order.")
    merges = [(t[:i], t[i:]) for t in joined for i in range(len(t) - 1, 0, -1) if t[:i] in scores and t[i:] in scores]
    bpe = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if add_space else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * add_space)
    return with_added(library, control, user_defined)


def ids_of(tokens: list[str]) -> dict[str, int]:
    ids = {token: id for id, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for id, token in enumerate(tokens) if ids[token] != id)
        raise ValueError(f"The vocabulary has the token {twice!r} twice, and tokenizer.json has each token once.")
    return ids


def with_added(library: tokenizers.Tokenizer, control: list[str], user_defined: list[str]) -> tokenizers.Tokenizer:
    """The library's tokenizer, in which these tokens are one token wherever they stand."""
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    library.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])
    return library
