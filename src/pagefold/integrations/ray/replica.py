"""PagefoldReplica: a server of ours as a replica of Ray Serve. It starts ``pagefold serve``, and passes requests on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from pagefold.errors import PagefoldError
from pagefold.integrations.ray.child_server import ChildServer
from pagefold.integrations.ray.forwarded import ReplicaAddress
from pagefold.integrations.ray.passing import pass_on

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pagefold.integrations.ray.forwarded import Forwarded, Head
    from pagefold.integrations.ray.settings import FleetSettings

__all__ = ["PagefoldReplica"]

_log = logging.getLogger("ray.serve")

_CONFIG = "vllm:cache_config_info"


class PagefoldReplica:
    """A server.

    Args:
        settings: of all replicas.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._folder = tempfile.TemporaryDirectory(prefix="pagefold-")  # its owner's alone, as prompts are
        events, replay = (f"ipc://{self._folder.name}/{name}" for name in ("events", "replay"))
        events_config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
        arguments = (*settings.arguments, "--kv-events-config", json.dumps(events_config))
        self._server = ChildServer(arguments, lambda line: _log.info("%s", line))
        url = self._server.wait_until_ready()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)  # noqa: S113 - answers may take long
        self._address = self._read_address(url, events, replay)

    async def tell(self, *, replica: str = "") -> ReplicaAddress:  # noqa: ARG002 - for the request router
        """Return who it is."""
        return self._address

    async def forward(self, asked: Forwarded, *, replica: str = "") -> AsyncGenerator[Head | bytes]:  # noqa: ARG002
        """Yield the head of the server's answer to a request, then its body as it comes."""
        async for piece in pass_on(self._http, self._name, asked):
            yield piece

    def check_health(self) -> None:
        """Raise if the server is not there any more: Ray puts another replica in this one's place.

        Raises:
            PagefoldError: the process has ended.
        """
        if not self._server.is_alive:
            msg = "The server of this replica has ended."
            raise PagefoldError(msg, remedy="Ray starts another one.")

    async def __del__(self) -> None:
        """Let the server finish. Ray calls it when nothing is sent here any more."""
        with contextlib.suppress(AttributeError):  # it has not started
            await asyncio.to_thread(self._server.stop)
            self._folder.cleanup()

    def _read_address(self, url: str, events: str, replay: str) -> ReplicaAddress:
        key = {} if self._server.metrics_key is None else {"Authorization": f"Bearer {self._server.metrics_key}"}
        text = httpx.get(f"{url}/metrics", headers=key, timeout=60.0).raise_for_status().text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        labels = next(sample.labels for sample in samples if sample.name == _CONFIG)
        block_size, num_blocks = int(labels["block_size"]), int(labels["num_gpu_blocks"])
        return ReplicaAddress(self._name, events, replay, block_size, block_size * num_blocks)
