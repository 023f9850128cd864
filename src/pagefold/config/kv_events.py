"""KVEventsConfig: whether and where KV events are sent. Names, meanings and defaults are vLLM's (0.32)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Literal, TypeAlias

from pagefold.config.flag import bad_value, check_types, one_of
from pagefold.errors import ConfigError

__all__ = ["KVEventsConfig"]

Publisher: TypeAlias = Literal["null", "zmq"]

_ENDPOINT = re.compile(r"tcp://(?:\*|\[[:.%\w]+\]|[\w.-]+):(?:\*|\d{1,5})|ipc://\S+", re.ASCII)
_NEEDED = {"zmq": "pyzmq", "msgspec": "msgspec", "cbor2": "cbor2"}
_LEAST = {"buffer_steps": 1, "hwm": 0, "max_queue_size": 1}
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where KV events go.

    Attributes:
        enable_kv_cache_events: whether they are sent at all.
        publisher: ``zmq``, or ``null`` for nowhere; None for what ``enable_kv_cache_events`` says.
        endpoint: of the events: with ``*`` or ``::`` in it, or of ``ipc``, it is listened on; else the publisher
            connects there. (vLLM's ``inproc``, for who is in the same process, is none here.)
        replay_endpoint: where it listens for those who have missed something; None for nowhere.
        buffer_steps: how many batches are kept for them.
        hwm: how many batches wait for a subscriber that is slow, before it loses some; 0 for any number.
        max_queue_size: how many batches wait to be sent; what comes then is dropped.
        topic: what subscribers choose events by.

    Raises:
        ConfigError: a value is none that can work, or what sending takes is not installed.
    """

    enable_kv_cache_events: bool = False
    publisher: Publisher | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        one_of("publisher", self.publisher, (None, "null", "zmq"))
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None and not _is_endpoint(endpoint):
                raise bad_value(name, repr(endpoint), "like tcp://*:5557, tcp://host:5557 or ipc:///tmp/events")
        if self.endpoint == self.replay_endpoint and not self.endpoint.endswith(":*"):
            raise bad_value("replay_endpoint", repr(self.replay_endpoint), "another than endpoint")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise bad_value(name, getattr(self, name), f"at least {least}")
        if self.is_on:
            missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
            if missing:
                msg = f"To send KV events, {', '.join(missing)} must be installed."
                raise ConfigError(msg, remedy='pip install "pagefold[events]"')

    @property
    def is_on(self) -> bool:
        """Whether events are sent."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def listens(self) -> bool:
        """Whether ``endpoint`` is listened on, by vLLM's rule; else the publisher connects to who listens there."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    @classmethod
    def of_json(cls, text: str) -> KVEventsConfig:
        """Return what ``--kv-events-config`` says.

        Raises:
            ConfigError: it is no JSON object of these fields, or a value is none that can work.
        """
        try:
            given = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            msg = f"kv_events_config is {text!r}, which is no JSON object."
            raise ConfigError(msg, remedy="""Write it as '{"enable_kv_cache_events": true}'.""")
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            msg = f"kv_events_config has {unknown[0]!r}, which is no field of it."
            raise ConfigError(msg, remedy=f"It has {', '.join(names)}.")
        return cls(**given)


def _is_endpoint(text: str) -> bool:
    """Whether ZeroMQ could have an endpoint of that form."""
    if not _ENDPOINT.fullmatch(text):
        return False
    port = text.rpartition(":")[2]
    return not text.startswith("tcp://") or port == "*" or int(port) <= _MAX_PORT
