"""PagefoldConnector: vLLM's KV cache goes on in the host's memory, on a disk and in a remote store, on every platform.

vLLM loads it by name::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PagefoldConnector",
        "kv_connector_module_path": "pagefold.integrations.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_bytes": "4GiB"}}'

vLLM makes one in its scheduler's process and one in each worker's. This class translates between vLLM's calls and
:class:`~pagefold.integrations.vllm.connector_planner.ConnectorPlanner`, which decides, and
:class:`~pagefold.integrations.vllm.connector_worker.ConnectorWorker`, which copies. The interface: vLLM,
``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core import kv_cache_utils

from pagefold.errors import ConfigError
from pagefold.integrations.vllm.connector_directory import KEY_BYTES, path_of
from pagefold.integrations.vllm.connector_layout import block_tokens, check_layout, layout_of, pages_by_layer
from pagefold.integrations.vllm.connector_orders import StepOrders, StepReport, WorkerFacts
from pagefold.integrations.vllm.connector_planner import ConnectorPlanner, Progress
from pagefold.integrations.vllm.connector_settings import ConnectorSettings
from pagefold.integrations.vllm.connector_stats import ConnectorPromMetrics, ConnectorStats
from pagefold.integrations.vllm.model_names import check_names
from pagefold.integrations.vllm.versions import refuse_unknown

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pagefold.integrations.vllm.connector_worker import ConnectorWorker
    from pagefold.store.protocol import BlockStore

__all__ = ["PagefoldConnector"]

_log = logging.getLogger("vllm.pagefold")


@dataclass
class _Orders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """A step's orders, as vLLM carries them to its workers."""

    orders: StepOrders


@dataclass
class _Report(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """A step's report, as vLLM carries it back."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _Report:
        """Return what two workers report together."""
        return _Report(self.report.with_other(other.report))


@dataclass
class _Facts(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """What a worker tells before the first step, as vLLM carries it."""

    facts: WorkerFacts


class _Seen:
    """A request as vLLM's scheduler has told of it: its blocks, and the keys of its path as far as they were needed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.block_ids: list[int] = []
        self.path = b""


class PagefoldConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """Keeps blocks of vLLM outside its KV cache, and brings them back; see the module.

    Args:
        vllm_config: vLLM's settings; the connector's own are in ``kv_connector_extra_config``.
        role: which side this is.
        kv_cache_config: how vLLM keeps KV.

    Raises:
        ConfigError: settings, model or version cannot work with it; says which, and what to do.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        refuse_unknown(vllm_version, "PagefoldConnector")
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings = ConnectorSettings.parse(dict(transfer.kv_connector_extra_config))
        if transfer.kv_load_failure_policy != "recompute":
            msg = f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a damaged block would fail requests."
            raise ConfigError(msg, remedy='Write "kv_load_failure_policy": "recompute" into --kv-transfer-config.')
        if transfer.kv_role != "kv_both":
            msg = f"kv_role is {transfer.kv_role!r}, and PagefoldConnector both stores and loads."
            raise ConfigError(msg, remedy='Write "kv_role": "kv_both" into --kv-transfer-config.')
        check_layout(vllm_config, kv_cache_config)
        self._num_workers = int(vllm_config.parallel_config.tensor_parallel_size)
        if settings.has_slow_tiers and self._num_workers > 1:
            msg = f"disk_path and remote_url are for one worker, and there are {self._num_workers}."
            raise ConfigError(msg, remedy="Leave them out with tensor parallelism: host_bytes works with it.")
        if settings.has_slow_tiers:
            check_names(vllm_config, has_fixed_seed=hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"))
        self._block_size = block_tokens(kv_cache_config)
        hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or self._block_size
        self._hashes_per_block = self._block_size // hash_tokens
        self._planner: ConnectorPlanner | None = None
        self._worker: ConnectorWorker | None = None
        self._facts: WorkerFacts | None = None
        self._seen: dict[str, _Seen] = {}
        self._stats: dict[str, float] = {}
        self._told: dict[str, float] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not stored is a miss later, no more."""
        return False

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's tensors, and open the host's memory and the slow tiers.

        Raises:
            ConfigError: the host's memory holds no block, a layer cannot be kept, or a tier cannot be used.
        """
        from pagefold.integrations.vllm.connector_pages import page_views, pages_of  # noqa: PLC0415 - worker alone
        from pagefold.integrations.vllm.connector_tiers import open_tiers  # noqa: PLC0415 - as above
        from pagefold.integrations.vllm.connector_worker import ConnectorWorker  # noqa: PLC0415 - as above
        from pagefold.store.arena import HostArena  # noqa: PLC0415 - as above

        pages_bytes = pages_by_layer(self._kv_cache_config)
        kept = {layer: cache for layer, cache in kv_caches.items() if layer in pages_bytes}
        pages = pages_of(page_views(kept, self._kv_cache_config.num_blocks, pages_bytes))
        num_host_blocks = self._settings.host_bytes // self._num_workers // pages.block_bytes
        if not num_host_blocks:
            least = pages.block_bytes * self._num_workers
            msg = f"host_bytes is {self._settings.host_bytes:,}, and a block of vLLM's takes {least:,} bytes."
            raise ConfigError(msg, remedy="Give the host's memory more, or vLLM a smaller --block-size.")
        leaves = self._settings.has_slow_tiers
        layout = layout_of(self._vllm_config, kept, vllm_version, leaves=leaves).key()
        stores: list[BlockStore] = []
        facts = WorkerFacts(num_host_blocks, pages.block_bytes, layout)
        if leaves:
            tiers = open_tiers(
                self._settings.of_replica(self._vllm_config.parallel_config),
                layout,
                pages.block_bytes,
                label=str(self._vllm_config.model_config.model),
            )
            stores = tiers.stores
            facts = facts._replace(links=tiers.links, on_disk=tiers.on_disk, most_on_disk=tiers.most_on_disk)
        arena = HostArena(num_host_blocks, pages.block_bytes)
        self._worker = ConnectorWorker(pages, arena, stores, verifies=self._settings.verifies_restored)
        self._facts = facts
        held = f"{num_host_blocks:,} blocks of {pages.block_bytes:,} bytes"
        behind = ", ".join(store.tier for store in stores) or "nothing"
        _log.info("PagefoldConnector: %s in the host's memory, behind it %s", held, behind)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler's side what there is."""
        return None if self._facts is None else _Facts(self._facts)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the orders of a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401, ARG002 - vLLM's
        """Restore blocks, all before the step computes: a copy takes some hundredth of what computing would."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: all is restored before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing to do: whole blocks are stored when the step has computed."""

    def wait_for_save(self) -> None:
        """Store what the step has computed."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be restored."""
        return set() if self._worker is None else self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what became of the step."""
        report = None if self._worker is None else self._worker.report()
        return None if report is None else _Report(report)

    # The scheduler's side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take what the workers have told, and begin."""
        facts = [one.facts for one in metadata.values()]
        first = facts[0]._replace(num_host_blocks=min(one.num_host_blocks for one in facts))
        self._planner = ConnectorPlanner(first, self._block_size, self._settings.eviction_policy)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind those that vLLM has can be restored; None to be asked again."""
        if self._planner is None:
            return 0, False
        seen = self._seen.setdefault(request.request_id, _Seen(request))
        path = self._path(seen, (request.num_tokens - 1) // self._block_size)
        found = self._planner.lookup(
            request.request_id, path, num_computed_tokens // self._block_size, time.monotonic()
        )
        return (None if found is None else found * self._block_size), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan to restore what was found into the blocks that vLLM has taken for it."""
        seen = self._seen.setdefault(request.request_id, _Seen(request))
        seen.block_ids = list(blocks.get_block_ids()[0])
        if self._planner is None:
            return
        num_loaded = num_external_tokens // self._block_size
        num_local = 0
        path = b""
        if num_loaded:
            path = self._path(seen, (request.num_tokens - 1) // self._block_size)
            num_local = self._planner.num_local(request.request_id)
        self._planner.begin_load(request.request_id, path, seen.block_ids, num_local, num_loaded)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return where restored tokens came from."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 - not there in 0.31, nor asked for

        if not num_external_tokens or self._planner is None:
            return {}
        num_blocks, tier = self._planner.sources(request.request_id)
        num_far = min(num_external_tokens, num_blocks * self._block_size)
        far = CacheHitSource.DISK if tier == "disk" else CacheHitSource.EXTERNAL_UNSPECIFIED
        sources = {CacheHitSource.HOST: num_external_tokens - num_far, far: num_far}
        return {source: num for source, num in sources.items() if num}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the orders of a step that vLLM has planned."""
        planner = self._planner
        if planner is None:
            return _Orders(StepOrders(-1))
        num_requests = 0
        scheduled = scheduler_output.num_scheduled_tokens
        progress: list[Progress] = []
        replaced = getattr(scheduler_output, "block_table_updates", None) or {}  # of 0.31
        for new in scheduler_output.scheduled_new_reqs:
            seen = self._seen.get(new.req_id)
            if seen is not None:
                seen.block_ids = list(new.block_ids[0])
                num_requests += 1
                progress += self._progress(planner, seen, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            seen = self._seen.get(request_id)
            if seen is None:
                continue
            block_ids = cached.new_block_ids[at]
            if request_id in cached.resumed_req_ids:
                seen.block_ids = [] if block_ids is None else list(block_ids[0])
            elif block_ids is not None:
                seen.block_ids += block_ids[0]
            if request_id in replaced:
                seen.block_ids = list(replaced[request_id][0])
            num_requests += 1
            progress += self._progress(planner, seen, cached.num_computed_tokens[at] + scheduled[request_id])
        num_tokens = scheduler_output.total_num_scheduled_tokens
        return _Orders(planner.plan_step(progress, num_tokens, num_requests))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what the workers have done."""
        told = connector_output.kv_connector_worker_meta
        if self._planner is None or not isinstance(told, _Report):
            return
        report = told.report
        self._planner.apply(report, time.monotonic())
        for kind in ("load", "store"):
            self._add(f"{kind}_bytes", report.num_bytes.get(kind, 0))
            self._add(f"{kind}_seconds", report.busy_s.get(kind, 0.0))
        self._add("differing_bytes", report.num_differing)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        del block_ids
        self._seen.pop(request.request_id, None)
        if self._planner is not None:
            self._planner.finish(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Forget every block, those of slow tiers too."""
        if self._planner is not None:
            self._planner.reset()
        return True

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return what has happened since this was asked last."""
        if self._planner is None:
            return None
        counts = vars(self._planner.counts)
        now = {f"{name.removeprefix('num_')}_blocks": float(value) for name, value in counts.items()} | self._stats
        data = {name: value - self._told.get(name, 0.0) for name, value in now.items()}
        self._told = now
        if not any(data.values()):
            return None
        data["held_blocks"] = self._planner.num_held
        data["host_blocks"] = self._planner.core.pool.num_blocks
        data["waiting_requests"] = self._planner.num_waiting
        return ConnectorStats(data=data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Return the numbers that were sent as ``data``."""
        return ConnectorStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        """Return what is on vLLM's ``/metrics``."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let slow tiers finish what was begun."""
        if self._worker is not None:
            self._worker.close()

    # Inside.

    def _path(self, seen: _Seen, num_blocks: int) -> bytes:
        """Return the keys of a request's first blocks, as many as vLLM has hashed."""
        hashes = seen.request.block_hashes
        num_blocks = min(num_blocks, len(hashes) // self._hashes_per_block)
        if num_blocks * KEY_BYTES > len(seen.path):
            seen.path = path_of(hashes, num_blocks, self._hashes_per_block, seen.path)
        return seen.path[: num_blocks * KEY_BYTES]

    def _progress(self, planner: ConnectorPlanner, seen: _Seen, num_tokens: int) -> list[Progress]:
        """Return how far a request will be that has so many tokens computed, if it has a new whole block by then.

        Tokens that are not known yet have no hash, so blocks with drafts in them are left for a later step.
        """
        request_id = seen.request.request_id
        num_blocks = min(num_tokens // self._block_size, len(seen.block_ids))
        if num_blocks <= planner.num_kept(request_id):
            return []  # most steps of a decode, whose path is not copied for that
        return [Progress(request_id, self._path(seen, num_blocks), seen.block_ids)]

    def _add(self, name: str, value: float) -> None:
        self._stats[name] = self._stats.get(name, 0.0) + value
