"""The application: replicas and their front, as Ray Serve deploys them; what ``pagefold serve --replicas`` runs.

By Ray's own tools::

    serve run pagefold.integrations.ray.application:build arguments="smollm2-135m --threads 1" max_replicas=4
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from pagefold.integrations.ray.ingress import PagefoldIngress
from pagefold.integrations.ray.replica import PagefoldReplica
from pagefold.integrations.ray.request_router import ChosenReplicaRouter
from pagefold.integrations.ray.settings import FleetSettings

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["application", "build"]

_INGRESS_CPUS = 0.1
_FRONT_REQUESTS = 100_000


def application(settings: FleetSettings) -> Application:
    """Return the application of a fleet, to be given to ``serve.run``."""
    scaling: dict[str, Any] = {"num_replicas": settings.min_replicas}
    if settings.max_replicas > settings.min_replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.min_replicas,
                max_replicas=settings.max_replicas,
                target_ongoing_requests=settings.target_ongoing_requests,
                upscale_delay_s=settings.upscale_delay_s,
                downscale_delay_s=settings.downscale_delay_s,
            )
        }
    replicas = serve.deployment(PagefoldReplica).options(
        name="replicas",
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.num_cpus},
        graceful_shutdown_timeout_s=settings.drain_s,
        request_router_config=RequestRouterConfig(request_router_class=ChosenReplicaRouter),
        **scaling,
    )
    front = serve.deployment(PagefoldIngress).options(
        name="front",
        max_ongoing_requests=_FRONT_REQUESTS,
        ray_actor_options={"num_cpus": _INGRESS_CPUS},
        max_surge_percent=100,  # another front is there before this one goes: else nobody would answer for seconds
        graceful_shutdown_timeout_s=settings.drain_s,
    )
    return front.bind(replicas.bind(settings), settings)


def build(args: dict[str, Any]) -> Application:
    """Return the application of what ``serve run`` and Ray's YAML give: fields of :class:`FleetSettings` by name.

    Raises:
        ConfigError: a value is out of range.
    """
    arguments = args.get("arguments", ())
    given = args | {"arguments": tuple(shlex.split(arguments) if isinstance(arguments, str) else arguments)}
    for name in ("min_replicas", "max_replicas", "target_ongoing_requests", "max_ongoing_requests"):
        if name in given:
            given[name] = int(given[name])
    for name in ("num_cpus", "drain_s", "upscale_delay_s", "downscale_delay_s"):
        if name in given:
            given[name] = float(given[name])
    return application(FleetSettings(**given))
