"""A device in plain Python: it keeps what each position of each block holds, and computes tokens from all of that.

So a block that is wrong, stale, unwritten or somebody else's shows as another token. It fails when it is told to, at
any point of a step, and may write something that is no number, which spreads to whatever reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.steps import DamagedBlocksError, StepResult

if TYPE_CHECKING:
    from random import Random

    from pagefold.request import Request
    from pagefold.steps import StepPlan

NAN = "nan"
DAMAGED = "damaged"
_MODULUS = (1 << 61) - 1


class DeviceError(Exception):
    """A step failed."""


class Faults(NamedTuple):
    """What goes wrong in one step.

    Attributes:
        stage: where it fails: 0 before anything, 1 after the host's blocks, 2 in its rows, 3 after them; None: it runs.
        corrupted: requests which write something that is no number.
        damages: whether what it stores on the host is damaged there.
        is_lost: whether the step before has failed, which the host does not know yet. It may read anything.
    """

    stage: int | None
    corrupted: frozenset[Request]
    damages: bool
    is_lost: bool


def mix(a: int, b: int) -> int:
    return (a * 1000003 + b * 7919 + 12345) % _MODULUS


def _drawn(total: int, seed: int, draw: int, vocab_size: int) -> int:
    return mix(mix(total, seed + 17), draw) // 7 % vocab_size


def _sum(held: list[int]) -> int:
    total = 0
    for entry in held:
        total = mix(total, entry)
    return total


def entries(tokens: list[int], last: int = 1) -> list[int]:
    """Return what a right block holds of each of these tokens, behind an entry: it follows from all tokens so far."""
    held = []
    for token in tokens:
        last = mix(last, token)
        held.append(last)
    return held


def output_of(prompt: list[int], seed: int, num_tokens: int, stops: frozenset[int], vocab_size: int) -> list[int]:
    """Return what a request gets that runs alone on a device that never fails."""
    held = entries(prompt)
    total = _sum(held)
    output: list[int] = []
    while len(output) < num_tokens and not (output and output[-1] in stops):
        output.append(_drawn(total, seed, len(output), vocab_size))
        held.append(mix(held[-1], output[-1]))
        total = mix(total, held[-1])
    return output


class ContentDevice:
    """Carries out plans.

    Attributes:
        blocks: what each block holds, position by position; None for what nobody wrote.
        arena: the same of the host's blocks.
        tainted: requests that ever wrote or read something that is no number.
        copied_from: of each block that began as a copy: of which block, and what that held.
    """

    def __init__(self, random: Random, num_blocks: int, block_size: int, vocab_size: int):
        self.random = random
        self.size = block_size
        self.vocab_size = vocab_size
        self.blocks: list[list] = [[None] * block_size for _ in range(num_blocks)]
        self.arena: dict[int, list] = {}
        self.tainted: set[Request] = set()
        self.copied_from: dict[int, tuple[int, list]] = {}

    def run(self, plan: StepPlan, requests: list[Request], late: list[int] | None, faults: Faults) -> StepResult:
        """Carry out a plan; ``late`` are the tokens of the step before, None where there is none in flight."""
        if faults.stage == 0:
            raise DeviceError
        self._move(plan, damages=faults.damages)
        if faults.stage == 1:
            raise DeviceError
        for copy in plan.copies:
            held = self.blocks[copy.src][: copy.num_tokens]
            self.blocks[copy.dst] = held + [None] * (self.size - copy.num_tokens)
            self.copied_from[copy.dst] = (copy.src, held)
        tokens = list(plan.token_ids)
        for at, place in zip(plan.late, plan.late_from, strict=True):
            assert late is not None, "late tokens, and no step before"
            tokens[at] = late[place]
        totals: list[int | None] = []
        done = 0
        for row, request in enumerate(requests):
            held = self._read(plan, row, is_lost=faults.is_lost)
            own = tokens[done : done + plan.num_tokens[row]]
            done += len(own)
            if NAN in held or request in faults.corrupted:
                self.tainted.add(request)
                totals.append(None)
                self._write(plan, row, [NAN] * len(own))
                continue
            written = entries(own, held[-1] if held else 1)
            totals.append(_sum([*held, *written]))
            if faults.stage == 2 and self.random.random() < 0.5:
                written = [self.random.randrange(_MODULUS) for _ in written]
            self._write(plan, row, written)
        if faults.stage is not None:
            raise DeviceError
        sampled = zip(plan.sampling_rows, plan.seeds, plan.draws, strict=True)
        return StepResult(
            [0 if (total := totals[row]) is None else _drawn(total, *rest, self.vocab_size) for row, *rest in sampled],
            corrupted=sorted({row for row in plan.sampling_rows if totals[row] is None}),
        )

    def _move(self, plan: StepPlan, *, damages: bool) -> None:
        for store in plan.host_ops.stores:
            self.arena[store.host_id] = [DAMAGED] if damages else list(self.blocks[store.block_id])
        damaged = frozenset(host_id for host_id in plan.host_ops.ids_read if self.arena.get(host_id) == [DAMAGED])
        if damaged:
            raise DamagedBlocksError(damaged)
        for load in plan.host_ops.loads:
            self.blocks[load.block_id] = list(self.arena[load.host_id])

    def _read(self, plan: StepPlan, row: int, *, is_lost: bool) -> list:
        cache, start = plan.block_ids[row], plan.starts[row]
        held = [self.blocks[cache[at // self.size]][at % self.size] for at in range(start)]
        assert is_lost or None not in held, f"step {plan.step_id} reads what nobody wrote: {held}"
        return [0 if entry is None else entry for entry in held]

    def _write(self, plan: StepPlan, row: int, written: list) -> None:
        cache, start = plan.block_ids[row], plan.starts[row]
        for at, entry in enumerate(written, start):
            self.blocks[cache[at // self.size]][at % self.size] = entry
