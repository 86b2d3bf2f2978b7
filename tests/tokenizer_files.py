"""Small tokenizers of every kind for the tests, as GGUF metadata and as Hugging Face folders."""

import json
from functools import cache
from pathlib import Path

import tokenizers
from gguf_files import CHAT_TEMPLATE, trained_bpe
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

DATA = Path(__file__).parent / "data"
SPM = json.loads((DATA / "sentencepiece.json").read_text(encoding="utf-8"))
CUTS = json.loads((DATA / "pre_tokenizers.json").read_text(encoding="utf-8"))
TEXTS = SPM["texts"]
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def cut_fields(pre: str, **changes) -> dict:
    """GGUF metadata with the vocabulary of data/pre_tokenizers.json and two control tokens after it."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in CUTS["merges"])]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "<|begin|>", "<|im_end|>"],
        "token_type": [1] * len(tokens) + [3, 3],
        "merges": CUTS["merges"],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    }
    return ggml(fields, changes)


def sentencepiece_fields(**changes) -> dict:
    """GGUF metadata of the SentencePiece model in data/sentencepiece.json, with a chat template."""
    fields = {"model": "llama", "tokens": SPM["tokens"], "scores": SPM["scores"], "token_type": SPM["types"]}
    return ggml(fields, changes) | {"tokenizer.chat_template": LLAMA2_TEMPLATE}


def ggml(fields: dict, changes: dict) -> dict:
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items() if value is not None}


# --- folders ---


@cache
def byte_level_json() -> str:
    """The trained byte-level BPE of gguf_files, cut and ended as Llama 3's: a template puts a token before the text."""
    library = tokenizers.Tokenizer.from_str(trained_bpe().to_str())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return library.to_str()


@cache
def sentencepiece_json(style: str) -> str:
    """The SentencePiece vocabulary as a tokenizer.json: "prepend" writes the first space as Llama 2's file does,
    "first" as Mistral's later ones."""
    ids = {token: id for id, token in enumerate(SPM["tokens"])}
    joined = [id for id, kind in enumerate(SPM["types"]) if kind == 1 and len(SPM["tokens"][id]) > 1]
    merges = [  # every way to make a token of two others, best score first: what converters write
        (token[:i], token[i:])
        for token in (SPM["tokens"][id] for id in sorted(joined, key=lambda id: -SPM["scores"][id]))
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids
    ]
    bpe = models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(bpe)
    if style == "prepend":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPM["tokens"][:3]])
    return library.to_str()


@cache
def unigram_json() -> str:
    """A Unigram model trained here, with Metaspace on both sides."""
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    alphabet = sorted({character for text in TEXTS for character in text if not character.isspace()} | {"\n", "\t"})
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=len(alphabet) + 80,
        initial_alphabet=alphabet,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    return library.to_str()


BYTE_LEVEL_CONFIG = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
SPM_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2_TEMPLATE}
KINDS = {
    "byte-level": (byte_level_json, BYTE_LEVEL_CONFIG),
    "prepend": (lambda: sentencepiece_json("prepend"), SPM_CONFIG),
    "first": (lambda: sentencepiece_json("first"), SPM_CONFIG),
    "always": (lambda: sentencepiece_json("always"), SPM_CONFIG),
    "unigram": (unigram_json, SPM_CONFIG),
}


def write_folder(folder: Path, kind: str = "byte-level", files: dict | None = None, **changes) -> Path:
    """A folder with a tokenizer of one of the KINDS. `changes` are to tokenizer_config.json (None leaves a field out);
    `files`: more files by name, objects written as JSON and strings as they are."""
    text, config = KINDS[kind]
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config | changes
    config = {key: value for key, value in config.items() if value is not None}
    for name, content in ({"tokenizer.json": text(), "tokenizer_config.json": config} | (files or {})).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder
