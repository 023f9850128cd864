"""EngineAdapters: the adapters of an engine, from a folder to the requests that have them, and until nothing is left.

Reading takes long, and any thread may do it; slots change on the engine's thread alone, between steps. An adapter that
is unloaded loses its name at once. Requests that have it go on to their end; then its weights go, and all blocks of its
namespaces, on the device and in the host's memory.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagefold.adapters import (
    AdapterRegistry,
    AdapterWeights,
    BaseShapes,
    LoadedAdapter,
    base_shapes,
    read_adapter_folder,
)
from pagefold.adapters.modules import STAGES, Place
from pagefold.config import available_memory_bytes, check_adapter_name
from pagefold.errors import AdapterError, AdapterNotFoundError, ConfigError
from pagefold.memory.capacity import human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.adapters import AdapterFolder
    from pagefold.config import EngineConfig, LoRAModule
    from pagefold.request import Request
    from pagefold.runner.adapter_slots import AdapterSlots, PackedWeights
    from pagefold.runner.models import ModelSpec
    from pagefold.scheduler import Scheduler, Tiering

__all__ = ["NO_ADAPTERS", "AdapterPlan", "AdapterStatus", "EngineAdapters", "ReadAdapter", "plan_adapters"]

_NOTHING = LoadedAdapter("", "", "", 0, 0)
_MOST_NAMESPACES = 4096
"""Clients choose salts: beyond so many namespaces of an adapter those are forgotten of which nothing is cached."""


class AdapterPlan(NamedTuple):
    """What is known of adapters before weights are loaded.

    Attributes:
        base: the model.
        folders: of those that are there from the start, each with its name.
    """

    base: BaseShapes
    folders: tuple[tuple[LoRAModule, AdapterFolder], ...]


class ReadAdapter(NamedTuple):
    """An adapter that was read, and has no slot yet.

    Attributes:
        name: what requests will call it.
        path: its folder, as it was given.
        fingerprint: of weights and scales.
        packed: its weights.
        in_place: whether it may take another's name.
    """

    name: str
    path: str
    fingerprint: str
    packed: PackedWeights
    in_place: bool = False


class AdapterStatus(NamedTuple):
    """What adapters do now.

    Attributes:
        most: how many may be loaded at once.
        loaded: those that have a name.
        num_leaving: those that are unloaded, and used yet.
        num_bytes: that all of them take.
        running: names of those that a step computes with.
        waiting: names of those that requests wait for.
    """

    most: int
    loaded: tuple[LoadedAdapter, ...]
    num_leaving: int
    num_bytes: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


def plan_adapters(config: EngineConfig, spec: ModelSpec, not_fused: str, device: str) -> AdapterPlan | None:
    """Read what is said of adapters, and see that they go with the model; None where there may be none.

    Args:
        config: what was asked.
        spec: the model.
        not_fused: why the fused decoder does not compute it; empty where it does.
        device: where it is computed.

    Raises:
        ConfigError: adapters are not computed there.
        AdapterError: one does not go with the model.
    """
    if not config.enable_lora:
        return None
    if device != "cpu":
        msg = f"enable_lora is set, and adapters are not computed on {device} yet."
        raise ConfigError(msg, remedy="Leave it out, or use device=cpu.")
    if not_fused or spec.fused is None:
        from pagefold.runner.fused.checkpoint import Checkpoint  # noqa: PLC0415 - torch comes with it

        base = base_shapes(spec.folder.name, Checkpoint(spec.folder).shapes())
    else:
        fused = spec.fused
        num_q, num_kv = (num * fused.head_dim for num in (fused.num_heads, fused.num_kv_heads))
        of_layer = dict(
            zip(
                (module for stage in STAGES for module in stage),
                (
                    *((num_q, fused.hidden_size), *[(num_kv, fused.hidden_size)] * 2, (fused.hidden_size, num_q)),
                    *(
                        *[(fused.intermediate_size, fused.hidden_size)] * 2,
                        (fused.hidden_size, fused.intermediate_size),
                    ),
                ),
                strict=True,
            )
        )
        base = BaseShapes(
            spec.folder.name,
            {Place(layer, name): shape for layer in range(fused.num_layers) for name, shape in of_layer.items()},
        )
    if not base.shapes:
        msg = f"enable_lora is set, and {spec.folder.name} has none of the modules that adapters go to."
        raise ConfigError(msg, remedy="Leave it out, or use another model.")
    read = (read_adapter_folder(Path(module.path), base, config.max_lora_rank) for module in config.adapters)
    return AdapterPlan(base, tuple(zip(config.adapters, read, strict=True)))


class EngineAdapters:
    """The adapters of one engine.

    Args:
        plan: what is known of them before.
        slots: where their weights go.
        max_loras: how many there may be at once.
        max_rank: of each.

    Attributes:
        is_on: whether requests may have any.
    """

    is_on = True

    def __init__(self, plan: AdapterPlan, slots: AdapterSlots, max_loras: int, max_rank: int) -> None:
        self._base = plan.base
        self._slots = slots
        self._max_rank = max_rank
        self._registry = AdapterRegistry(max_loras)
        self._namespaces: dict[int, set[bytes]] = {}  # those that requests had, by slot
        self._reading = threading.Lock()  # one at a time, so that each sees what the others have left free

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests may name, in the order in which they came. Any thread may ask."""
        return self._registry.loaded

    @property
    def is_leaving(self) -> bool:
        """Whether any is unloaded, and used yet."""
        return bool(self._registry.leaving)

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name; one of slot 0 for none. Any thread may ask.

        Raises:
            AdapterNotFoundError: nobody has that name.
        """
        return self._registry.find(name) if name else _NOTHING

    def is_here(self, adapter: LoadedAdapter) -> bool:
        """Whether an adapter is there, by name or until its last request has ended. Any thread may ask."""
        return any(one is adapter for one in (*self._registry.leaving, *self._registry.loaded))

    def read(self, name: str, path: str, *, in_place: bool = False) -> ReadAdapter:
        """Read an adapter. It takes long; any thread may call it.

        Args:
            name: what requests will call it.
            path: its folder.
            in_place: whether it may take another's name.

        Raises:
            AdapterNotFoundError: there is none in that folder.
            AdapterError: it does not go with the model, is damaged, or there is no room for it.
        """
        wrong = check_adapter_name(name)
        if wrong:
            msg = f"The name of the adapter {wrong}."
            raise AdapterError(msg, remedy="Name it otherwise.")
        with self._reading:
            return self._read(name, path, in_place=in_place)

    def _read(self, name: str, path: str, *, in_place: bool) -> ReadAdapter:
        self._registry.check_room(name, in_place=in_place)
        folder = read_adapter_folder(Path(path), self._base, self._max_rank)
        room = available_memory_bytes()
        if 2 * folder.num_bytes > room:  # as it is read, and as it is packed
            msg = (
                f"{path} takes {human_bytes(2 * folder.num_bytes)} while it is read, and {human_bytes(room)} are free."
            )
            raise AdapterError(msg, remedy="Unload another, or start with a smaller kv_cache_memory_bytes.")
        weights = AdapterWeights(folder)
        return ReadAdapter(name, path, weights.fingerprint, self._slots.pack(weights), in_place)

    def install(self, read: ReadAdapter) -> LoadedAdapter:
        """Let requests name an adapter from now on.

        Raises:
            AdapterError: another was faster, and there is no room any more.
        """
        num_bytes = read.packed.num_bytes
        added = self._registry.add(read.name, read.path, read.fingerprint, num_bytes, in_place=read.in_place)
        self._slots.put(added.slot, read.packed)
        self._namespaces[added.slot] = set()
        return added

    def begin_unload(self, name: str) -> LoadedAdapter:
        """Take an adapter's name away; :meth:`settle` does the rest when its last request has ended.

        Raises:
            AdapterNotFoundError: nobody has that name.
        """
        return self._registry.begin_leaving(name)

    def note(self, adapter: LoadedAdapter, namespace: bytes, scheduler: Scheduler) -> None:
        """A request with an adapter comes, whose blocks are in a namespace."""
        if not adapter.slot:
            return
        known = self._namespaces[adapter.slot]
        known.add(namespace)
        if len(known) > _MOST_NAMESPACES:
            in_use = {request.namespace for request in _requests(scheduler)}
            cached = scheduler.core.forgetting.those_cached(known)
            self._namespaces[adapter.slot] = cached | (known & in_use) | {namespace}

    def settle(self, scheduler: Scheduler, tiering: Tiering) -> None:
        """Let those go whose last request has ended, with all of their blocks that no other adapter shares."""
        for gone in self._registry.end({request.adapter for request in _requests(scheduler)}):
            self._slots.drop(gone.slot)
            namespaces = self._namespaces.pop(gone.slot)
            heirs = [one for one in (*self.loaded, *self._registry.leaving) if one.fingerprint == gone.fingerprint]
            if heirs:
                self._namespaces[heirs[0].slot] |= namespaces
                continue
            tiering.forget(namespaces)
            scheduler.core.forgetting.forget(namespaces)

    def status(self, scheduler: Scheduler) -> AdapterStatus | None:
        """Return what they do now. Plain reads, so any thread may ask; None where there may be none."""
        loaded, leaving = self._registry.loaded, self._registry.leaving
        names = {one.slot: one.name for one in (*loaded, *leaving)}
        waiting = [*scheduler.waiting, *scheduler.fetching.values()]
        return AdapterStatus(
            self._registry.num_slots,
            loaded,
            len(leaving),
            sum(one.num_bytes for one in (*loaded, *leaving)),
            _named(scheduler.running, names),
            _named(waiting, names),
        )


def _requests(scheduler: Scheduler) -> list[Request]:
    return [*scheduler.with_blocks, *scheduler.waiting, *scheduler.fetching.values()]


def _named(requests: Sequence[Request], names: dict[int, str]) -> tuple[str, ...]:
    return tuple(sorted({names[slot] for slot in {one.adapter for one in [*requests]} if slot in names}))


class _NoAdapters(EngineAdapters):
    """Of an engine that takes none: no request may name any."""

    is_on = False

    def __init__(self) -> None:
        self._registry = AdapterRegistry(0)

    def find(self, name: str) -> LoadedAdapter:
        """See :class:`EngineAdapters`."""
        if name:
            raise self._refusal()
        return _NOTHING

    def read(self, name: str, path: str, *, in_place: bool = False) -> ReadAdapter:  # noqa: ARG002
        """See :class:`EngineAdapters`."""
        raise self._refusal()

    def begin_unload(self, name: str) -> LoadedAdapter:  # noqa: ARG002
        """See :class:`EngineAdapters`."""
        raise self._refusal()

    def status(self, scheduler: Scheduler) -> AdapterStatus | None:  # noqa: ARG002
        """See :class:`EngineAdapters`."""
        return None

    @staticmethod
    def _refusal() -> AdapterNotFoundError:
        msg = "There are no adapters: this engine was started without enable_lora."
        return AdapterNotFoundError(msg, remedy="Start it with --enable-lora.")


NO_ADAPTERS: EngineAdapters = _NoAdapters()
"""No adapters; it never changes, so all engines without any share it."""
