"""ServerConfig: settings of the server, frozen, each with what ``pagefold serve`` says of it.

Names and meaning of flags are vLLM's where vLLM has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from pagefold.config.flag import Flag, bad_value, check_types, one_of
from pagefold.errors import ConfigError

__all__ = ["MAX_PRIORITY", "REASONING_PARSERS", "Account", "ServerConfig", "is_key"]

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_TOOL_CALL_PARSERS = ("hermes", "smollm2")
REASONING_PARSERS = ("deepseek_r1", "deepseek_v3", "glm45", "granite", "mistral", "qwen3", "seed_oss")
MAX_PRIORITY = 2**31
"""A request's priority lies between this and its negative."""
_MAX_PORT = 65535
_HTTP_URL = re.compile(r"https?://[^\s/]+(?:/\S*)?", re.ASCII)
_LEAST_OF_DOOR = {"max_body_bytes": 1, "max_connections": 1, "responses_store_bytes": 0, "max_queued_requests": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A key, and who holds it.

    Attributes:
        key: never shown.
        tenant: whose blocks its requests share; empty for those whom no key file names.
        customer_class: on what terms it is served; a label.
        priority: of its requests, unless they bring one.
        kv_keep: the share of older tokens that its requests have kept, unless they ask; None for the server's default.
        weight: the tenant's share beside other tenants' weights, where the server shares by them; None for 1.
        tokens_per_s: tokens a second that the tenant may use, prompts and outputs together; None for any number.
        burst_tokens: how many it may use at once, behind a pause; None for what comes in a minute.
        kv_floor: up to this share of the device's blocks its cached ones are not evicted for others; None for none.
        kv_cap: the tenant never has more than this share of them; None for any number.
    """

    key: str = field(repr=False)
    tenant: str = ""
    customer_class: str = ""
    priority: int = 0
    kv_keep: float | None = None
    weight: float | None = None
    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    kv_floor: float | None = None
    kv_cap: float | None = None


def is_key(text: str) -> bool:
    """Whether ``text`` can be an API key: what a header carries."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in, and what it tells.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        served_model_name: what clients call the model; None for the name it was started with.
        max_body_bytes: a larger request body is refused with 413.
        max_connections: at once. One too many takes the place of one that has nothing to do, or is refused with 503.
        http_header_timeout_s: how long the head of a request may take to come, in seconds.
        http_body_timeout_s: how long its body may.
        timeout_keep_alive_s: how long a connection stays after an answer if nothing comes.
        drain_s: how long SIGTERM lets running requests finish, in seconds.
        max_queued_requests: how many requests may be here beyond the ``max_num_seqs`` that can run; more are refused
            with 429.
        api_keys: clients must bring one of them, or an account's; none of either leaves the door open. Never shown.
        accounts: keys with their tenants.
        admin_api_key: what admin routes ask for; None closes them. Never shown.
        metrics_key: what ``/metrics`` and ``/load`` ask for; None leaves them open where no accounts are, and is the
            admin's alone where they are. Never shown.
        open_metrics: leave them open beside accounts too.
        allowed_origins: websites whose pages may use the server from a browser, as ``https://example.org``; ``*`` for
            all.
        allowed_methods, allowed_headers: what they may send.
        allow_credentials: whether browsers send cookies along, for a proxy before the server. Not with ``*``.
        log_format: ``text``, or ``json`` for one object a line.
        log_level: ``debug``, ``info`` (a line for each request), ``warning`` or ``error``.
        tool_call_parser: the form in which the model writes calls of tools; None for what its chat template says.
        reasoning_parser: the form in which the model marks its thinking; None where it is not told from answers.
        otlp_traces_endpoint: where traces of requests go, by OpenTelemetry's protocol over HTTP; None for nowhere.
        responses_store_bytes: memory for responses that clients go on from by their id; 0 keeps none.
        enable_explain: whether the causes of misses, waits and refusals are remembered, for who asks.

    Raises:
        ConfigError: a value is out of range.
    """

    host: Annotated[str, Flag("Where to listen.")] = "127.0.0.1"
    port: Annotated[int, Flag("0 takes a free one.")] = 8000
    served_model_name: Annotated[str | None, Flag("What clients call the model; MODEL if not given.")] = None
    max_body_bytes: Annotated[int, Flag("The largest request body, as 512K or 16M; more is a 413.", metavar="SIZE")] = (
        4 * 2**20
    )
    max_connections: Annotated[int, Flag("At once; one too many takes the place of an idle one.")] = 4096
    http_header_timeout_s: Annotated[float, Flag("Seconds that the head of a request may take to come.")] = 30.0
    http_body_timeout_s: Annotated[
        float, Flag("Seconds that its body may take; one that stalls is given up after 30.")
    ] = 300.0
    timeout_keep_alive_s: Annotated[float, Flag("Seconds that a connection stays after an answer.")] = 5.0
    drain_s: Annotated[float, Flag("Seconds that SIGTERM lets running requests finish.", name="shutdown_timeout")] = (
        30.0
    )
    max_queued_requests: Annotated[int, Flag("Requests beyond --max-num-seqs that may wait; more get a 429.")] = 1024
    api_keys: Annotated[tuple[str, ...], Flag("Clients must bring it; may be given several times.", name="api_key")] = (
        field(default=(), repr=False)
    )
    accounts: tuple[Account, ...] = ()
    admin_api_key: Annotated[
        str | None, Flag("What admin routes ask for; closed without. Or $PAGEFOLD_ADMIN_API_KEY.")
    ] = field(default=None, repr=False)
    metrics_key: Annotated[
        str | None,
        Flag(
            "What /metrics and /load ask for; with --api-key-file and without it they are the "
            "admin's. Or $PAGEFOLD_METRICS_KEY."
        ),
    ] = field(default=None, repr=False)
    open_metrics: Annotated[bool, Flag("Show them to everybody, with --api-key-file too.")] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        Flag(
            "Websites whose pages may use the server: '[\"https://a.org\"]', or one, several times; * for all.",
            metavar="ORIGINS",
        ),
    ] = ()
    allowed_methods: Annotated[tuple[str, ...], Flag("What they may send; all if not given.", metavar="METHODS")] = (
        "*",
    )
    allowed_headers: Annotated[
        tuple[str, ...], Flag("And with which headers; all if not given.", metavar="HEADERS")
    ] = ("*",)
    allow_credentials: Annotated[bool, Flag("Browsers send cookies along.")] = False
    log_format: Annotated[LogFormat, Flag("text, or json for one object a line.")] = "text"
    log_level: Annotated[LogLevel, Flag("debug, info (a line for each request), warning or error.")] = "info"
    tool_call_parser: Annotated[
        str | None,
        Flag("How the model writes calls of tools: hermes or smollm2; what its chat template says if not given."),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Flag(
            "How the model marks its thinking: deepseek_r1, deepseek_v3, glm45, granite, mistral, "
            "qwen3 or seed_oss; it is not told from answers if not given."
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Flag(
            "Where traces of requests go, as http://host:4318/v1/traces; nowhere if not given. "
            'It takes pip install "pagefold[otel]".',
            metavar="URL",
        ),
    ] = None
    responses_store_bytes: Annotated[
        int, Flag("Memory for /v1/responses that clients go on from by their id, as 64M; 0 keeps none.", metavar="SIZE")
    ] = 64 * 2**20
    enable_explain: Annotated[
        bool, Flag("Remember why tokens were computed and what requests waited for: see pagefold explain.")
    ] = True

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.port <= _MAX_PORT:
            raise bad_value("port", self.port, f"between 0 (any free one) and {_MAX_PORT}")
        for name, least in _LEAST_OF_DOOR.items():
            if getattr(self, name) < least:
                raise bad_value(name, getattr(self, name), f"at least {least}")
        for name in ("http_header_timeout_s", "http_body_timeout_s", "timeout_keep_alive_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise bad_value(name, getattr(self, name), "a positive number of seconds")
        if not self.drain_s >= 0:
            raise bad_value("drain_s", self.drain_s, "a number of seconds, at least 0")
        one_of("log_format", self.log_format, get_args(LogFormat))
        one_of("log_level", self.log_level, get_args(LogLevel))
        if self.tool_call_parser is not None:
            one_of("tool_call_parser", self.tool_call_parser, _TOOL_CALL_PARSERS)
        if self.reasoning_parser is not None:
            one_of("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        self._check_traces()
        self._check_origins()
        self._check_keys()

    def _check_traces(self) -> None:
        if self.otlp_traces_endpoint is None:
            return
        if not _HTTP_URL.fullmatch(self.otlp_traces_endpoint):
            allowed = "a URL that begins with http:// or https://"
            raise bad_value("otlp_traces_endpoint", repr(self.otlp_traces_endpoint), allowed)

    def _check_origins(self) -> None:
        if self.allow_credentials and "*" in self.allowed_origins:
            msg = "allow_credentials is set, and allowed_origins is *: every website could ask in its visitors' names."
            raise ConfigError(msg, remedy="Name the origins, or leave out allow_credentials.")

    def _check_keys(self) -> None:
        keys = [*self.api_keys, *(account.key for account in self.accounts)]
        keys += [key for key in (self.admin_api_key, self.metrics_key) if key is not None]
        if self.metrics_key is not None and self.open_metrics:
            msg = "metrics_key and open_metrics are both set."
            raise ConfigError(msg, remedy="Leave one of them out.")
        if not all(map(is_key, keys)):
            raise bad_value("api_key", "no key", "printable ASCII without spaces")  # it is not repeated: logs are read
        if self.accounts and len(set(keys)) < len(keys):
            msg = "The same key is given twice: in the key file, as api_key, admin_api_key or metrics_key."
            raise ConfigError(msg, remedy="Give each tenant, the admin and the metrics a key of their own.")
