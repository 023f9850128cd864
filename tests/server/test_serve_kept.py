"""``pagefold serve --kv-keep`` as a process: it fits the scorer that it lacks, once, and tells what it has kept."""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING

import pytest
from equivalence.packing_house import keep_random_scorer
from local_server import PATIENCE_S, ProcessServer

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
    assert cold["kv_kept_share"] == pytest.approx(kept / granted, abs=1e-4)  # nobody else has packed


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
