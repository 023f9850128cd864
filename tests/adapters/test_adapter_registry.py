"""Names and slots of adapters, beside a model that is a list."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagefold.adapters import AdapterRegistry
from pagefold.errors import AdapterError, AdapterNotFoundError

NUM_SLOTS = 3
names = st.sampled_from("abcde")


class Registry(RuleBasedStateMachine):
    """Loads, unloads and ends adapters. The model: who is here in order, each with its name or None for who leaves."""

    def __init__(self):
        super().__init__()
        self.registry = AdapterRegistry(NUM_SLOTS)
        self.here = []
        self.num_loaded = 0

    def _with_name(self, name):
        return next((one for one in self.here if one["name"] == name), None)

    @rule(name=names, in_place=st.booleans())
    def load(self, name, in_place):
        self.num_loaded += 1
        before = self._with_name(name)
        args = name, f"/{self.num_loaded}", f"f{self.num_loaded}", self.num_loaded
        if (before is not None and not in_place) or len(self.here) == NUM_SLOTS:
            with pytest.raises(AdapterError) as refused:
                self.registry.add(*args, in_place=in_place)
            assert not isinstance(refused.value, AdapterNotFoundError)
            return
        added = self.registry.add(*args, in_place=in_place)
        assert added[:3] == args[:3]
        if before is not None:
            before["name"] = None
        assert added.slot not in {one["slot"] for one in self.here}
        self.here.append({"name": name, "slot": added.slot, "fingerprint": added.fingerprint})

    @rule(name=names)
    def unload(self, name):
        found = self._with_name(name)
        if found is None:
            with pytest.raises(AdapterNotFoundError):
                self.registry.begin_leaving(name)
            return
        assert self.registry.begin_leaving(name).slot == found["slot"]
        found["name"] = None

    @rule(used=st.sets(st.integers(1, NUM_SLOTS)))
    def end(self, used):
        gone = self.registry.end(used)
        expected = [one for one in self.here if one["name"] is None and one["slot"] not in used]
        assert {one.slot for one in gone} == {one["slot"] for one in expected}
        self.here = [one for one in self.here if one not in expected]

    @invariant()
    def agrees(self):
        named = {one["name"]: one["fingerprint"] for one in self.here if one["name"] is not None}
        assert {one.name: one.fingerprint for one in self.registry.loaded} == named
        assert {one.slot for one in self.registry.leaving} == {one["slot"] for one in self.here if one["name"] is None}
        slots = [one.slot for one in (*self.registry.loaded, *self.registry.leaving)]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(1, NUM_SLOTS + 1))
        for name in "abcde":
            if name in named:
                assert self.registry.find(name).fingerprint == named[name]
            else:
                with pytest.raises(AdapterNotFoundError):
                    self.registry.find(name)


TestRegistry = Registry.TestCase


def test_what_is_refused_says_what_to_do():
    registry = AdapterRegistry(1)
    with pytest.raises(AdapterNotFoundError, match=r"cannot be found\. There is none\."):
        registry.find("sql")
    registry.add("sql", "/sql", "f", 1)
    with pytest.raises(AdapterError, match=r"already been loaded.*load_inplace"):
        registry.add("sql", "/sql", "f", 1)
    with pytest.raises(AdapterError, match=r"max_loras is 1.*--max-loras"):
        registry.add("other", "/other", "g", 1)
    registry.begin_leaving("sql")
    with pytest.raises(AdapterError, match="1 of which leave"):
        registry.add("other", "/other", "g", 1)
    registry.end(())
    assert registry.add("other", "/other", "g", 1).slot == 1
