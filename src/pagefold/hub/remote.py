"""Models from the Hugging Face hub.

Importing this module imports the hub's client: ``catalog`` does so only when a hub id is asked for.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import errors

from pagefold.errors import ModelNotFoundError
from pagefold.hub.model_folder import check_model_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fetch"]

# How long to wait for the hub's first answer. The client's own timeouts are for each address and each try.
_ANSWER_TIMEOUT_S = 12.0

_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_SAFETENSORS = [*_TEXT_FILES, "*.safetensors"]
_PYTORCH = [*_TEXT_FILES, "pytorch_model*.bin"]
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
    except errors.GatedRepoError as error:
        message = f"{repo_id} is given only to those who accepted its terms."
        remedy = f"Accept them on https://huggingface.co/{repo_id} and log in: hf auth login"
        raise ModelNotFoundError(message, remedy=remedy) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{repo_id} is neither a local folder nor a model that the hub shows you."
        remedy = "Check the spelling; if it is private, log in: hf auth login"
        raise ModelNotFoundError(message, remedy=remedy) from error
    except Exception as error:  # noqa: BLE001 - no network, a proxy, a timeout, offline by setting: one remedy for all
        return _from_cache(repo_id, error)

    patterns = _SAFETENSORS if any(name.endswith(".safetensors") for name in names) else _PYTORCH
    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED))
    except Exception as error:
        message = f"{repo_id} could not be downloaded whole: {_first_line(error)}."
        raise ModelNotFoundError(message, remedy="Run it again; what is there already is kept.") from error
    check_model_folder(folder)
    return folder


def _file_names(repo_id: str) -> Sequence[str]:
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
            found = huggingface_hub.snapshot_download(
                repo_id, local_files_only=True, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED
            )
            check_model_folder(Path(found))
        except (OSError, ValueError, ModelNotFoundError):
            continue
        return Path(found)
    message = f"{repo_id} is not a local folder, and it cannot be fetched from the hub: {_first_line(why)}."
    remedy = "Check the network or proxy, or copy the model's folder here and name that folder."
    raise ModelNotFoundError(message, remedy=remedy) from why


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
