"""The ledger against a twin that keeps every prompt and looks into the tree after every step.

The twin is slow and obvious: it compares whole prompts token by token, remembers of every path of blocks whether the
tree has it, and why it had to go, from the tree itself. Memory is short, prompts share prefixes, requests run together,
are preempted and cancelled, terms differ, and now and then everything is forgotten. Each token that was computed must
have one cause in the ledger, and the twin's.
"""

from __future__ import annotations

from array import array
from random import Random

import pytest
from ledger_house import House

from pagefold.events import PrefixLookup
from pagefold.kv import Namespace

SIZE = 3
SPACES = [Namespace(model="m", cache_salt=salt, tenant=tenant).key() for tenant in "ab" for salt in ("", "s")]


class Twin:
    """What the ledger should say, token by token."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.asked: dict[str, tuple[bytes, array[int], int]] = {}  # id -> namespace, prompt and output, prompt tokens
        self.order: list[str] = []  # of those that were let in
        self.live: set[str] = set()
        self.gone: dict[tuple[bytes, tuple[int, ...]], str] = {}  # path -> why
        self.there: set[tuple[bytes, tuple[int, ...]]] = set()
        self.wanted: dict[str, list[str]] = {}

    def tree(self) -> set[tuple[bytes, tuple[int, ...]]]:
        """Return all paths that are written."""
        found = set()
        stack = [(root.key, (), root) for root in self.house.core.tree.roots.values()]
        while stack:
            space, path, node = stack.pop()
            for child in node.children.values():
                longer = (*path, *array("i", child.key))
                if child.committed:
                    found.add((space, longer))
                stack.append((space, longer, child))
        return found

    def looked_up(self, event: PrefixLookup) -> None:
        """A request was let in: the tree is as the step before has left it, less what the plan evicted."""
        if event.after_preemption:
            return
        _, tokens, _ = self.asked[event.request_id]
        prompt = tuple(tokens[: event.num_tokens])
        now = self.tree()
        for path in self.there - now:
            self.gone.setdefault(path, "evicted")
        num_hit = event.num_hit_tokens
        places = range(num_hit, len(prompt))
        self.wanted[event.request_id] = [self.cause(event.request_id, prompt, at, num_hit, now) for at in places]
        self.order.append(event.request_id)

    def cause(self, name, prompt, at, num_hit, now) -> str:  # noqa: C901, PLR0911, PLR0912 - obvious, one by one
        space = self.asked[name][0]
        end = at // SIZE * SIZE + SIZE
        path = (space, prompt[:end])
        if end <= len(prompt):
            if path in now:
                return "last_token" if end == len(prompt) else "unknown"
            if path in self.gone and not self.is_coming(name, space, prompt[:end]):
                return self.gone[path]
        if self.is_coming(name, space, prompt[: min(end, len(prompt))]) and end <= len(prompt):
            return "computing"
        first = next(  # the first block that nobody has had
            block
            for block in range(num_hit // SIZE, len(prompt))
            if (space, prompt[: (block + 1) * SIZE]) not in now | set(self.gone) or (block + 1) * SIZE > len(prompt)
        )
        recent = list(dict.fromkeys(self.asked[one][0] for one in reversed(self.order)))
        for other in recent if not first else ():
            if other == space or Namespace.from_key(other).tenant != Namespace.from_key(space).tenant:
                continue
            known = [
                num
                for num in range(SIZE, len(prompt) + 1, SIZE)
                if all((other, prompt[:i]) in now | set(self.gone) for i in range(SIZE, num + 1, SIZE))
            ]
            if known and known[-1] > num_hit:
                if at < known[-1]:
                    return "other_namespace"
                break
        nearest, ends = 0, True
        for one in self.order:
            theirs_space, theirs, num_prompt = self.asked[one]
            theirs = theirs[:num_prompt] if one in self.live else theirs
            if theirs_space != space or one == name:
                continue
            common = 0
            while common < min(len(theirs), len(prompt)) and theirs[common] == prompt[common]:
                common += 1
            is_end = common in (num_prompt, len(theirs))
            if common > nearest:
                nearest, ends = common, is_end
            elif common == nearest:
                ends = ends and is_end
        if at < nearest:
            if at == len(prompt) - 1 and nearest == len(prompt) and num_hit == at:
                return "last_token"
            return "shared"  # of several sorts
        return "never_seen" if ends or not nearest else "differs"

    def is_coming(self, name, space, path) -> bool:
        """Whether somebody who was let in before computes this, and has not come so far."""
        return any(
            one in self.live
            and one != name
            and self.asked[one][0] == space
            and tuple(self.asked[one][1][: len(path)]) == path
            and self.asked[one][2] >= len(path)
            and self.house.scheduler.get(one).num_computed_tokens < len(path)
            for one in self.order
        )


SHARED = {"partial_block", "not_kept", "computing", "last_token"}


def run(  # noqa: C901 - a random life
    seed: int, num_steps: int, ledger_blocks: int | None = 4000
) -> tuple[int, set[str]]:
    random = Random(seed)
    house: House
    twin: Twin

    def listen(event: object) -> None:
        if isinstance(event, PrefixLookup):
            twin.looked_up(event)

    house = House(
        num_blocks=random.choice((14, 20, 40)),
        block_size=SIZE,
        max_num_seqs=3,
        max_num_batched_tokens=random.choice((7, 16, 40)),
        policy=random.choice(("lru", "lfu", "learned", "s3-fifo", "2q", "slru", "fifo", "weighted", "cost-aware")),
        listen=listen,
        ledger_blocks=ledger_blocks,
    )
    twin = Twin(house)
    prompts: list[list[int]] = [[]]
    checked, causes = 0, set()
    for _ in range(num_steps):
        if random.random() < 0.5 and len(house.scheduler.waiting) < 4:
            begun = random.choice(prompts[-12:])
            tokens = [
                *begun[: random.randrange(len(begun) + 1)],
                *(random.randrange(3) for _ in range(random.randrange(1, 9))),
            ]
            tokens = tokens[:26]
            prompts.append(tokens)
            space = random.choice(SPACES)
            name = house.send(tokens, space, max_tokens=random.randrange(1, 8))
            request = house.scheduler.get(name)
            assert request is not None
            twin.asked[name] = (space, request.token_ids, len(tokens))
            twin.live.add(name)
        twin.there = twin.tree()
        house.step()
        now = twin.tree()
        for path in twin.there - now:
            twin.gone[path] = "evicted"
        for path in now:
            twin.gone.pop(path, None)
        if random.random() < 0.02:
            for path in now:
                twin.gone[path] = "reset"
            house.core.forgetting.reset()
        if random.random() < 0.05 and twin.live:
            house.scheduler.finish(random.choice(sorted(twin.live)), "abort")
        twin.live = {name for name in twin.live if house.scheduler.get(name) is not None}
    for name, wanted in twin.wanted.items():
        (record,) = house.ledger.records(name)
        misses = record.misses
        assert misses is not None
        assert record.num_hit_tokens + sum(miss.num_tokens for miss in misses) == record.num_prompt_tokens
        at = record.num_hit_tokens
        for miss in misses:
            assert miss.start == at < miss.end
            at = miss.end
        told = [miss.cause.value for miss in misses for _ in range(miss.num_tokens)]
        for place, (one, other) in enumerate(zip(told, wanted, strict=True)):
            causes.add(one)
            checked += 1
            assert ledger_blocks is None or one == other or (other == "shared" and one in SHARED), (
                seed,
                name,
                place + record.num_hit_tokens,
                told,
                wanted,
                list(twin.asked[name][1]),
            )
    return checked, causes


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("seed", range(12))
def test_every_token_has_the_twins_cause(seed: int) -> None:
    checked, causes = run(seed, 300)
    assert checked > 300
    assert len(causes) >= 6, causes


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(4))
def test_a_ledger_that_is_too_small_leaves_no_token_without_a_cause(seed: int) -> None:
    checked, _ = run(100 + seed, 300, ledger_blocks=None)
    assert checked > 300
