"""PagefoldTier: a secondary tier of vLLM's offloading on our stores, which vLLM loads by module path.

``{"type": "PagefoldTier", "module_path": "pagefold.integrations.vllm", "disk_path": ..., "limit_bytes": "200GiB"}``.
Chunks are on a disk in a :class:`~pagefold.store.disk.DiskStore`, whose limit holds at every moment and across kills,
or on another machine in Redis, Valkey or Mooncake. Each is in a frame that is checked whole before vLLM may use it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from pagefold.errors import ConfigError
from pagefold.integrations.vllm.chunk_frames import ChunkNames, describe_layout, frames_of
from pagefold.integrations.vllm.model_names import weights_of
from pagefold.integrations.vllm.tier_jobs import ChunkMove, TierJobs
from pagefold.integrations.vllm.tier_lookups import LaterLookups, PromptLookups
from pagefold.integrations.vllm.tier_options import TierOptions
from pagefold.integrations.vllm.versions import check_version, family_of, unmet
from pagefold.store.disk import DiskStore
from pagefold.store.remote import open_remote

try:
    from vllm import __version__ as vllm_version
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    _msg = f"vLLM's secondary tiers are not there ({error})."
    raise ConfigError(_msg, remedy="Use PagefoldTier inside vLLM: pip install vllm.") from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from pagefold.integrations.vllm.tier_lookups import Lookups
    from pagefold.store.breaker import Change
    from pagefold.store.protocol import BlockStore

__all__ = ["GAUGES", "PagefoldTier"]

_log = logging.getLogger(__name__)

GAUGES: Mapping[str, str] = {
    "vllm:kv_offload_pagefold_bytes": "Bytes that the tier takes of its medium, index and leftovers included.",
    "vllm:kv_offload_pagefold_limit_bytes": "Bytes that the tier may take at most.",
    "vllm:kv_offload_pagefold_chunks": "Chunks that the tier holds of this model and layout.",
    "vllm:kv_offload_pagefold_is_out": "1 while the tier's store does not answer, and is left out.",
}
COUNTERS: Mapping[str, str] = {
    "vllm:kv_offload_pagefold_evictions": "Chunks that the tier dropped for others.",
    "vllm:kv_offload_pagefold_damaged": "Frames that were found and were wrong: each was dropped, and was a miss.",
    "vllm:kv_offload_pagefold_errors": "Calls that the tier's store failed: each was a miss.",
}
_LABEL = ("store",)


class PagefoldTier(SecondaryTierManager):  # type: ignore[misc] # vLLM is not there when types are checked
    """A secondary tier in one of our stores; see vLLM's ``SecondaryTierManager`` for what its methods promise.

    Args:
        offloading_spec: vLLM's, with its configuration.
        primary_kv_view: rows of the host's memory, a chunk each.
        tier_type: what vLLM calls the tier.
        backpressure_detector: vLLM's, if it was asked for; its manager asks it.
        locality: "LOCAL" or "REMOTE", as vLLM's events say it; by default where the store is.
        options: see :class:`TierOptions`.

    Raises:
        ConfigError: an option cannot work, the folder cannot be used, or the rows are not as expected.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        asked = TierOptions.parse(options)
        self.locality = Locality(locality or ("LOCAL" if asked.disk_path else "REMOTE"))
        self._rows = _rows_of(primary_kv_view)
        row_bytes = self._row_bytes = self._rows.nbytes // max(1, len(primary_kv_view))
        layout = describe_layout(
            offloading_spec,
            row_bytes,
            weights=weights_of(str(offloading_spec.config.model.name), asked.weights),
            version_family=family_of(vllm_version),
            device=str(current_platform.device_type),
        )
        frames = frames_of(layout)
        self._name_of = ChunkNames(frames)
        self._store: BlockStore
        self._disk: DiskStore | None = None
        self._lookups: Lookups
        if asked.disk_path:
            parallel = offloading_spec.config.parallel
            folder = asked.folder_of(parallel.data_parallel_index, parallel.data_parallel_size)
            label = f"vLLM {family_of(vllm_version)} {layout['model']}"
            self._store = self._disk = disk = DiskStore(folder, asked.limit_bytes, frames, label=label)
            self._place = str(folder)
            for note in disk.notes:
                _log.warning("%s", note)
            self._lookups = PromptLookups(self._store, self._name_of)
        else:
            self._store = remote = open_remote(asked.remote_url, frames, on_change=_tell)
            self._place = str(remote.address)
            self._lookups = LaterLookups(self._store, self._name_of)
        self._jobs = TierJobs(self._store, asked.num_threads)
        self._requests: dict[int, str] = {}  # of open loads: for whom
        self._events: list[OffloadingEvent] = []
        self._tells_events = asked.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._said: dict[str, float] = {}

    # What the scheduler asks: nothing here waits.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002 - all alike
        """Return that new chunks are enough."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is there; RETRY while that is being asked."""
        found = self._lookups.has(req_context.req_id, key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Take chunks to be kept."""
        self._jobs.submit(job_metadata.job_id, self._moves_of(job_metadata), is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Take chunks to be brought."""
        self._requests[job_metadata.job_id] = job_metadata.req_context.req_id
        self._jobs.submit(job_metadata.job_id, self._moves_of(job_metadata), is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what became of jobs: of a load that failed in part, what was brought stays."""
        results = []
        for job in self._jobs.take_ended():
            success = len(job.done) == len(job.keys)
            brought = None
            if job.is_load:
                req_id = self._requests.pop(job.job_id)
                if not success:
                    there = set(job.done)
                    brought = tuple(job.done) or None
                    self._lookups.failed(req_id, [key for key in job.keys if key not in there])
            elif success and self._tells_events:
                stored = OffloadingEvent(keys=list(job.keys), medium=self.medium, removed=False, locality=self.locality)
                self._events.append(stored)
            results.append(
                JobResult(
                    job_id=job.job_id,
                    success=success,
                    successful_keys=brought,
                    transfer_time=job.seconds,
                    transfer_bytes=len(job.done) * self._row_bytes,
                )
            )
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored since the last call, if events are on."""
        taken, self._events = self._events, []
        return taken

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002 - asked once a step
        """Ask what lookups left open."""
        self._lookups.send()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what a request was told."""
        self._lookups.forget(req_context.req_id)

    # What may wait.

    def drain_jobs(self) -> None:
        """Wait until no job touches the host's memory."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """Finish what is begun, and close the store."""
        self._lookups.close()
        self._jobs.close()
        self._store.close()
        self._rows.release()

    # Metrics.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - all alike
        """Return what the tier tells Prometheus."""
        gauges = {name: OffloadingGaugeMetadata(documentation=said, labelnames=_LABEL) for name, said in GAUGES.items()}
        counters = {
            name: OffloadingCounterMetadata(documentation=said, labelnames=_LABEL) for name, said in COUNTERS.items()
        }
        return gauges | counters

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call; None if nothing has."""
        counts = self._jobs.counts
        use = counts.use
        now: dict[str, float] = dict(
            zip(
                (*GAUGES, *COUNTERS),
                (
                    use.num_bytes,
                    use.limit_bytes,
                    use.num_blocks,
                    int(self._store.is_out),
                    0 if self._disk is None else self._disk.num_evicted,
                    counts.num_damaged,
                    counts.num_errors,
                ),
                strict=True,
            )
        )
        changed = {name: value for name, value in now.items() if value >= 0 and value != self._said.get(name)}
        if not changed:
            return None
        stats = OffloadingConnectorStats()
        for name, value in changed.items():
            if name in GAUGES:
                stats.set_gauge(name, value, (self._place,))
            elif value:
                stats.increase_counter(name, value - self._said.get(name, 0), (self._place,))
        self._said |= changed
        return stats

    def _moves_of(self, job: TransferJob) -> list[ChunkMove]:
        """Return the chunks of a job, heads first where vLLM tells where they lie; it hands over sets."""
        position_of = job.req_context.get_offload_key_position
        keyed = list(zip(job.keys, job.chunk_ids, strict=True))
        keyed.sort(key=lambda one: position_of(one[0]) or 0)
        size = self._row_bytes
        return [
            ChunkMove(key, self._name_of(key), self._rows[int(chunk) * size : (int(chunk) + 1) * size])
            for key, chunk in keyed
        ]


def _rows_of(view: memoryview) -> memoryview:
    """Return the rows of the host's memory as bytes in a row.

    Raises:
        ConfigError: they do not lie so.
    """
    strides = view.strides or ()
    if not view.c_contiguous or not strides or strides[0] * len(view) != view.nbytes:
        msg = f"vLLM's host memory is not rows of chunks, one behind the other: shape {view.shape}, strides {strides}."
        raise ConfigError(msg, remedy="Use a version of vLLM that is known.")
    return view.cast("B")


def _tell(change: Change) -> None:
    if change.is_out:
        _log.warning("the tier's store is out, and is asked again: %s", change.why)
    else:
        _log.warning("the tier's store is back after %.1f s", change.lasted_s)


def _checked() -> None:
    left: frozenset[str] = getattr(PagefoldTier, "__abstractmethods__", frozenset())
    if left:
        raise unmet(vllm_version, "PagefoldTier", ", ".join(sorted(left)))
    check_version(vllm_version, "PagefoldTier")


_checked()
