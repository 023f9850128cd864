"""Models from the Hugging Face hub.

Importing this module imports the hub's client: ``catalog`` does so only when a hub id is asked for.
"""

from __future__ import annotations

import queue
import re
import threading
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import errors

from pagefold.errors import ModelNotFoundError
from pagefold.hub.model_folder import check_model_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fetch", "fetch_gguf"]

# How long to wait for the hub's first answer. The client's own timeouts are for each address and each try.
_ANSWER_TIMEOUT_S = 12.0

_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_SAFETENSORS = [*_TEXT_FILES, "*.safetensors"]
_PYTORCH = [*_TEXT_FILES, "pytorch_model*.bin"]
_GGUF = "*.gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MAX_NAMED = 30
# Folders hold the same weights for other programs (onnx, original, ...), and so do consolidated files.
_NOT_NEEDED = ["*/*", "consolidated*"]


def fetch(repo_id: str) -> Path:
    """Return the local folder of the hub's model ``repo_id`` (``org/name``), after having downloaded what is not there.

    Files lie in the hub client's own cache. When the hub cannot be reached, what is in that cache is used.

    Raises:
        ModelNotFoundError: no such model, not allowed, or out of reach and not in the cache; within about 15 s.
    """
    try:
        names = _file_names(repo_id)
    except ModelNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 - no network, a proxy, a timeout, offline by setting: one remedy for all
        return _from_cache(repo_id, error)

    patterns = _SAFETENSORS if any(name.endswith(".safetensors") for name in names) else _PYTORCH
    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED))
    except Exception as error:
        raise _not_whole(repo_id, error) from error
    try:
        check_model_folder(folder)
    except ModelNotFoundError as error:
        files = _gguf_files(names)
        if not files:
            raise
        message, remedy = error.message, f"Name one of its GGUF files: {_named(repo_id, files)}"
        raise ModelNotFoundError(message, remedy=remedy) from None
    return folder


def fetch_gguf(repo_id: str, which: str) -> Path:
    """Return the local path of a GGUF file of the hub's model ``repo_id``, after having downloaded it if need be.

    Args:
        repo_id: ``org/name``.
        which: the file's name, or what its name ends with: its quantization, as ``Q4_K_M``; in letters of any case.

    Raises:
        ModelNotFoundError: no such model or file, or several, not allowed, or out of reach and not in the hub client's
            cache.
    """
    try:
        names = _file_names(repo_id)
    except ModelNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        folder = _snapshot(repo_id, [_GGUF], error)
        here = [file.relative_to(folder).as_posix() for file in folder.rglob(_GGUF)]
        return folder / _choose(repo_id, here, which)
    name = _choose(repo_id, names, which)
    try:
        return Path(huggingface_hub.hf_hub_download(repo_id, name))
    except Exception as error:
        what = f"{name} of {repo_id}"
        raise _not_whole(what, error) from error


def _choose(repo_id: str, names: Sequence[str], which: str) -> str:
    """Return the name of the one GGUF file that is meant."""
    files = _gguf_files(names)
    ends = re.compile(rf"(?:^|[-._/]){re.escape(which)}(?:\.gguf)?$", re.IGNORECASE)
    found = [file for file in files if ends.search(_PART.sub("", file.removesuffix(".gguf")))] or [
        file for file in files if ends.search(file)
    ]
    whole = [file for file in found if file == which] or found
    if len(whole) == 1 and not _PART.search(whole[0].removesuffix(".gguf")):
        return whole[0]
    if not files:
        message = f"{repo_id} has no GGUF files."
        raise ModelNotFoundError(message, remedy=f"Take it as it is: {repo_id}")
    if not found:
        message = f"{repo_id} has no GGUF file {which!r}."
    elif all(_PART.search(file.removesuffix(".gguf")) for file in found):
        message = f"{repo_id} has {which!r} in {len(found)} parts, which are not read as they are."
    else:
        message = f"{repo_id} has {len(found)} GGUF files that {which!r} may mean: {', '.join(found[:_MAX_NAMED])}."
    raise ModelNotFoundError(message, remedy=f"Name one of these: {_named(repo_id, files)}")


def _gguf_files(names: Sequence[str]) -> list[str]:
    """Return the GGUF files that are models: not what translates pictures for one."""
    files = (name for name in sorted(names) if name.lower().endswith(".gguf"))
    return [name for name in files if not PurePosixPath(name).name.lower().startswith("mmproj")]


def _named(repo_id: str, files: Sequence[str]) -> str:
    more = [f"and {len(files) - _MAX_NAMED} more"] if len(files) > _MAX_NAMED else []
    return ", ".join([f"{repo_id}:{file}" for file in files[:_MAX_NAMED]] + more)


def _not_whole(what: str, why: Exception) -> ModelNotFoundError:
    message = f"{what} could not be downloaded whole: {_first_line(why)}."
    return ModelNotFoundError(message, remedy="Run it again; what is there already is kept.")


def _file_names(repo_id: str) -> Sequence[str]:
    """Return the names of all files of a model.

    Raises:
        ModelNotFoundError: there is no such model, or it is not for everybody.
        Exception: whatever the client raises where the hub is out of reach.
    """
    try:
        return _asked(repo_id)
    except errors.GatedRepoError as error:
        message = f"{repo_id} is given only to those who accepted its terms."
        remedy = f"Accept them on https://huggingface.co/{repo_id} and log in: hf auth login"
        raise ModelNotFoundError(message, remedy=remedy) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{repo_id} is neither a local folder nor a model that the hub shows you."
        remedy = "Check the spelling; if it is private, log in: hf auth login"
        raise ModelNotFoundError(message, remedy=remedy) from error


def _asked(repo_id: str) -> Sequence[str]:
    # In a thread of its own: a name lookup or a silent network can hold a call far longer than the timeout it is given.
    answers: queue.SimpleQueue[Sequence[str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            info = huggingface_hub.HfApi().model_info(repo_id, timeout=_ANSWER_TIMEOUT_S)
            answers.put([file.rfilename for file in info.siblings or ()])
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            answers.put(error)

    threading.Thread(target=ask, name="pagefold-hub", daemon=True).start()
    try:
        answer = answers.get(timeout=_ANSWER_TIMEOUT_S)
    except queue.Empty:
        message = f"no answer within {_ANSWER_TIMEOUT_S:.0f} s"
        raise TimeoutError(message) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _from_cache(repo_id: str, why: Exception) -> Path:
    for patterns in (_SAFETENSORS, _PYTORCH):
        try:
            folder = _snapshot(repo_id, patterns, why)
            check_model_folder(folder)
        except ModelNotFoundError:
            continue
        return folder
    raise _out_of_reach(repo_id, why) from why


def _snapshot(repo_id: str, patterns: Sequence[str], why: Exception) -> Path:
    """Return the folder of what the hub client's cache has of a model.

    Raises:
        ModelNotFoundError: nothing; ``why`` the hub could not be asked, it says.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, local_files_only=True, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED
            )
        )
    except (OSError, ValueError):
        raise _out_of_reach(repo_id, why) from why


def _out_of_reach(repo_id: str, why: Exception) -> ModelNotFoundError:
    message = f"{repo_id} is not a local folder, and it cannot be fetched from the hub: {_first_line(why)}."
    remedy = "Check the network or proxy, or copy the model's folder here and name that folder."
    return ModelNotFoundError(message, remedy=remedy)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
