"""``pagefold plan --from-server``: what a server's prompts would find with the KV that is planned."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.errors import ConfigError
from pagefold.plan.served_curve import read_curve

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = CliRunner()
METRICS = """vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0
pagefold:num_blocks{model_name="x"} 1000.0
"""
POINTS = [
    {"num_blocks": size, "bytes": size, "hit_ratio": ratio} for size, ratio in ((500, 0.1), (1000, 0.2), (9000, 0.6))
]
OF_ALL = {
    "object": "cache.whatif",
    "block_size": 16,
    "since_s": 60.0,
    "policies": [{"policy": "lru", "is_used": False, "points": POINTS}],
    "tenants": [],
}
OF_ONE = {**OF_ALL, "policies": [], "tenants": [{"tenant": "acme", "points": POINTS}]}


@contextlib.contextmanager
def serving(curve: dict[str, Any] | None) -> Iterator[str]:
    """Serve what Pagefold tells to whoever brings the key."""
    models = {"data": [{"id": "smollm2-135m", "max_model_len": 8192}]}
    answers = {
        "/metrics": METRICS,
        "/v1/models": json.dumps(models),
        "/version": "{}",
        "/v1/cache/whatif": json.dumps(curve),
    }

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_there = self.path != "/v1/cache/whatif" or curve is not None
            body = (answers[self.path] if is_there else '{"error": {"message": "No prompt yet."}}').encode()
            self.send_response(401 if self.headers["Authorization"] != "Bearer k" else 200 if is_there else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def plan(url: str, *flags: str) -> Any:
    return RUN.invoke(app, ["plan", "smollm2-135m", "--device", "L4", "--from-server", url, *flags])


def test_the_kv_that_is_planned_is_looked_up_in_the_curve() -> None:
    with serving(OF_ALL) as url:
        told = json.loads(plan(url, "--api-key", "k", "--json").stdout)
        small = plan(url, "--api-key", "k", "--kv-cache-memory-bytes", "400M")
        assert plan(url).exit_code == 2
    curve = told["hit_curve"]
    assert curve["points"] == [
        {"num_tokens": 16 * point["num_blocks"], "hit_ratio": point["hit_ratio"]} for point in POINTS
    ]
    assert curve["now"] == {"num_tokens": 16_000, "hit_ratio": 0.2}
    assert curve["planned"]["num_tokens"] > 9000 * 16
    assert curve["planned"]["hit_ratio"] == 0.6
    assert curve["is_of_all"]
    assert "What all prompts of the last 60 s would find" in small.stdout
    assert "with which at least 20.0% are found" in small.stdout


def test_of_several_cache_groups_a_place_takes_several_blocks() -> None:
    """The pool has 1,000 blocks; the curve counts places, of which there is one for three of those."""
    with serving({**OF_ALL, "blocks_per_place": 3}) as url:
        curve = json.loads(plan(url, "--api-key", "k", "--json").stdout)["hit_curve"]
    assert curve["now"] == {"num_tokens": 333 * 16, "hit_ratio": 0.0}
    with serving(OF_ALL) as url:
        of_one = json.loads(plan(url, "--api-key", "k", "--json").stdout)["hit_curve"]
    assert curve["planned"]["num_tokens"] == of_one["planned"]["num_tokens"] // 16 // 3 * 16


def test_a_tenant_s_key_gives_his_own() -> None:
    with serving(OF_ONE) as url:
        assert "What your prompts, with the cache for them alone," in plan(url, "--api-key", "k").stdout


def test_where_there_is_no_curve_the_rest_is_told() -> None:
    with serving(None) as url:
        result = plan(url, "--api-key", "k", "--json")
    assert result.exit_code == 0
    assert "hit_curve" not in json.loads(result.stdout)
    assert "no hit curve: No prompt yet." in result.stderr


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {**OF_ALL, "policies": []},
        {**OF_ALL, "block_size": 0},
        {**OF_ALL, "policies": [{"points": [{"num_blocks": 1, "hit_ratio": 2}]}]},
    ],
)
def test_what_is_no_curve_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tells is no curve"):
        read_curve(answer, "http://x")


def test_between_sizes_the_smaller_one_is_what_is_sure() -> None:
    curve = read_curve(OF_ALL, "http://x")
    assert [curve.at(size) for size in (0, 7999, 8000, 15_999, 16_000, 10**9)] == [0.0, 0.0, 0.1, 0.1, 0.2, 0.6]


@pytest.mark.parametrize("flags", [("--device", "L4"), ("--check-log", "x.log")])
def test_a_key_without_a_server_is_refused(flags: tuple[str, str]) -> None:
    result = RUN.invoke(app, ["plan", "smollm2-135m", *flags, "--api-key", "k"])
    assert result.exit_code == 2
    assert "no server" in result.stderr
