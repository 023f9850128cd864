"""``pagefold serve --replicas``: many servers of one model behind one address, on Ray Serve."""

from __future__ import annotations

import os
import signal
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand

from pagefold.cli.spread import spread
from pagefold.config import available_cpus
from pagefold.errors import ConfigError, PagefoldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.config import EngineConfig, ServerConfig

__all__ = ["FleetWish", "KeepsArguments", "arguments_of_replicas", "serve_fleet"]

_OWN = ("--host", "--port", "--replicas", "--max-replicas", "--routing")
"""Flags of the front, each with a value, which replicas do not get."""

_GIVEN = "pagefold.arguments"
_OBJECT_STORE_BYTES = 200 * 2**20  # the least that is sensible: requests and answers are small
_ADDRESS = "RAY_ADDRESS"


class FleetNotStartedError(PagefoldError):
    """Servers behind one address have not started."""


class KeepsArguments(TyperCommand):
    """A command that remembers how it was called, so that others can be called alike.

    Of ``--lora-modules`` several values may follow, as with vLLM.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: Any = None,  # noqa: ANN401 - typer has click's types under names of its own
        **extra: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Parse the arguments, and keep them."""
        given = tuple(args)
        context = super().make_context(info_name, spread(args, ("--lora-modules",)), parent, **extra)
        context.meta[_GIVEN] = given
        return context

    @staticmethod
    def arguments_of(context: typer.Context) -> tuple[str, ...]:
        """Return how the command was called that runs in a context."""
        given: tuple[str, ...] = context.meta[_GIVEN]
        return given


class FleetWish(NamedTuple):
    """What is asked of many servers.

    Attributes:
        arguments: what ``pagefold serve`` was called with.
        replicas: how many there are at least.
        max_replicas: at most; None for no more.
        routing: by what requests are routed; None for by prefixes.
        api_key_file: the key file of all.
    """

    arguments: Sequence[str]
    replicas: int | None
    max_replicas: int | None
    routing: str | None
    api_key_file: str | None

    @property
    def is_given(self) -> bool:
        """Whether anything is asked of several servers."""
        return any(each is not None for each in (self.replicas, self.max_replicas, self.routing))


def arguments_of_replicas(given: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a ``pagefold serve`` that each replica gets: all but those of the front."""
    kept: list[str] = []
    values_to_skip = 0
    for argument in given:
        name, has_value, _ = argument.partition("=")
        if values_to_skip:
            values_to_skip -= 1
        elif name in _OWN:
            values_to_skip = 0 if has_value else 1
        else:
            kept.append(argument)
    return tuple(kept)


def serve_fleet(wish: FleetWish, engine: EngineConfig, server: ServerConfig) -> None:
    """Serve until a signal comes; then let all that runs finish.

    Args:
        wish: how many, and how they are routed to.
        engine: what each server's engine was checked with.
        server: what its door was checked with; its address is the front's.

    Raises:
        ConfigError: Ray is not installed, or something does not go with many servers.
    """
    settings = _settings(wish, engine, server)
    if find_spec("ray") is None:
        msg = "To serve with --replicas, Ray must be installed."
        raise ConfigError(msg, remedy='pip install "pagefold[ray]"')
    ended = threading.Event()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else servers would give way to everything else on the machine
    import ray  # noqa: PLC0415 - seconds, and only here
    from ray import serve  # noqa: PLC0415

    from pagefold.integrations.ray.application import application  # noqa: PLC0415

    if os.environ.get(_ADDRESS):
        ray.init(log_to_driver=True)
    else:  # a cluster of this machine alone, on which replicas share the cores as their threads say
        # By "local" it is not another Ray of this machine, which Ray would take if there is one, or was.
        ray.init(
            "local",
            num_cpus=settings.max_replicas + 1,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    try:
        serve.start(http_options={"host": server.host, "port": server.port})
        try:
            serve.run(application(settings), blocking=False, name="pagefold", route_prefix="/")
        except RuntimeError as error:
            msg = f"The replicas have not started: {error}"
            raise FleetNotStartedError(
                msg, remedy="What they said is above; pagefold serve alone says the same."
            ) from None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        name = server.served_model_name or engine.model
        typer.echo(f"ready on http://{server.host}:{server.port} (model {name}, {settings.min_replicas} replicas)")
        ended.wait()
        serve.delete("pagefold")  # waits until replicas have finished what they have
    finally:
        serve.shutdown()
        ray.shutdown()


def _settings(wish: FleetWish, engine: EngineConfig, server: ServerConfig) -> Any:  # noqa: ANN401 - imported where used
    from pagefold.integrations.ray.settings import FleetSettings  # noqa: PLC0415 - only with replicas

    if wish.replicas is None:
        msg = "--max-replicas and --routing are of several servers."
        raise ConfigError(msg, remedy="Give --replicas too.")
    if engine.kv_disk_path is not None:
        msg = "Several servers cannot share one folder of a disk tier."
        raise ConfigError(msg, remedy="Give --kv-remote-url, a store that they share, or leave out --kv-disk-path.")
    is_alone = not os.environ.get(_ADDRESS)
    if is_alone and engine.kv_cache_memory_bytes is None and max(wish.replicas, wish.max_replicas or 1) > 1:
        msg = "Several servers share this machine's memory, and each would take as much as one alone."
        raise ConfigError(msg, remedy="Say with --kv-cache-memory-bytes how much KV each of them may keep.")
    if server.accounts and not (server.metrics_key or server.admin_api_key):
        msg = "Nobody could see what the servers do together: with --api-key-file that takes a key of its own."
        raise ConfigError(msg, remedy="Give --metrics-key or --admin-api-key.")
    if engine.enable_lora:
        msg = "enable_lora is set, and routes of adapters are of one server."
        raise ConfigError(msg, remedy="Leave it out, or leave out --replicas.")
    if not server.port:
        msg = "port is 0, and clients must know where the front is."
        raise ConfigError(msg, remedy="Give --port.")
    max_replicas = wish.replicas if wish.max_replicas is None else wish.max_replicas
    arguments = arguments_of_replicas(wish.arguments)
    if engine.threads is None and is_alone:
        arguments += ("--threads", str(max(1, available_cpus() // max_replicas)))
    return FleetSettings(
        arguments=arguments,
        routing=wish.routing or "prefix",
        min_replicas=wish.replicas,
        max_replicas=max_replicas,
        drain_s=server.drain_s,
        max_body_bytes=server.max_body_bytes,
        api_key_file=wish.api_key_file,
    )
