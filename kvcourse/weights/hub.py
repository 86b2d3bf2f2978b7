"""Get a checkpoint from the Hugging Face hub, through the `huggingface_hub` library.

The library keeps what it downloads in its own cache (`HF_HOME`), shared with other programs, goes on with downloads
that broke off, and sends the user's token if there is one. This file decides which files are needed, and says in one
sentence what went wrong. The library is imported when it is first needed: that takes a while.
"""

import errno
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from kvcourse.offline import offline
from kvcourse.weights.hf_folder import INDEX, SINGLE, not_a_checkpoint, read_index, weight_files

SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)


def hub_folder(repo_id: str, revision: str | None = None) -> Path:
    """Folder with the checkpoint `repo_id` ("owner/name") of the hub, downloaded unless it is in the cache.

    Only configuration, tokenizer and safetensors are downloaded. When the hub does not answer, or `KVCOURSE_OFFLINE` is
    set, what is in the cache is used. Raises `ValueError` when there is no such model, when it may not be read, or has
    no safetensors; `RuntimeError` when it is not here and could not be downloaded.
    """
    check_id(repo_id)
    if offline():
        here = cached(repo_id, revision)
        if here is None:
            raise cannot(repo_id, "KVCOURSE_OFFLINE is set; unset it and try again")
        say_copy("KVCOURSE_OFFLINE is set", repo_id, here)
        return here
    try:
        return download(repo_id, revision)
    except RuntimeError:
        here = cached(repo_id, revision)
        if here is None:
            raise
        say_copy("The hub could not be reached", repo_id, here)
        return here


def say_copy(why: str, repo_id: str, folder: Path) -> None:
    """Another program may have downloaded the weights alone; that nobody would notice before text is asked for."""
    lacks = "" if (folder / "tokenizer.json").is_file() else "; it has no tokenizer.json"
    print(f"{why}: using the copy of {repo_id} that is on this computer{lacks}.")


def check_id(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id if isinstance(repo_id, str) else "")
    except HFValidationError:
        text = "is not the id of a model on the Hugging Face hub: give one such as HuggingFaceTB/SmolLM2-135M"
        raise ValueError(f"{repo_id!r} {text}.") from None


def cached(repo_id: str, revision: str | None) -> Path | None:
    """The checkpoint in the library's cache if all of it is there; the network is not used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns="config.json")
        weight_files(Path(folder))
    except (LocalEntryNotFoundError, ValueError):
        return None
    return Path(folder) if Path(folder, "config.json").is_file() else None


def download(repo_id: str, revision: str | None) -> Path:
    """Ask the hub which files there are, and get those that are needed and not in the cache yet."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    with explained(repo_id, revision):
        files = HfApi().model_info(repo_id, revision=revision, timeout=10).siblings
    names = {file.rfilename for file in files}
    check_loadable(names, repo_id)
    weights = [SINGLE]
    if SINGLE not in names:
        with explained(repo_id, revision):
            index = hf_hub_download(repo_id, INDEX, revision=revision)
        weights = [INDEX, *read_index(Path(index))]
    with explained(repo_id, revision):
        wanted = [*SMALL_FILES, *weights]
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=wanted))


def check_loadable(names: Iterable[str], repo_id: str) -> None:
    """Raise `ValueError`, before anything is downloaded, when files with these names are no checkpoint."""
    names = set(names)
    if "config.json" not in names or "adapter_config.json" in names or not names & {SINGLE, INDEX}:
        raise not_a_checkpoint(names, f"The model {repo_id} on the hub")


@contextmanager
def explained(repo_id: str, revision: str | None):
    """Turn the library's errors into `ValueError` (the hub says no) or `RuntimeError` (it could not be reached)."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:  # not in the cache either, after something else went wrong
        raise explanation(repo_id, revision, error.__cause__ or error) from error
    except Exception as error:  # each version of the library has another HTTP client, with errors of its own
        raise explanation(repo_id, revision, error) from error


def explanation(repo_id: str, revision: str | None, error: BaseException) -> ValueError | RuntimeError:
    from huggingface_hub import errors

    log_in = "log in with `hf auth login` (or set HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        terms = f"accept them on https://huggingface.co/{repo_id}"
        return ValueError(f"{repo_id} is only for those who accepted its terms: {terms}, then {log_in}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        private = f"check the spelling, and if the model is private, {log_in}"
        return ValueError(f"There is no model {repo_id} on the hub that you may read: {private}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(f"The model {repo_id} on the hub has no revision {revision!r}.")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return ValueError(f"The hub does not let you read {repo_id} (status {status}): {log_in}.")
        return cannot(repo_id, f"the hub answered with status {status}; try again later")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return cannot(repo_id, "HF_HUB_OFFLINE is set; unset it and try again")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        elsewhere = "make room, or set HF_HOME to a folder elsewhere"
        return cannot(repo_id, f"the cache of the hub cannot be written to ({error.strerror}); {elsewhere}")
    said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .:")
    return cannot(repo_id, f"{said}. Connect to the internet and try again; afterwards the model works offline")


def cannot(repo_id: str, reason: str) -> RuntimeError:
    return RuntimeError(f"The model {repo_id} is not on this computer and could not be downloaded: {reason}.")
