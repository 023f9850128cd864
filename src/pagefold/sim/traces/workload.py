"""Workload: what can be drawn from parameters, and what every kind of it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pagefold.errors import ConfigError
from pagefold.sim.size_limits import MAX_REQUESTS, MAX_TOKENS, MAX_WORKLOAD_TOKENS
from pagefold.sim.traces.request import Trace
from pagefold.sim.traces.segments import GeneratedRequest, Segment, as_trace

if TYPE_CHECKING:
    from random import Random

    from pagefold.request import Request

__all__ = ["MostOf", "Workload", "by_arrival", "defaults_of", "draw_segment", "told"]

_SEED_BITS = 30
_FROM_ZERO = ("popularity", "sub_agents_per_turn", "pause_spread")


class MostOf(NamedTuple):
    """The largest workload that some parameters allow.

    Attributes:
        num_requests: of all; also of what they share, where that is more.
        prompt_tokens: of the longest prompt.
    """

    num_requests: int
    prompt_tokens: int


class Workload(ABC):
    """What can be drawn from parameters.

    Raises:
        ConfigError: a parameter is out of range.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type] # every workload is a dataclass
            _check(field.name, getattr(self, field.name))
        most = self.most()
        for what, value, allowed in (
            ("requests", most.num_requests, MAX_REQUESTS),
            ("tokens in its longest prompt", most.prompt_tokens, MAX_TOKENS),
            ("tokens in all prompts", most.num_requests * most.prompt_tokens, MAX_WORKLOAD_TOKENS),
        ):
            if value > allowed:
                msg = f"{self} may have {value:,} {what}."
                raise ConfigError(msg, remedy=f"Choose parameters for at most {allowed:,}.")

    @abstractmethod
    def most(self) -> MostOf:
        """Return how large it can become, without drawing any of it."""

    @abstractmethod
    def generate(self) -> list[GeneratedRequest]:
        """Return the requests in order of arrival."""

    def requests(self) -> list[Request]:
        """Return the requests with their tokens, fresh ones at each call: a replay uses them up."""
        return [each.request() for each in self.generate()]

    def trace(self, tokens_per_id: int = 16) -> Trace:
        """Return the requests as a trace, with an id for so many tokens."""
        return Trace(str(self), as_trace(self.generate(), tokens_per_id))

    def __str__(self) -> str:
        """Return what :func:`parse_workload` reads: the name, and what is not as ever."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        said = [f"{name}={told(given[name])}" for name in given if given[name] != defaults_of(type(self))[name]]
        return f"{self.name}:{','.join(said)}" if said else self.name


def defaults_of(kind: type[Workload]) -> dict[str, object]:
    """Return the parameters of a kind of workload, with what they are where nobody says."""
    return {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type] # a dataclass


def told(value: object) -> str:
    """Return a parameter as :func:`parse_workload` reads it."""
    return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else f"{value}"


def _check(name: str, value: object) -> None:
    """Refuse what no workload can have: ranges upside down, no requests, rates of nothing."""
    if name == "seed":
        return
    least, most = value if isinstance(value, tuple) else (value, value)
    is_share = name in _FROM_ZERO or (name.endswith("_s") and not name.endswith("_per_s"))
    floor = 0 if is_share or name.startswith("singles") else 1 if isinstance(least, int) else 1e-9
    if not floor <= least <= most <= MAX_TOKENS:
        msg = f"{name} is {told(value)}."
        raise ConfigError(msg, remedy=f"It must be at least {floor:g} and at most {MAX_TOKENS:,}, the lesser first.")


def draw_segment(rng: Random, num_tokens: tuple[int, int]) -> Segment:
    """Return a text that nobody else begins with, of so many tokens."""
    return Segment(rng.getrandbits(_SEED_BITS), rng.randint(*num_tokens))


def by_arrival(requests: list[GeneratedRequest]) -> list[GeneratedRequest]:
    """Return the requests in order of arrival."""
    return sorted(requests, key=lambda request: request.arrival_s)
