"""The small JSON files beside `tokenizer.json`: which tokens have a name, which end an answer, the chat template."""

import json
from pathlib import Path

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")


def read_json(path: Path) -> dict:
    """A JSON file's object, {} when there is no such file. Raises `ValueError` naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is damaged: {error}. Fetch it again.") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(data).__name__}, not an object. Fetch it again.")
    return data


def text_of(token) -> str | None:
    """A token written as "<s>" or as {"content": "<s>", ...}."""
    return token.get("content") if isinstance(token, dict) else token


def named_tokens(config: dict) -> dict[str, str]:
    """{"bos_token": "<s>", ...}: the tokens with a name, which chat templates use."""
    named = {name: text_of(config.get(name)) for name in NAMES}
    return {name: token for name, token in named.items() if isinstance(token, str)}


def listed_tokens(config: dict) -> list[str]:
    """Control tokens without a name of their own."""
    lists = [config.get(name) or [] for name in LISTS]
    tokens = [text_of(token) for tokens in lists for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    return [token for token in tokens if isinstance(token, str)]


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
        return file.read_text(encoding="utf-8")
    given = read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(given, list):  # several, by name: the others are for tools or retrieval
        named = {entry["name"]: entry["template"] for entry in given}
        if "default" not in named:
            raise ValueError(f"{folder} has chat templates {', '.join(named)}, but none is named 'default'.")
        given = named["default"]
    if given is not None and not isinstance(given, str):
        raise ValueError(f"{folder}: the chat template must be a string or a list, got {type(given).__name__}.")
    return given
