"""Shards: which of the long tests run together, and in which order, so that each shard is done in a time that is told.

A unit is what stays together: the long cases of one test function, which share what they make; or one case, where all
of the function's would take too long for that; or all of a file whose cases share what takes longest (``WHOLE``). Every
unit is in exactly one shard, by what `long_seconds.json` says of the seconds that a case takes; a test that is not
there yet counts as ``UNKNOWN_S``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TABLE = Path(__file__).parent / "long_seconds.json"
UNKNOWN_S = 60.0
"""What a test counts as that nobody has measured."""
TOGETHER_S = 240.0
"""A function whose cases take longer than this is dealt by the case."""
WHOLE = ("tests/equivalence/test_real_model.py",)
"""Files of which each shard would make the same for minutes: here what transformers says of long prompts."""
BOUND_S = 25 * 60.0
"""How long a shard may take on two quiet cores."""
NUM_CORES = 2


def seconds_of_functions() -> dict[str, float]:
    """The seconds of processor time that one case of a function takes, by ``file::function``, as they were measured.

    ``pytest -m long --measure-long FILES`` measures, and so does ``make test-long ARGS=--measure-long``.
    """
    return json.loads(TABLE.read_text(encoding="utf-8"))


def write_seconds(seconds: dict[str, float]) -> None:
    TABLE.write_text(json.dumps(seconds, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class Deck:
    """The units of all long tests, and the shards that they are dealt to.

    Args:
        cases: the ids of all long tests, as pytest writes them.
        seconds: of one case of each function.
    """

    def __init__(self, cases: Iterable[str], seconds: dict[str, float]) -> None:
        cases = list(cases)
        num_cases = Counter(map(function_of, cases))
        self._unit_of = {}
        self.seconds: Counter[str] = Counter()
        for case in cases:
            function = function_of(case)
            takes = seconds.get(function, UNKNOWN_S)
            file = case.partition("::")[0]
            unit = function if takes * num_cases[function] <= TOGETHER_S else case
            unit = file if file in WHOLE else unit
            self._unit_of[case] = unit
            self.seconds[unit] += takes

    def unit_of(self, case: str) -> str:
        return self._unit_of[case]

    def place(self, unit: str) -> tuple[float, str]:
        """Where a unit stands among all: those that take longest come first, so that workers end together."""
        return -self.seconds[unit], unit

    def deal(self, num_shards: int) -> list[set[str]]:
        """The units of each shard: each goes to the shard that has least, those that take longest before others."""
        shards: list[set[str]] = [set() for _ in range(num_shards)]
        loads = [0.0] * num_shards
        for unit in sorted(self.seconds, key=self.place):
            least = loads.index(min(loads))
            shards[least].add(unit)
            loads[least] += self.seconds[unit]
        return shards

    def time_of(self, units: Iterable[str]) -> float:
        """How long a shard takes on ``NUM_CORES`` cores: a worker each, and no unit is cut between them."""
        workers = [0.0] * NUM_CORES
        for unit in sorted(units, key=self.place):
            workers[workers.index(min(workers))] += self.seconds[unit]
        return max(workers)


def function_of(case: str) -> str:
    """The id of a case without its parameters, and without the group that xdist adds."""
    return re.split(r"[\[@]", case, maxsplit=1)[0]


def parse_shard(text: str) -> tuple[int, int]:
    """Read ``2/5``: the second of five shards.

    Raises:
        ValueError: it is not of this form, or there is no such shard.
    """
    shard, _, num_shards = text.partition("/")
    if not 1 <= int(shard) <= int(num_shards):
        msg = f"there is no shard {shard} of {num_shards}"
        raise ValueError(msg)
    return int(shard), int(num_shards)
