"""Boards and alerts: what they ask for is there on a real server, vLLM's public board included."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_server import LocalServer, until

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "pagefold.json").read_text())
RULES = DEPLOY / "prometheus" / "alerts.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (apt-get install prometheus)")
GREEDY = {"temperature": 0, "ignore_eos": True}
_NAME = re.compile(r"\b(?:vllm:|pagefold:|process_)[a-zA-Z0-9_:]+|\bup\b")

VLLMS_BOARD = (
    *(f"vllm:e2e_request_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:inter_token_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *(f"vllm:time_to_first_token_seconds_{part}" for part in ("bucket", "sum", "count")),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *(f"vllm:request_{phase}_time_seconds_sum" for phase in ("prefill", "decode")),
    *("vllm:request_success_total", "vllm:request_max_num_generation_tokens_sum"),
)
"""What vLLM's examples/observability/prometheus_grafana/grafana.json asks for and what requests make positive."""

AS_THEY_ARE = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "vllm:request_queue_time_seconds_sum",
)
"""What it asks for that may be 0."""

OTHERS_OF_VLLM = (
    *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:prompt_tokens_cached_total"),
    *("vllm:num_preemptions_total", "vllm:num_requests_waiting_by_reason", "vllm:iteration_tokens_total_bucket"),
    *("vllm:kv_block_lifetime_seconds_bucket", "vllm:kv_block_reuse_gap_seconds_bucket"),
)
"""What boards beside it ask for: of the KV cache, of single servers."""


@pytest.fixture(scope="module")
def served(tiny_chat_model, tmp_path_factory) -> Iterator[LocalServer]:
    """A server with a disk that has answered a few requests."""
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=40 * 2**13,
        max_model_len=192,
        max_num_seqs=4,
        kv_offloading_size=0.01,
        kv_disk_path=str(tmp_path_factory.mktemp("disk")),
        kv_disk_size=0.01,
        kv_write_policy="write_through",
    )
    for number in (1, 2, 3, 4, 5, 1, 2):
        server.complete([number * 100 + at for at in range(150)], max_tokens=3, **GREEDY)
    until(server.is_idle, "requests to end")
    yield server
    server.close()


def names(server: LocalServer) -> set[str]:
    return {name for name, _ in server.metrics()}


def expressions() -> list[str]:
    """What the board asks for, with its variables filled in."""
    found = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    filled = {"$__rate_interval": "5m", "$model_name": ".*", "$instance": ".*"}
    for variable, value in filled.items():
        found = [one.replace(variable, value) for one in found]
    return found


def asked() -> set[str]:
    """Every name of a series that the board, its variables and the alerts ask for."""
    variables = [one["definition"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    rules = [line for line in RULES.read_text().splitlines() if line.strip().startswith("expr:")]
    return {name for text in (*expressions(), *variables, *rules) for name in _NAME.findall(text)}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", VLLMS_BOARD)
def test_the_panels_of_vllms_board_have_data(served, name):
    assert sum(value for (series, _), value in served.metrics().items() if series == name) > 0


@pytest.mark.parametrize("name", [*AS_THEY_ARE, *OTHERS_OF_VLLM])
def test_what_may_be_zero_is_there(served, name):
    assert name in names(served)


def test_whatever_board_and_alerts_ask_for_is_there(served):
    found = asked()
    assert len(found) > 40
    assert not found - names(served) - {"up"}  # which is Prometheus' own


def test_labels_that_are_asked_for_are_there(served):
    """Of ``by (...)`` and ``{...}``, beside those that Prometheus adds."""
    text = served.http.get("/metrics").text
    have = set(re.findall(r'[{,](\w+)="', text)) | {"instance", "job"}
    queries = [*expressions(), *(line for line in RULES.read_text().splitlines() if line.strip().startswith("expr:"))]
    for query in queries:
        grouped = {
            label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in group.split(",")
        }
        matched = set(re.findall(r'[{,](\w+)(?:=~|!~|!=|=)"', query))
        assert grouped | matched <= have, query


def test_bandwidth_and_hits_of_tiers_have_data(served):
    until(lambda: served.metric("vllm:kv_offload_tiering_write_bytes_total", "disk") > 0, "blocks to be written")
    assert served.metric("vllm:kv_offload_tiering_write_time_total", "disk") > 0
    hits = served.metrics()
    assert hits["pagefold:prefix_cache_hit_tokens_total", "host"] > 0
    of_tiers = sum(hits["pagefold:prefix_cache_hit_tokens_total", tier] for tier in ("host", "disk", "remote"))
    assert of_tiers == hits["vllm:external_prefix_cache_hits_total", ""]
    assert hits["pagefold:prefix_cache_hit_tokens_total", "device"] == hits["vllm:prefix_cache_hits_total", ""]


def test_the_board_can_be_imported():
    """Ids are unique, nothing overlaps, and each panel asks the data source that is chosen."""
    assert BOARD["templating"]["list"][0]["type"] == "datasource"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + across, place["y"] + down) for across in range(place["w"]) for down in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


def promtool(*arguments: Any) -> None:
    ended = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_promtool
def test_rules_and_configuration_are_what_prometheus_takes():
    promtool("check", "rules", RULES)
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    promtool("test", "rules", DEPLOY / "prometheus" / "alerts_test.yml")


@needs_promtool
def test_queries_of_the_board_are_promql(tmp_path):
    rules = [{"record": f"panel:query{number}", "expr": query} for number, query in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))  # JSON is YAML
    promtool("check", "rules", tmp_path / "rules.yml")


@needs_promtool
def test_metrics_are_what_prometheus_takes(served):
    """No family twice, and text in the form that it asks for. It would rather have other names for some of vLLM's."""
    text = served.http.get("/metrics").text
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert "error while linting" not in checked.stderr, checked.stderr


def test_every_alert_has_a_runbook_and_a_test():
    text, tests = RULES.read_text(), (RULES.parent / "alerts_test.yml").read_text()
    alerts = re.split(r"- alert: ", text)[1:]
    for alert in alerts:
        assert "runbook: " in alert
        assert "summary: " in alert
        assert alert.split()[0] in tests
