"""The small JSON files beside `tokenizer.json`: which tokens have a name, which end an answer, the chat template."""

from pathlib import Path

from kvcourse.text_files import read_object, read_text

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")


def read_json(path: Path) -> dict:
    """A JSON file's object, {} when there is no such file."""
    return read_object(path) if path.is_file() else {}


def text_of(token) -> str | None:
    """A token written as "<s>" or as {"content": "<s>", ...}; None when it is written in another way."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def named_tokens(config: dict, file: Path) -> dict[str, str]:
    """{"bos_token": "<s>", ...}: the tokens with a name, which chat templates use."""
    named = {name: text_of(config[name]) for name in NAMES if config.get(name) is not None}
    for name, token in named.items():
        if token is None:
            raise ValueError(f"{file}: {name} is {config[name]!r}; it must be a token such as '</s>'.")
    return named


def listed_tokens(config: dict, file: Path) -> list[str]:
    """Control tokens without a name of their own."""
    tokens = []
    for name in LISTS:
        given = config.get(name) or []
        listed = list(given.values()) if isinstance(given, dict) else given
        if not isinstance(listed, list) or None in map(text_of, listed):
            raise ValueError(f"{file}: {name} is {given!r}; it must be a list of tokens such as ['<tool>'].")
        tokens += map(text_of, listed)
    return tokens


def end_ids(folder: Path) -> list[int]:
    """Ids that end an answer: those of generation_config.json and of config.json together. Each file may give one, a
    list or none; a chat model's end of turn often stands in one of them only."""
    ids = []
    for name in ("generation_config.json", "config.json"):
        given = read_json(folder / name).get("eos_token_id")
        listed = [] if given is None else given if isinstance(given, list) else [given]
        if not all(type(id) is int and id >= 0 for id in listed):
            raise ValueError(f"{folder / name}: eos_token_id is {given!r}; it must be a token id or a list of them.")
        ids += listed
    return ids


def read_template(folder: Path, config: dict) -> str | None:
    """The chat template, from the first place that has one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    given = read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(given, list):  # several, by name: the others are for tools or retrieval
        if not given or not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in given):
            raise ValueError(f"{folder}: a list of chat templates must hold objects, each with a name and a template.")
        named = {entry["name"]: entry.get("template") for entry in given}
        if "default" not in named:
            raise ValueError(f"{folder} has chat templates {', '.join(named)}, but none is named 'default'.")
        given = named["default"]
    if given is not None and not isinstance(given, str):
        raise ValueError(f"{folder}: the chat template must be a string or a list, got {type(given).__name__}.")
    return given
