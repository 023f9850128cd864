"""The roster of replicas: who comes, goes, comes back and cannot be reached, on the real router, index and sockets."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from pagefold.errors import ConfigError
from pagefold.index import PrefixIndex
from pagefold.integrations.ray.forwarded import ReplicaAddress
from pagefold.integrations.ray.roster import Roster
from pagefold.routing import PrefixRouting, Prompt, Router


class Stored(NamedTuple):
    """A batch that tells of one block."""

    ts: float
    block_hash: bytes

    @property
    def events(self):
        return [self]

    def tell(self, holdings):
        holdings.stored([self.block_hash], "GPU", 0)


class Ear:
    """Hears a replica: what it is told goes to the index until it is closed."""

    def __init__(self, index, name):
        self.index, self.name, self.is_closed = index, name, False
        index.begin(name)

    def hear(self, block_hash):
        self.index.apply(self.name, Stored(1.0, block_hash))

    def close(self):
        self.is_closed = True


class Replicas:
    """Who there is, and a roster that follows them."""

    def __init__(self):
        self.index = PrefixIndex()
        self.router = Router(PrefixRouting(), self.index, block_size=4, cache_tokens=64)
        self.ears: list[Ear] = []
        self.lost: set[str] = set()
        self.others: dict[str, str] = {}
        self.deaf: set[str] = set()
        self.roster = Roster(self.router, self.index, self.ask, self.hear)

    async def ask(self, name):
        if name in self.lost:
            raise LookupError(name)
        return ReplicaAddress(self.others.get(name, name), "ipc://events", "ipc://replay", 4, 64)

    def hear(self, address):
        if address.replica in self.deaf:
            raise ConfigError(address.replica)
        self.ears.append(Ear(self.index, address.replica))
        return self.ears[-1]

    async def turn(self, *names):
        self.roster.want(frozenset(names))
        return await self.roster.turn()

    async def settled(self):
        """Wait until closing has been carried out."""
        while self.roster._closing and not all(task.done() for task in self.roster._closing.values()):
            await asyncio.sleep(0.01)


@pytest.fixture
def replicas():
    return Replicas()


def test_who_comes_gets_requests_and_who_goes_gets_none(replicas):
    async def go():
        assert await replicas.turn("a", "b")
        assert set(replicas.router.open_replicas) == {"a", "b"}
        assert await replicas.turn("b")
        assert replicas.router.open_replicas == ["b"]
        await replicas.settled()

    asyncio.run(go())
    assert [ear.is_closed for ear in replicas.ears if ear.name == "a"] == [True]
    assert set(replicas.index.replicas()) == {"b"}


def test_who_goes_with_requests_is_kept_until_they_have_ended(replicas):
    async def go():
        await replicas.turn("a")
        replicas.router.route("one", Prompt((), 4), 0.0)
        assert not await replicas.turn(), "it is looked at again"
        assert replicas.router.num_requests("a") == 1
        replicas.router.ended("one", 1.0)
        assert await replicas.turn()
        await replicas.settled()

    asyncio.run(go())
    with pytest.raises(KeyError):
        replicas.router.num_requests("a")


def test_who_comes_back_stays_and_what_it_told_before_is_forgotten(replicas):
    async def go():
        await replicas.turn("a")
        replicas.ears[0].hear(b"x" * 32)
        replicas.router.route("one", Prompt((), 4), 0.0)
        await replicas.turn()
        assert await replicas.turn("a")
        replicas.ears[1].hear(b"y" * 32)
        replicas.router.ended("one", 1.0)
        assert await replicas.turn("a")
        await replicas.settled()

    asyncio.run(go())
    assert replicas.router.open_replicas == ["a"]
    assert [ear.is_closed for ear in replicas.ears] == [True, False]
    assert replicas.index.match([b"y" * 32]) == {"a": 1}
    assert replicas.index.match([b"x" * 32]) == {}


@pytest.mark.parametrize("why", ["lost", "others", "deaf"])
def test_who_cannot_be_met_is_tried_again(replicas, why):
    async def go():
        kept = getattr(replicas, why)
        kept.update({"a": "b"} if why == "others" else {"a"})
        assert not await replicas.turn("a", "b")
        assert replicas.router.open_replicas == ["b"]
        kept.clear()
        assert await replicas.turn("a", "b")

    asyncio.run(go())
    assert set(replicas.router.open_replicas) == {"a", "b"}


def test_it_follows_until_it_is_cancelled_whatever_goes_wrong(replicas):
    async def go():
        following = asyncio.create_task(replicas.roster.follow())
        replicas.hear = None
        replicas.roster._hear = None  # a bug: it is told, and tried again
        replicas.roster.want(frozenset("a"))
        await asyncio.sleep(0.05)
        assert not following.done()
        replicas.roster._hear = lambda address: Ear(replicas.index, address.replica)
        replicas.roster.want(frozenset("a"))
        while replicas.router.open_replicas != ["a"]:
            await asyncio.sleep(0.01)
        following.cancel()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_only_one_goes_when_its_successor_has_been_met():
    async def roll():
        there = Replicas()
        await there.turn("old")
        open_while_asked = []

        async def ask(name):
            open_while_asked.append(list(there.router.open_replicas))
            return await Replicas.ask(there, name)

        there.roster._ask = ask
        await there.turn("new")
        return open_while_asked, list(there.router.open_replicas)

    assert asyncio.run(roll()) == ([["old"]], ["new"])
