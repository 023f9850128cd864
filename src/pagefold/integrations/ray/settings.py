"""FleetSettings: what replicas are started with, and how requests are routed to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagefold.errors import ConfigError
from pagefold.routing import ROUTING_POLICIES

__all__ = ["FleetSettings"]

_CHOSEN = frozenset({"--host", "--port", "--kv-events-config"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Replicas that are alike, and their front.

    Attributes:
        arguments: of ``pagefold serve``, for each replica: the model, and flags; not ``--host``, ``--port`` and
            ``--kv-events-config``, which the replica chooses.
        routing: the name of a routing policy.
        min_replicas, max_replicas: Ray starts and ends replicas between these, by the requests that they have.
        target_ongoing_requests: of each replica, which Ray aims at.
        max_ongoing_requests: of each replica; more wait at the front.
        upscale_delay_s, downscale_delay_s: how long there must be too many or too few requests before Ray starts or
            ends a replica, in seconds.
        num_cpus: of Ray, for each replica.
        drain_s: how long a replica that is ended may finish what it has, in seconds.
        max_body_bytes: of a request, as of the replicas.
        api_key_file: the replicas' key file, which says whose a request is; None without.

    Raises:
        ConfigError: a value is out of range, or a flag is the front's.
    """

    arguments: tuple[str, ...]
    routing: str = "prefix"
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: int = 16
    max_ongoing_requests: int = 1024
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    num_cpus: float = 1.0
    drain_s: float = 600.0
    max_body_bytes: int = 4 * 2**20
    api_key_file: str | None = None

    def __post_init__(self) -> None:
        if self.routing not in ROUTING_POLICIES:
            msg = f"There is no routing policy {self.routing!r}."
            raise ConfigError(msg, remedy=f"There are {', '.join(ROUTING_POLICIES)}.")
        if not 1 <= self.min_replicas <= self.max_replicas:
            msg = f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}."
            raise ConfigError(msg, remedy="There must be at least 1, and no fewer at most than at least.")
        for name in ("upscale_delay_s", "downscale_delay_s"):
            delay_s: float = getattr(self, name)
            if not 0 <= delay_s < math.inf:
                msg = f"{name} is {delay_s:g}."
                raise ConfigError(msg, remedy="Give seconds, 0 or more.")
        for argument in self.arguments:
            flag = argument.partition("=")[0]
            if flag in _CHOSEN:
                msg = f"{flag} cannot be given to replicas."
                raise ConfigError(msg, remedy="Each replica has its own, which is chosen for it. Leave it out.")
