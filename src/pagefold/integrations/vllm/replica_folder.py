"""The folder of one of vLLM's data parallel replicas: one process at a time uses a folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["replica_folder"]


def replica_folder(folder: str, index: int, num_replicas: int) -> Path:
    """Return the folder of a replica.

    Args:
        folder: as it was configured.
        index: of the replica, as vLLM's ``data_parallel_index`` has it.
        num_replicas: as vLLM tells them: 1 of a dense model, whose replicas know nothing of each other. The first of
            those cannot know that there are others, and has the folder itself; so the others' lie beside it.
    """
    path = Path(folder)
    if num_replicas > 1:
        return path / f"replica-{index}"
    return path.with_name(f"{path.name}-replica-{index}") if index else path
