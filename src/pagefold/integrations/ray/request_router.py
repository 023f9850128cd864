"""ChosenReplicaRouter: Ray's request router where somebody else has chosen: it finds the replica of that name."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pagefold.integrations.ray.replica_watch import tell_watchers

__all__ = ["ChosenReplicaRouter"]


class ChosenReplicaRouter(RequestRouter):
    """Sends a request to the replica that its argument ``replica`` names; to any, if that one is not there.

    One that is there and full is waited for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ray's
        super().__init__(*args, **kwargs)
        self._names: frozenset[str] = frozenset()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica that was chosen; any, where none was."""
        name = "" if pending_request is None else pending_request.kwargs.get("replica", "")
        if name not in self._names:
            return [candidate_replicas]
        return [[each for each in candidate_replicas if each.replica_id.unique_id == name]]

    def update_replicas(self, replicas: list[RunningReplica], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ray's
        """Take note of which replicas there are."""
        super().update_replicas(replicas, *args, **kwargs)
        self._names = frozenset(each.replica_id.unique_id for each in replicas)
        tell_watchers(self._names)
