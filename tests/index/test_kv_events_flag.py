"""What ``--kv-events-config`` takes is what vLLM's does; what cannot work is said before weights are loaded."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.cli.serve import warn_if_connecting
from pagefold.config import KVEventsConfig, ServerConfig, environment_hash_seed, environment_int_hashes, kv_events
from pagefold.errors import ConfigError


def test_defaults_are_those_of_vllm():
    assert asdict(KVEventsConfig()) == {
        "enable_kv_cache_events": False,
        "publisher": None,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    }
    assert not KVEventsConfig().is_on
    assert KVEventsConfig.of_json('{"enable_kv_cache_events": true}').is_on
    assert not KVEventsConfig.of_json('{"enable_kv_cache_events": true, "publisher": "null"}').is_on


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://127.0.0.1:*", "tcp://router.local:5557", "tcp://[::1]:5557", "ipc:///tmp/x"]
)
def test_endpoints(endpoint):
    assert KVEventsConfig(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/x", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://router.local:5557", False),
    ],
)
def test_whether_it_listens_is_said_as_vllm_says_it_and_else_it_warns(endpoint, listens, capsys):
    assert KVEventsConfig(endpoint=endpoint).listens == listens
    warn_if_connecting(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint), ServerConfig())
    warn_if_connecting(KVEventsConfig(endpoint=endpoint), ServerConfig())  # off
    told = capsys.readouterr().err
    assert told.count("warning: ") == (not listens)
    assert (f"connects to {endpoint}" in told) == (not listens)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("", "is no JSON object"),
        ("[1]", "is no JSON object"),
        ({"enable": True}, "has 'enable', which is no field"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events is 'yes'"),
        ({"publisher": "kafka"}, "publisher is 'kafka'"),
        ({"endpoint": "5557"}, "endpoint is '5557'"),
        ({"endpoint": "tcp://*:99999"}, "endpoint is 'tcp://[*]:99999'"),
        ({"endpoint": "inproc://x"}, "endpoint is 'inproc://x'"),
        ({"endpoint": None}, "endpoint is None"),
        ({"replay_endpoint": "tcp://*"}, "replay_endpoint is 'tcp://[*]'"),
        ({"replay_endpoint": "tcp://*:5557"}, "another than endpoint"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"hwm": -1}, "hwm is -1"),
        ({"max_queue_size": 1.5}, "max_queue_size is 1.5"),
        ({"topic": 3}, "topic is 3"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(given, what):
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(ConfigError, match=what):
        KVEventsConfig.of_json(text)
    result = CliRunner().invoke(app, ["serve", "no-such-model", "--kv-events-config", text])
    assert result.exit_code
    assert "no-such-model" not in result.output


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(kv_events, "find_spec", lambda name: None if name == "zmq" else object())
    assert not KVEventsConfig().is_on
    with pytest.raises(ConfigError, match=r"pyzmq must be installed.*pagefold\[events\]"):
        KVEventsConfig(enable_kv_cache_events=True)


def test_what_is_not_kept_whole_is_not_told(tiny_chat_model):
    told = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"})
    arguments = ["serve", str(tiny_chat_model), "--kv-events-config", told, "--kv-keep", "1,0.5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code
    assert "--kv-keep" in result.output


def test_the_environment_says_how_hashes_are(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    assert (environment_hash_seed(), environment_int_hashes()) == (None, True)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert (environment_hash_seed(), environment_int_hashes()) == ("7", False)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "no")
    with pytest.raises(ConfigError, match="must be 0 or 1"):
        environment_int_hashes()
