"""Hardware: what an engine's model runs on, CPUs or a card."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.blueprint import Blueprint
    from pagefold.kv import Arbiter
    from pagefold.memory.capacity import Capacity
    from pagefold.runner.adapter_slots import AdapterSlots
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import Decoder, OnQueries, TorchRunner
    from pagefold.store import HostArena

__all__ = ["Hardware", "Ready"]


class Ready(NamedTuple):
    """A runner with the model's weights and blocks.

    Attributes:
        runner: the runner.
        capacity: what fits, as it was found in the end.
        arena: the blocks in the host's memory; None without a host tier.
        measure_link: lets an arbiter know the link between arena and runner; None where restoring always pays.
        adapters: where weights of adapters go; None where it takes none.
    """

    runner: TorchRunner
    capacity: Capacity
    arena: HostArena | None
    measure_link: Callable[[Arbiter, Callable[[str], None]], None] | None = None
    adapters: AdapterSlots | None = None


class Hardware(Protocol):
    """What an engine's model runs on.

    Attributes:
        computes_apart: whether the host has time for something else while a step is computed.
    """

    @property
    def computes_apart(self) -> bool: ...  # noqa: D102 - above

    def capacity(self, blueprint: Blueprint) -> Capacity:
        """Decide what fits, before weights are loaded; that of ``blueprint`` is not known yet.

        Raises:
            ConfigError, DoesNotFitError, BudgetTooSmallError: with what was wrong and what to do.
        """
        ...

    def lines(self, blueprint: Blueprint) -> list[str]:
        """Return what a start prints of what was decided."""
        ...

    def decoder(self, blueprint: Blueprint, slab: AnySlab, on_queries: OnQueries | None = None) -> Decoder:
        """Load the weights into who computes the layers.

        Args:
            blueprint: the model.
            slab: where its KV goes.
            on_queries: told each layer's queries of a step.
        """
        ...

    def ready(self, blueprint: Blueprint, say: Callable[[str], None]) -> Ready:
        """Load weights and allocate blocks.

        Args:
            blueprint: what was decided.
            say: takes the lines that a start prints.
        """
        ...
