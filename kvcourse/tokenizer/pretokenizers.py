"""How text is cut into words before byte-level BPE merges inside each word, by the name GGUF files give it
(`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizer.json files; llama.cpp lists them in src/llama-vocab.cpp
(`llm_tokenizer_bpe`), where "default" is its own invention for files that name nothing better. llama.cpp's pattern for
"tekken" only approximates the original (it knows upper and lower case in ASCII alone); here it is the original.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

DIGIT, LETTERS, SYMBOLS, SPACES = r"\p{N}", r"\p{L}+", r"[^\s\p{L}\p{N}]+", r"\s+(?!\S)|\s+"
GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{LETTERS}| ?\p{{N}}+| ?{SYMBOLS}|{SPACES}"
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SIGN = r"[^\r\n\p{L}\p{N}]?"  # one that a word takes along
BREAKS = rf"\s*[\r\n]+|{SPACES}"


def modern(digits: str) -> str:
    """cl100k's pattern: a word takes one sign before it along, and line breaks stay with the signs before them."""
    return rf"{CONTRACTION}|{SIGN}{LETTERS}|{digits}| ?{SYMBOLS}[\r\n]*|{BREAKS}"


TEKKEN = rf"{SIGN}{UPPER}*{LOWER}+|{SIGN}{UPPER}+{LOWER}*|{DIGIT}| ?{SYMBOLS}[\r\n/]*|{BREAKS}"


@dataclass(frozen=True)
class Cut:
    """One way to cut. Each pattern cuts the pieces that those before it left; both what it matches and what lies
    between are pieces.

    `whole_words`: a word that is in the vocabulary is one token, whatever the merges say. `composed`: accents are
    joined with their letters first (Unicode NFC), as Qwen's tokenizer.json does; llama.cpp leaves that out.
    `add_bos`: a text begins with the BOS token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    composed: bool = False
    add_bos: bool = False

    @property
    def pre_tokenizer(self):
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA3 = Cut((modern(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
CUTS = {
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Cut((GPT2,)),
    "smollm": Cut((DIGIT, GPT2)),  # every digit is a word: 123 is always three tokens
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "smaug-bpe": Cut((modern(r"\p{N}{1,3}"),)),
    "qwen2": Cut((modern(DIGIT),), composed=True),
    "deepseek-r1-qwen": Cut((modern(DIGIT),)),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", DIGIT)),
    "tekken": Cut((TEKKEN,), whole_words=True, add_bos=True),
}
