"""``pagefold serve``: an OpenAI-compatible server. Flags are spelled as vLLM's."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from pagefold import __version__
from pagefold.cli.fail import fail
from pagefold.cli.options import MODEL_HELP, read_flags, with_flags
from pagefold.cli.permissions import tell_of_served
from pagefold.cli.serve_fleet import FleetWish, KeepsArguments, serve_fleet
from pagefold.config import (
    EngineConfig,
    KVEventsConfig,
    ServerConfig,
    environment_admin_key,
    environment_hash_seed,
    environment_int_hashes,
    environment_metrics_key,
    environment_remote_url,
    quotas_of,
)
from pagefold.errors import ConfigError, NotCalibratedError, PagefoldError
from pagefold.events import fan_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.config import Account
    from pagefold.engine.engine import Engine
    from pagefold.events import Emit
    from pagefold.observe.kv_event_publisher import KVEventPublisher
    from pagefold.observe.recorder import TraceRecorder
    from pagefold.observe.traces import Traces
    from pagefold.server.process import WarmPrompt

__all__ = ["check_installed", "quiet_transformers", "serve", "warn_if_connecting", "warn_if_open"]

_NEEDED = (
    "torch",
    "transformers",
    "numba",
    "safetensors",
    "fastapi",
    "uvicorn",
    "pydantic",
    "prometheus_client",
    "pythonjsonlogger",
    "llguidance",
)

_log = logging.getLogger(__name__)

_DOOR = "Server"
_FLEET = "Many servers"


class _Subscribers(NamedTuple):
    """Who begins to hear events when there is an engine.

    Attributes:
        recorder: of a trace.
        kv_events: what sends KV events.
    """

    recorder: TraceRecorder | None
    kv_events: KVEventPublisher | None


@with_flags(Server=ServerConfig, Engine=EngineConfig)
def serve(  # noqa: PLR0913 - flags, by name
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    *,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="TOML: keys with their tenants and customer classes.", rich_help_panel=_DOOR),
    ] = None,
    warm: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines: prompts to cache before /ready, as pagefold warm does.",
            rich_help_panel=_DOOR,
        ),
    ] = None,
    record_trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Record what requests did to the cache, for pagefold simulate: lengths, times, hashes; never text.",
            rich_help_panel=_DOOR,
        ),
    ] = None,
    kv_events_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Send KV events, as vLLM does: "
            '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\'. '
            'It takes pip install "pagefold[events]".',
            rich_help_panel=_DOOR,
        ),
    ] = None,
    fix_permissions: Annotated[
        bool,
        typer.Option(
            "--fix-permissions",
            help="Take from others on this machine all rights to cache folder, recording, verdicts and key file.",
            rich_help_panel=_DOOR,
        ),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help='So many servers behind this address, on Ray Serve: it takes pip install "pagefold[ray]".',
            rich_help_panel=_FLEET,
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="More are started up to so many, and ended, by the requests that there are; no more if not given.",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            help="By what requests are routed: prefix (what replicas hold), load, round_robin, random [prefix].",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    **flags: Any,  # noqa: ANN401 - of the configs
) -> None:
    """Serve MODEL with OpenAI's HTTP API."""
    began = time.monotonic()
    try:
        check_installed()
        events_config = KVEventsConfig() if kv_events_config is None else KVEventsConfig.of_json(kv_events_config)
        tell_of_served(_path(flags["kv_disk_path"]), record_trace, _path(api_key_file), fix=fix_permissions)
        if flags["kv_remote_url"] is None:
            flags["kv_remote_url"] = environment_remote_url()
        engine_config = EngineConfig(model=model, **read_flags(EngineConfig, flags))
        if not flags["metrics_key"]:
            flags["metrics_key"] = None if flags["open_metrics"] else environment_metrics_key()
        flags["admin_api_key"] = flags["admin_api_key"] or environment_admin_key()
        accounts = _accounts(api_key_file, engine_config)
        engine_config = replace(engine_config, kv_quotas=quotas_of(accounts))
        server_config = ServerConfig(accounts=accounts, **read_flags(ServerConfig, flags))
        if record_trace is not None and engine_config.has_slow_tiers:
            msg = "What slow tiers bring, and when, is not part of a recording yet."
            raise ConfigError(msg, remedy="Leave out --record-trace, or the disk and the remote store.")
        if record_trace is not None and engine_config.masks:
            msg = "What was kept of older tokens is not part of a recording yet."
            raise ConfigError(msg, remedy="Leave out --record-trace, or --kv-keep.")
        if record_trace is not None and engine_config.enable_lora:
            msg = "Adapters that come and go are not part of a recording yet."
            raise ConfigError(msg, remedy="Leave out --record-trace, or --enable-lora.")
        name = server_config.served_model_name or engine_config.model
        if any(module.name == name for module in engine_config.adapters):
            msg = f"lora_modules has {name!r}, which is the name of the model."
            raise ConfigError(msg, remedy="Name the adapter otherwise, or give --served-model-name.")
        if events_config.is_on and engine_config.masks:
            msg = "What was kept of older tokens is not part of KV events yet."
            raise ConfigError(msg, remedy="Leave out --kv-events-config, or --kv-keep.")
        prompts = [] if warm is None else _warm_prompts(warm)
        wish = FleetWish(KeepsArguments.arguments_of(context), replicas, max_replicas, routing, api_key_file)
        if wish.is_given:
            _refuse_of_one(record_trace, events_config)
            serve_fleet(wish, engine_config, server_config)
            return
        kv_events = _kv_events(events_config)
        exit_code = _run(engine_config, server_config, prompts, began, _Subscribers(_recorder(record_trace), kv_events))
    except PagefoldError as error:
        fail(error)
    raise typer.Exit(exit_code)


def _refuse_of_one(record_trace: Path | None, events: KVEventsConfig) -> None:
    """Refuse what each of several servers would do in the same place."""
    for flag, is_given in (("--record-trace", record_trace is not None), ("--kv-events-config", events.is_on)):
        if is_given:
            msg = f"{flag} is of one server: several cannot have the same."
            raise ConfigError(msg, remedy=f"Leave out {flag}, or --replicas.")


def _accounts(path: str | None, config: EngineConfig) -> tuple[Account, ...]:
    from pagefold.server.key_file import read_key_file  # noqa: PLC0415 - only here

    accounts = () if path is None else read_key_file(path, lambda line: typer.echo(line, err=True))
    urgent = next((account for account in accounts if account.priority), None)
    if urgent is not None and config.scheduling_policy != "priority":
        what = f"Class {urgent.customer_class} has priority {urgent.priority}"
        msg = f"{what}, but {config.scheduling_policy} looks at none."
        raise ConfigError(msg, remedy="Start with --scheduling-policy priority, or give the class priority 0.")
    weighty = next((account for account in accounts if account.weight is not None), None)
    if weighty is not None and config.scheduling_policy != "fair":
        what = f"tenant {weighty.tenant} has weight {weighty.weight:g}, and"
        typer.echo(f"warning: {what} weights count only with --scheduling-policy fair", err=True)
    offered = config.kv_keep or (1.0,)
    other = next((account for account in accounts if account.kv_keep not in (None, *offered)), None)
    if other is not None:
        shares = ", ".join(map(str, offered))
        msg = f"Tenant {other.tenant} has kv_keep {other.kv_keep}, and the server offers {shares}."
        raise ConfigError(msg, remedy="Add it to --kv-keep, or give the tenant what is offered.")
    return accounts


def _warm_prompts(path: str) -> list[WarmPrompt]:
    from pagefold.cli.warm_file import read_warm_file, warm_request_of  # noqa: PLC0415
    from pagefold.server.process import WarmPrompt  # noqa: PLC0415 - imports fastapi and uvicorn

    return [
        WarmPrompt(f"line {number} of {path}", warm_request_of(fields, f"Line {number} of {path}"))
        for number, fields in read_warm_file(path)
    ]


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _recorder(file: Path | None) -> TraceRecorder | None:
    from pagefold.observe.recorder import TraceRecorder  # noqa: PLC0415 - only here

    return None if file is None else TraceRecorder(file, time.monotonic)


def _kv_events(config: KVEventsConfig) -> KVEventPublisher | None:
    if not config.is_on:
        return None
    from pagefold.index import DEFAULT_SEED  # noqa: PLC0415 - only here
    from pagefold.observe.kv_event_publisher import KVEventPublisher  # noqa: PLC0415 - imports pyzmq and msgspec

    seed = environment_hash_seed()
    return KVEventPublisher(
        config, seed=DEFAULT_SEED if seed is None else seed, uses_int_hashes=environment_int_hashes()
    )


def _traces(config: ServerConfig, model_name: str) -> Traces | None:
    if config.otlp_traces_endpoint is None:
        return None
    from pagefold.observe.spans import open_spans  # noqa: PLC0415 - only here
    from pagefold.observe.traces import Traces  # noqa: PLC0415 - only here

    return Traces(open_spans(config.otlp_traces_endpoint, model_name, __version__))


def _run(
    engine_config: EngineConfig,
    config: ServerConfig,
    prompts: list[WarmPrompt],
    began: float,
    heard_by: _Subscribers,
) -> int:
    from pagefold.observe.logs import set_up_logs  # noqa: PLC0415 - imports python-json-logger
    from pagefold.server.listener import listen, raise_open_files  # noqa: PLC0415 - as below
    from pagefold.server.process import ServerProcess  # noqa: PLC0415 - imports fastapi and uvicorn

    set_up_logs(config.log_format, config.log_level)
    traces = _traces(config, config.served_model_name or engine_config.model)
    say = _log.info if config.log_format == "json" else typer.echo
    wanted = engine_config.max_num_seqs + config.max_queued_requests
    num_connections = raise_open_files(wanted)
    if num_connections < wanted:
        say(
            f"limit      {num_connections:,} connections, by the files that may be open (ulimit -n); "
            f"{wanted:,} requests may be here"
        )
    listener = listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    model_name = config.served_model_name or engine_config.model
    warn_if_open(host, config)
    if heard_by.kv_events is not None:
        warn_if_connecting(heard_by.kv_events.config, config)

    def say_ready() -> None:
        say(f"ready on {address} (model {model_name}) after {time.monotonic() - began:.1f} s")

    process = ServerProcess(
        model_name=model_name,
        config=config,
        listener=listener,
        start_engine=lambda emit: _start_engine(engine_config, emit, say, heard_by),
        on_ready=say_ready,
        warm=prompts,
        traces=traces,
        kv_events=heard_by.kv_events,
    )
    exit_code = process.run()
    if heard_by.recorder is not None:
        heard_by.recorder.close()
    if process.is_starting:
        _leave_at_once(exit_code)
    return exit_code


def warn_if_open(host: str, config: ServerConfig) -> None:
    """Say on stderr, or in the log if that is for machines, that others reach the server and need no key."""
    from pagefold.server.listener import is_beyond_this_machine  # noqa: PLC0415 - as above

    if config.api_keys or config.accounts or not is_beyond_this_machine(host):
        return
    _warn(
        f"listening on {host} without keys: whoever reaches it can use the model, and see what others do. "
        "Give --api-key or --api-key-file, or --host 127.0.0.1.",
        config,
    )


def warn_if_connecting(events_config: KVEventsConfig, config: ServerConfig) -> None:
    """Say, as above, that KV events are not listened for at their endpoint: the server connects to it, as vLLM does."""
    if events_config.is_on and not events_config.listens:
        _warn(
            f"for KV events the server connects to {events_config.endpoint}: it reaches only who listens there. "
            "It listens itself where an endpoint has * or :: in it, or is of ipc: "
            "for this machine alone, ipc:///run/pagefold/events or tcp://[::1]:5557.",
            config,
        )


def _warn(message: str, config: ServerConfig) -> None:
    if config.log_format == "json":
        _log.warning(message)
    else:
        typer.echo(f"warning: {message}", err=True)


def _leave_at_once(exit_code: int) -> NoReturn:
    """Leave while a thread still loads the model: Python cannot wind up around a thread that imports torch."""
    from rich.console import Console  # noqa: PLC0415 - only here

    Console(stderr=True).show_cursor()  # that thread may be drawing a progress bar, which hides it
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _start_engine(config: EngineConfig, emit: Emit, say: Callable[[str], None], heard_by: _Subscribers) -> Engine:
    from pagefold.cli.models import progress_bar  # noqa: PLC0415 - only here
    from pagefold.engine.build import build_engine  # noqa: PLC0415 - torch comes with it
    from pagefold.engine.planning import plan_engine  # noqa: PLC0415 - torch comes with it

    recorder, kv_events = heard_by
    with progress_bar() as progress:
        try:
            blueprint = plan_engine(config, progress=progress)
        except NotCalibratedError:
            from pagefold.cli.fit_scorer import fit_scorer  # noqa: PLC0415 - torch comes with it

            quiet_transformers(is_loaded=True)
            say(f"calibrates {config.model}, once: which of its tokens get attention")
            fit_scorer(config.model, progress, threads=config.threads)
            blueprint = plan_engine(config, progress=progress)
    quiet_transformers(is_loaded=not blueprint.is_fused)
    engine = build_engine(blueprint, emit=emit if recorder is None else fan_out(emit, recorder), say=say)
    if recorder is not None:  # on a card it is known only now how many blocks there are; no event came yet
        capacity, rules = engine.capacity, engine.scheduler.core.rules
        recorder.begin(config, capacity.num_blocks, capacity.num_host_blocks, rules)
        engine.decide_in_order()
    if kv_events is not None:
        core = engine.scheduler.core
        kv_events.begin(core.block_size, tuple(core.rules))
        replay = f", old ones at {kv_events.replay_endpoint}" if kv_events.replay_endpoint else ""
        say(f"KV events  at {kv_events.endpoint}{replay}: who reads them can read prompts")
    # What is there now stays: the collector need not walk through all of it again, in the middle of some step.
    gc.collect()
    gc.freeze()
    return engine


def quiet_transformers(*, is_loaded: bool) -> None:
    """Keep its progress bars and advice out of a server's log; without importing it, which many models do not need.

    Args:
        is_loaded: whether it will load the model.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # which it reads if something else imports it later
    if is_loaded or "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - as above

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()


def check_installed() -> None:
    """Return if all is installed that running a model takes.

    Raises:
        ConfigError: something is not.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        msg = f"To serve, {', '.join(missing)} must be installed."
        raise ConfigError(msg, remedy='pip install "pagefold[serve]"')
