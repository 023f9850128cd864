"""``pagefold serve --kv-keep`` as a process: it fits the scorer that it lacks, once, and tells what it has kept."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
from equivalence.packing_house import keep_random_scorer
from local_server import PATIENCE_S, ProcessServer, start_cli

from pagefold.masks.calibration import scorer_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLAGS = ("--kv-keep", "0.5", "--dtype", "float32", "--max-model-len", "2000", "--kv-cache-memory-bytes", "8M")
LONG = {"prompt": list(range(100, 1400)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def unknown_model(tiny_chat_model: Path, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a model whose scorer nobody has fitted."""
    folder = tmp_path / "unknown"
    shutil.copytree(tiny_chat_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "nobody_reads_this": str(tmp_path)}))
    assert not scorer_path(folder).exists()
    yield folder
    scorer_path(folder).unlink(missing_ok=True)


def stop(server: ProcessServer) -> str:
    """End a server; return what it wrote."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    return server.output()


@pytest.mark.long
def test_usage_tells_what_was_kept(unknown_model: Path) -> None:
    keep_random_scorer(unknown_model)
    server = ProcessServer(str(unknown_model), *FLAGS)
    try:
        answers = [server.http.post("/v1/completions", json=LONG).json() for _ in range(2)]
        stream = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
        *_, last = server.events("/v1/completions", stream)
        short = server.http.post("/v1/completions", json={**LONG, "prompt": [5] * 100}).json()
        granted = server.metric("pagefold:packed_blocks_granted_total")
        kept = server.metric("pagefold:packed_blocks_kept_total")
        held = server.metric("pagefold:num_packed_blocks", "nonekeep 0.5")
        said = stop(server)
    finally:
        server.close()
    assert "calibrates" not in said
    assert "50% of what is older" in said
    cold, warm = (answer["usage"] for answer in answers)
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert warm["prompt_tokens_details"]["cached_tokens"] > 1000
    assert 0 < cold["kv_kept_share"] < 1
    assert cold["kv_kept_share"] == warm["kv_kept_share"] == last["usage"]["kv_kept_share"]
    assert "kv_kept_share" not in short["usage"]
    assert held == kept  # all of them are cached
    assert cold["kv_kept_share"] == pytest.approx(kept / granted, abs=1e-4)  # nobody else has packed


@pytest.mark.long
def test_requests_ask_for_a_kind_on_every_route(unknown_model: Path) -> None:
    keep_random_scorer(unknown_model)
    flags = "--kv-keep", "1,0.5", *FLAGS[2:], "--admin-api-key", "sk-admin"
    server = ProcessServer(str(unknown_model), *flags)
    admin = {"Authorization": "Bearer sk-admin"}
    talk, model = [{"role": "user", "content": "ahoy " * 900}], {"model": str(unknown_model), "max_tokens": 2}
    asks = {
        "/v1/completions": LONG,
        "/v1/chat/completions": {"messages": talk, "max_tokens": 2},
        "/v1/responses": {"input": "ahoy " * 900, "max_output_tokens": 16},
        "/v1/messages": {"messages": talk, **model},
        "/v1/messages/count_tokens": {"messages": talk},
        "/v1/cache/warm": {"prompt": LONG["prompt"]},
    }
    try:
        for route, body in asks.items():
            for kind in ({}, {"kv_keep": 0.5}, {"kv_quality": "keep 0.5"}, {"kv_quality": "exact", "kv_keep": 1}):
                answer = server.http.post(route, json={**body, **kind}, headers=admin)
                assert answer.status_code == 200, answer.text
                if "completions" in route:
                    is_kept = kind.get("kv_quality", "keep") != "exact" and bool(kind)
                    assert ("kv_kept_share" in answer.json()["usage"]) == is_kept
            for kind in ({"kv_keep": 0.3}, {"kv_quality": "best"}, {"kv_keep": "half"}, {"kv_keep": 0}):
                answer = server.http.post(route, json={**body, **kind}, headers=admin)
                assert answer.status_code == 400, answer.text
                assert next(iter(kind)) in answer.text
        warmed = server.http.post("/v1/completions", json={**LONG, "kv_keep": 0.5}, headers=admin).json()
        assert warmed["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
        stop(server)
    finally:
        server.close()


BASE = list(range(100, 1400))
PROMPTS = [BASE, BASE[:900] + [7] * 50, BASE[:60]]
EXACT = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
ASKS = {
    "samples": {**EXACT, "n": 3, "temperature": 1, "seed": 5},
    "greedy": EXACT,
    "beams": {**EXACT, "use_beam_search": True, "n": 3},
}


def ask_all(server: ProcessServer, **fields: object) -> dict[tuple[str, int], object]:
    """Ask all prompts in all ways at once; return what was answered, with each logprob."""
    cases = [(name, at) for name in ASKS for at in range(len(PROMPTS)) if (name, at) != ("beams", 0)]

    def ask(case: tuple[str, int]) -> object:
        name, at = case
        return server.complete(PROMPTS[at], **ASKS[name], **fields)["choices"]

    with ThreadPoolExecutor(len(cases)) as threads:
        return dict(zip(cases, threads.map(ask, cases), strict=True))


def leave(server: ProcessServer, at: int, num_events: int) -> None:
    """Ask with a share, and go away in the midst of it; before anything has come, if ``num_events`` is 0."""
    body = {**ASKS["samples"], "prompt": PROMPTS[at], "kv_keep": 0.5, "max_tokens": 200, "stream": True}
    with contextlib.closing(httpx.Client(base_url=server.url, timeout=PATIENCE_S)) as http:
        if not num_events:
            with contextlib.suppress(httpx.ReadTimeout):
                http.post("/v1/completions", json={**body, "prompt": BASE[::-1], "stream": False}, timeout=0.2)
            return
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for _ in zip(range(num_events), answer.iter_lines(), strict=False):
                pass


@pytest.mark.long  # it starts two servers
def test_exact_answers_are_those_of_a_server_without_shares(unknown_model: Path) -> None:
    """Beside others with a share, some of whom go away; where memory is short, and prefixes are pinned."""
    keep_random_scorer(unknown_model)
    flags = FLAGS[2:-1]
    plain = ProcessServer(str(unknown_model), *flags, "64M")
    try:
        expected = ask_all(plain)
        plain.check_pool()
    finally:
        plain.close()
    admin = {"Authorization": "Bearer sk-admin"}
    server = ProcessServer(str(unknown_model), *flags, "8M", "--kv-keep", "1,0.5", "--admin-api-key", "sk-admin")
    try:
        with ThreadPoolExecutor(4) as threads:
            leaving = [threads.submit(leave, server, at, num) for at, num in ((0, 6), (1, 2), (0, 0))]
            kept = threads.submit(ask_kept, server)
            found = ask_all(server)
            for one in leaving:
                one.result()
        for kind in (1, 0.5):
            body = {"prompt": BASE, "pin": True, "kv_keep": kind}
            assert server.http.post("/v1/cache/warm", json=body, headers=admin).status_code == 200
        pinned = [server.metric("pagefold:num_pinned_blocks_by_kind", f"none{one}") for one in ("exact", "keep 0.5")]
        again = ask_all(server), ask_kept(server)
        assert server.metric("pagefold:packed_chunks_total")
        server.check_pool()
        refused = server.http.post("/v1/completions", json={**ASKS["beams"], "prompt": [5], "kv_quality": "keep 0.5"})
    finally:
        server.close()
    assert found == expected
    assert again == (expected, kept.result())
    assert all(pinned)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "use_beam_search"
    assert "ask for kv_quality 'exact'" in error["message"]


def ask_kept(server: ProcessServer) -> object:
    """Ask for a share; return what was answered."""
    return [server.complete(prompt, **ASKS["samples"], kv_keep=0.5)["choices"] for prompt in PROMPTS]


def test_recordings_of_what_is_kept_are_refused_at_the_start(tmp_path: Path) -> None:
    process = start_cli("serve", "no-model", "--kv-keep", "1,0.5", "--record-trace", str(tmp_path / "trace"))
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Leave out --record-trace, or --kv-keep." in said


@pytest.mark.long
def test_a_start_fits_the_scorer_once(unknown_model: Path) -> None:
    found = []
    for fits in (True, False):
        server = ProcessServer(str(unknown_model), *FLAGS)
        try:
            found.append(server.http.post("/v1/completions", json=LONG).json()["choices"])
            said = stop(server)
        finally:
            server.close()
        assert (f"calibrates {unknown_model}, once" in said) == fits
    assert scorer_path(unknown_model).exists()
    assert found[0] == found[1]
