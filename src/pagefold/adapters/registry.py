"""AdapterRegistry: which adapters there are, and in which slot each is. Pure: it decides, others load and drop weights.

A name has one adapter at a time. One that is unloaded loses its name at once and *leaves*: it keeps its slot until the
last request that uses it has ended, so a name may have another adapter by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import AdapterError, AdapterNotFoundError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["AdapterRegistry", "LoadedAdapter"]


class LoadedAdapter(NamedTuple):
    """An adapter that requests can have.

    Attributes:
        name: what requests call it.
        path: its folder, as it was given.
        fingerprint: of its weights and scales.
        slot: where its weights are, from 1 on; 0 is no adapter.
        num_bytes: that they take.
    """

    name: str
    path: str
    fingerprint: str
    slot: int
    num_bytes: int


class AdapterRegistry:
    """Names and slots.

    Args:
        num_slots: how many there may be at once, those included that leave.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._by_name: dict[str, LoadedAdapter] = {}
        self._leaving: dict[int, LoadedAdapter] = {}  # by slot
        self._free = list(range(num_slots, 0, -1))

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Those that have a name, in the order in which they came. Any thread may ask."""
        return tuple(self._by_name.copy().values())

    @property
    def leaving(self) -> tuple[LoadedAdapter, ...]:
        """Those that have lost theirs, and are used yet. Any thread may ask."""
        return tuple(self._leaving.copy().values())

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name.

        Raises:
            AdapterNotFoundError: it has none.
        """
        found = self._by_name.get(name)
        if found is None:
            msg = f"The lora adapter {name!r} cannot be found."
            raise AdapterNotFoundError(msg, remedy=self._what_there_is())
        return found

    def check_room(self, name: str, *, in_place: bool = False) -> None:
        """See that an adapter of this name could be added.

        Raises:
            AdapterError: the name is taken, or no slot is free.
        """
        if name in self._by_name and not in_place:
            msg = f"The lora adapter {name!r} has already been loaded."
            raise AdapterError(msg, remedy="Unload it first, or set 'load_inplace' to true.")
        if not self._free:
            leaving = f", {len(self._leaving)} of which leave when their last requests have ended" * bool(self._leaving)
            msg = f"max_loras is {self.num_slots}, and so many adapters are loaded{leaving}."
            raise AdapterError(msg, remedy="Unload one, or start with a larger --max-loras.")

    def add(self, name: str, path: str, fingerprint: str, num_bytes: int, *, in_place: bool = False) -> LoadedAdapter:
        """Give an adapter a slot; who had the name leaves.

        Raises:
            AdapterError: see :meth:`check_room`.
        """
        self.check_room(name, in_place=in_place)
        if name in self._by_name:
            self.begin_leaving(name)
        added = self._by_name[name] = LoadedAdapter(name, path, fingerprint, self._free.pop(), num_bytes)
        return added

    def begin_leaving(self, name: str) -> LoadedAdapter:
        """Take an adapter's name away; its slot is free after :meth:`end`.

        Raises:
            AdapterNotFoundError: no adapter has it.
        """
        found = self.find(name)
        del self._by_name[name]
        self._leaving[found.slot] = found
        return found

    def end(self, slots: Collection[int]) -> tuple[LoadedAdapter, ...]:
        """Free the slots of those that leave, but for ``slots``, which are used; return whose they were."""
        gone = tuple(one for slot, one in self._leaving.items() if slot not in slots)
        for one in gone:
            del self._leaving[one.slot]
            self._free.append(one.slot)
        return gone

    def _what_there_is(self) -> str:
        names = ", ".join(sorted(self._by_name)[:16])
        return f"There are {names}." if names else "There is none."
