"""``pagefold serve``: an OpenAI-compatible server. Flags are spelled as vLLM's."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast

import typer

from pagefold.cli.fail import fail
from pagefold.cli.permissions import tell_of_served
from pagefold.cli.size import parse_size
from pagefold.config import (
    EngineConfig,
    ServerConfig,
    environment_admin_key,
    environment_metrics_key,
    environment_remote_url,
)
from pagefold.errors import ConfigError, InvalidRequestError, PagefoldError
from pagefold.events import fan_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.config import Account, AttentionBackend, Device, Dtype, ModelImpl, TransportCodec
    from pagefold.engine.engine import Engine
    from pagefold.events import Emit
    from pagefold.kv import WritePolicy
    from pagefold.observe.recorder import TraceRecorder
    from pagefold.server.process import WarmPrompt

__all__ = ["check_installed", "listed", "parse_layers", "quiet_transformers", "serve", "warn_if_open"]

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

_ENGINE, _DOOR = "Engine", "Server"


def serve(  # noqa: PLR0913 - one parameter a flag
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name, a local folder, or a hub id org/name.")
    ],
    *,
    host: Annotated[str, typer.Option(help="Where to listen.", rich_help_panel=_DOOR)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", rich_help_panel=_DOOR)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; MODEL if not given.", rich_help_panel=_DOOR)
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that SIGTERM lets running requests finish.", rich_help_panel=_DOOR)
    ] = 30.0,
    max_queued_requests: Annotated[
        int,
        typer.Option(help="Requests beyond --max-num-seqs that may wait; more get a 429.", rich_help_panel=_DOOR),
    ] = 1024,
    max_body_bytes: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="The largest request body, as 512K or 16M; more is a 413.",
            rich_help_panel=_DOOR,
        ),
    ] = 4 * 2**20,
    max_connections: Annotated[
        int, typer.Option(help="At once; one too many takes the place of an idle one.", rich_help_panel=_DOOR)
    ] = 4096,
    http_header_timeout: Annotated[
        float, typer.Option(help="Seconds that the head of a request may take to come.", rich_help_panel=_DOOR)
    ] = 30.0,
    http_body_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that its body may take; one that stalls is given up after 30.", rich_help_panel=_DOOR
        ),
    ] = 300.0,
    timeout_keep_alive: Annotated[
        float, typer.Option(help="Seconds that a connection stays after an answer.", rich_help_panel=_DOOR)
    ] = 5.0,
    responses_store_bytes: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory for /v1/responses that clients go on from by their id, as 64M; 0 keeps none.",
            rich_help_panel=_DOOR,
        ),
    ] = 64 * 2**20,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Clients must bring it; may be given several times.", rich_help_panel=_DOOR),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="TOML: keys with their tenants and customer classes.", rich_help_panel=_DOOR),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            help="What admin routes ask for; closed without. Or $PAGEFOLD_ADMIN_API_KEY.", rich_help_panel=_DOOR
        ),
    ] = None,
    metrics_key: Annotated[
        str | None,
        typer.Option(
            help="What /metrics and /load ask for; with --api-key-file and without it they are the admin's. "
            "Or $PAGEFOLD_METRICS_KEY.",
            rich_help_panel=_DOOR,
        ),
    ] = None,
    open_metrics: Annotated[
        bool,
        typer.Option("--open-metrics", help="Show them to everybody, with --api-key-file too.", rich_help_panel=_DOOR),
    ] = False,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGINS",
            help="Websites whose pages may use the server: '[\"https://a.org\"]', or one, several times; * for all.",
            rich_help_panel=_DOOR,
        ),
    ] = None,
    allowed_methods: Annotated[
        list[str] | None,
        typer.Option(metavar="METHODS", help="What they may send; all if not given.", rich_help_panel=_DOOR),
    ] = None,
    allowed_headers: Annotated[
        list[str] | None,
        typer.Option(metavar="HEADERS", help="And with which headers; all if not given.", rich_help_panel=_DOOR),
    ] = None,
    allow_credentials: Annotated[
        bool,
        typer.Option("--allow-credentials", help="Browsers send cookies along.", rich_help_panel=_DOOR),
    ] = False,
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
    fix_permissions: Annotated[
        bool,
        typer.Option(
            "--fix-permissions",
            help="Take from others on this machine all rights to cache folder, recording, verdicts and key file.",
            rich_help_panel=_DOOR,
        ),
    ] = False,
    log_format: Annotated[
        str, typer.Option(help="text, or json for one object a line.", rich_help_panel=_DOOR)
    ] = "text",
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line for each request), warning or error.", rich_help_panel=_DOOR)
    ] = "info",
    device: Annotated[
        str, typer.Option(help="auto (a card where there is one), cpu or cuda.", rich_help_panel=_ENGINE)
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, float64, bfloat16 or float16.", rich_help_panel=_ENGINE)
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.", rich_help_panel=_ENGINE)] = 16,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="How K and V are stored: auto (as computed), float16, bfloat16, fp8, fp8_e5m2, "
            "int8_per_token_head, k8v4, int4_per_token_head, kivi2, ...",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto",
    kv_cache_dtype_skip_layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Layers that stay in 16 bit all the same, such as 0,29.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_quality_floor: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Refuse a codec under it: how often, as pagefold eval found, the likeliest token is that of auto. "
            "0.97 for 8 bit and 0.95 for less if not given.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    force_kv_cache_dtype: Annotated[
        bool,
        typer.Option("--force-kv-cache-dtype", help="Start with a codec under that floor.", rich_help_panel=_ENGINE),
    ] = False,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="KV budget: bytes, or 512M, 2G, 2GiB; a share of the free memory if not given.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Of a card's whole memory, how much is for weights, activations and KV.",
            rich_help_panel=_ENGINE,
        ),
    ] = 0.9,
    kv_offloading_size: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            help="Host memory for evicted blocks, beside the KV budget.",
            rich_help_panel=_ENGINE,
        ),
    ] = 0.0,
    allow_streaming: Annotated[
        bool,
        typer.Option(
            "--allow-streaming",
            help="Serve requests larger than the KV budget: what does not fit is read from the host's memory.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    kv_disk_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Keep blocks on a disk too, in this folder.", rich_help_panel=_ENGINE),
    ] = None,
    kv_disk_size: Annotated[
        float, typer.Option(metavar="GIB", help="What that folder may take at most.", rich_help_panel=_ENGINE)
    ] = 10.0,
    kv_remote_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Share blocks with other machines: redis://HOST:PORT or mooncake://HOST:PORT. "
            "Or $PAGEFOLD_KV_REMOTE_URL.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_remote_required: Annotated[
        bool,
        typer.Option("--kv-remote-required", help="Do not start without that pool.", rich_help_panel=_ENGINE),
    ] = False,
    kv_transport_codec: Annotated[
        str,
        typer.Option(
            help="How blocks are packed on their way to that pool: none, lossless, lossy7 or lossy6.",
            rich_help_panel=_ENGINE,
        ),
    ] = "none",
    kv_write_policy: Annotated[
        str,
        typer.Option(
            help="When blocks are written to disk and pool: write_back, write_through or write_through_selective.",
            rich_help_panel=_ENGINE,
        ),
    ] = "write_back",
    max_model_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|auto",
            help="Longest prompt and output together; auto for as much as the budget holds.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences running at once.", rich_help_panel=_ENGINE)] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens computed in one step.", rich_help_panel=_ENGINE)
    ] = 512,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Share blocks between requests that begin alike.", rich_help_panel=_ENGINE)
    ] = True,
    eviction_policy: Annotated[
        str,
        typer.Option(
            help="Which cached blocks go first: default (learned), lru, lfu, fifo, slru, 2q, s3-fifo, weighted, "
            "cost-aware, learned or adaptive.",
            rich_help_panel=_ENGINE,
        ),
    ] = "default",
    attention_backend: Annotated[
        str, typer.Option(help="auto, cpu, cuda or reference.", rich_help_panel=_ENGINE)
    ] = "auto",
    model_impl: Annotated[
        str, typer.Option(help="Who computes the layers: auto, pagefold or transformers.", rich_help_panel=_ENGINE)
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="int8: weights of a quarter of the size.", rich_help_panel=_ENGINE)
    ] = None,
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="On a card, no CUDA graphs.", rich_help_panel=_ENGINE),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Threads that compute; all cores if not given.", rich_help_panel=_ENGINE)
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Refuse what would let a request's tokens depend on its batch.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    scheduling_policy: Annotated[
        str, typer.Option(help="Who goes first: fcfs, or priority (the smallest).", rich_help_panel=_ENGINE)
    ] = "fcfs",
    priority_aging: Annotated[
        float, typer.Option(help="Seconds of waiting that are worth one level of priority.", rich_help_panel=_ENGINE)
    ] = 60.0,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which an unfinished request is ended; never if not given.", rich_help_panel=_ENGINE
        ),
    ] = None,
    max_pinned_share: Annotated[
        float, typer.Option(help="Of all KV blocks, how many pins may keep together.", rich_help_panel=_ENGINE)
    ] = 0.5,
    pin_half_life: Annotated[
        float, typer.Option(help="Seconds in which a pin's priority halves.", rich_help_panel=_ENGINE)
    ] = 3600.0,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools: hermes or smollm2; what its chat template says if not given.",
            rich_help_panel=_DOOR,
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model marks its thinking: deepseek_r1, deepseek_v3, glm45, granite, mistral, qwen3 or "
            "seed_oss; it is not told from answers if not given.",
            rich_help_panel=_DOOR,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of requests that bring none.", rich_help_panel=_ENGINE)] = 0,
) -> None:
    """Serve MODEL with OpenAI's HTTP API."""
    began = time.monotonic()
    try:
        check_installed()
        tell_of_served(_path(kv_disk_path), record_trace, _path(api_key_file), fix=fix_permissions)
        engine_config = EngineConfig(
            model=model,
            device=cast("Device", device),
            dtype=cast("Dtype", dtype),  # the config checks it
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_dtype_skip_layers=parse_layers(kv_cache_dtype_skip_layers),
            kv_quality_floor=kv_quality_floor,
            force_kv_cache_dtype=force_kv_cache_dtype,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_offloading_size=kv_offloading_size,
            allow_streaming=allow_streaming,
            kv_disk_path=kv_disk_path,
            kv_disk_size=kv_disk_size,
            kv_remote_url=environment_remote_url() if kv_remote_url is None else kv_remote_url,
            kv_remote_required=kv_remote_required,
            kv_transport_codec=cast("TransportCodec", kv_transport_codec),
            kv_write_policy=cast("WritePolicy", kv_write_policy),
            max_model_len=_num_tokens(max_model_len),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            eviction_policy=eviction_policy,
            attention_backend=cast("AttentionBackend", attention_backend),
            model_impl=cast("ModelImpl", model_impl),
            quantization=cast("Literal['int8'] | None", quantization),
            enforce_eager=enforce_eager,
            threads=threads,
            batch_invariant=batch_invariant,
            seed=seed,
            scheduling_policy=cast('Literal["fcfs", "priority"]', scheduling_policy),
            priority_aging_s=priority_aging,
            request_timeout_s=request_timeout,
            max_pinned_share=max_pinned_share,
            pin_half_life_s=pin_half_life,
        )
        server_config = ServerConfig(
            host=host,
            port=port,
            served_model_name=served_model_name,
            drain_s=shutdown_timeout,
            max_queued_requests=max_queued_requests,
            max_body_bytes=max_body_bytes,
            max_connections=max_connections,
            http_header_timeout_s=http_header_timeout,
            http_body_timeout_s=http_body_timeout,
            timeout_keep_alive_s=timeout_keep_alive,
            metrics_key=metrics_key or (None if open_metrics else environment_metrics_key()),
            open_metrics=open_metrics,
            allowed_origins=listed(allowed_origins, ()),
            allowed_methods=listed(allowed_methods, ("*",)),
            allowed_headers=listed(allowed_headers, ("*",)),
            allow_credentials=allow_credentials,
            api_keys=tuple(api_key or ()),
            accounts=_accounts(api_key_file, scheduling_policy),
            admin_api_key=admin_api_key or environment_admin_key(),
            log_format=cast('Literal["text", "json"]', log_format),
            log_level=cast('Literal["debug", "info", "warning", "error"]', log_level),
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            responses_store_bytes=responses_store_bytes,
        )
        if record_trace is not None and engine_config.has_slow_tiers:
            msg = "What slow tiers bring, and when, is not part of a recording yet."
            raise ConfigError(msg, remedy="Leave out --record-trace, or the disk and the remote store.")
        prompts = [] if warm is None else _warm_prompts(warm)
        exit_code = _run(engine_config, server_config, prompts, began, _recorder(record_trace))
    except PagefoldError as error:
        fail(error)
    raise typer.Exit(exit_code)


def _accounts(path: str | None, scheduling_policy: str) -> tuple[Account, ...]:
    from pagefold.server.key_file import read_key_file  # noqa: PLC0415 - only here

    accounts = () if path is None else read_key_file(path, lambda line: typer.echo(line, err=True))
    urgent = next((account for account in accounts if account.priority), None)
    if urgent is not None and scheduling_policy == "fcfs":
        what = f"Class {urgent.customer_class} has priority {urgent.priority}"
        msg = f"{what}, but requests are served first come first served."
        raise ConfigError(msg, remedy="Start with --scheduling-policy priority, or give the class priority 0.")
    return accounts


def _warm_prompts(path: str) -> list[WarmPrompt]:
    from pydantic import ValidationError  # noqa: PLC0415 - only here

    from pagefold.cli.warm_file import read_warm_file  # noqa: PLC0415
    from pagefold.server.process import WarmPrompt  # noqa: PLC0415 - imports fastapi and uvicorn
    from pagefold.server.warm_schemas import WarmRequest  # noqa: PLC0415

    prompts: list[WarmPrompt] = []
    for number, fields in read_warm_file(path):
        try:
            prompts.append(WarmPrompt(f"line {number} of {path}", WarmRequest.model_validate(fields)))
        except ValidationError as error:
            first = error.errors()[0]
            msg = f"Line {number} of {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}."
            raise ConfigError(msg) from None
        except InvalidRequestError as error:
            msg = f"Line {number} of {path}: {error}"
            raise ConfigError(msg) from None
    return prompts


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _num_tokens(max_model_len: str | None) -> int | Literal["auto"] | None:
    if max_model_len is None or max_model_len == "auto":
        return cast('Literal["auto"] | None', max_model_len)
    try:
        return int(max_model_len)
    except ValueError:
        msg = f"{max_model_len!r} is neither a number of tokens nor auto."
        raise typer.BadParameter(msg, param_hint="--max-model-len") from None


def parse_layers(text: str | None) -> tuple[int, ...]:
    """Return the layers that a flag names, as ``0,29``; none if it was not given.

    Raises:
        typer.BadParameter: it is no list of layers.
    """
    try:
        return tuple(int(layer) for layer in text.split(",")) if text else ()
    except ValueError:
        msg = f"{text!r} is no list of layers."
        raise typer.BadParameter(msg, param_hint="--kv-cache-dtype-skip-layers") from None


def listed(values: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a flag lists: a JSON list, as vLLM writes it, or one text each time that it was given."""
    if not values:
        return default
    listed: list[str] = []
    for value in values:
        try:
            texts = json.loads(value) if value.lstrip().startswith("[") else [value]
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            msg = f"{value!r} is neither a text nor a JSON list of texts."
            raise ConfigError(msg, remedy="""Write it as '["https://example.org"]'.""")
        listed += texts
    return tuple(listed)


def _recorder(file: Path | None) -> TraceRecorder | None:
    from pagefold.observe.recorder import TraceRecorder  # noqa: PLC0415 - only here

    return None if file is None else TraceRecorder(file, time.monotonic)


def _run(
    engine_config: EngineConfig,
    config: ServerConfig,
    prompts: list[WarmPrompt],
    began: float,
    recorder: TraceRecorder | None,
) -> int:
    from pagefold.observe.logs import set_up_logs  # noqa: PLC0415 - imports python-json-logger
    from pagefold.server.listener import listen, raise_open_files  # noqa: PLC0415 - as below
    from pagefold.server.process import ServerProcess  # noqa: PLC0415 - imports fastapi and uvicorn

    set_up_logs(config.log_format, config.log_level)
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

    def say_ready() -> None:
        say(f"ready on {address} (model {model_name}) after {time.monotonic() - began:.1f} s")

    process = ServerProcess(
        model_name=model_name,
        config=config,
        listener=listener,
        start_engine=lambda emit: _start_engine(engine_config, emit, say, recorder),
        on_ready=say_ready,
        warm=prompts,
    )
    exit_code = process.run()
    if recorder is not None:
        recorder.close()
    if process.is_starting:
        _leave_at_once(exit_code)
    return exit_code


def warn_if_open(host: str, config: ServerConfig) -> None:
    """Say on stderr, or in the log if that is for machines, that others reach the server and need no key."""
    from pagefold.server.listener import is_beyond_this_machine  # noqa: PLC0415 - as above

    if config.api_keys or config.accounts or not is_beyond_this_machine(host):
        return
    message = (
        f"listening on {host} without keys: whoever reaches it can use the model, and see what others do. "
        "Give --api-key or --api-key-file, or --host 127.0.0.1."
    )
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


def _start_engine(
    config: EngineConfig, emit: Emit, say: Callable[[str], None], recorder: TraceRecorder | None
) -> Engine:
    from pagefold.cli.models import progress_bar  # noqa: PLC0415 - only here
    from pagefold.engine.build import build_engine  # noqa: PLC0415 - torch comes with it
    from pagefold.engine.planning import plan_engine  # noqa: PLC0415 - torch comes with it

    with progress_bar() as progress:
        blueprint = plan_engine(config, progress=progress)
    quiet_transformers(is_loaded=not blueprint.is_fused)
    engine = build_engine(blueprint, emit=emit if recorder is None else fan_out(emit, recorder), say=say)
    if recorder is not None:  # on a card it is known only now how many blocks there are; no event came yet
        recorder.begin(config, engine.capacity.num_blocks, engine.capacity.num_host_blocks)
        engine.decide_in_order()
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
