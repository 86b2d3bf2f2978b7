"""A byte-safe vocabulary, learned from the stories.

Byte-pair encoding (arXiv 1508.07909, section 3.2) on bytes: all 256 of them are in the vocabulary, so any text can be
written and comes back exactly, words the corpus never had included. Made with the `tokenizers` library.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|end|>"  # begins every text and ends it
END_ID = 0


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """The tokenizer learned from `texts`. The same texts give the same tokenizer. Token 0 is `END`, and what is encoded
    begins with it, as in `transformers`, unless `add_special_tokens=False`.

    Raises `ValueError` when the vocabulary is too small for the bytes, or the texts too few to fill it.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size} must be at least 257: 256 bytes and {END}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"The texts gave {tokenizer.get_vocab_size()} of {vocab_size} tokens; give more of them.")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, END_ID)]
    )
    return tokenizer
