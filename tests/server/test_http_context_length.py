"""What a context is too short for is refused with the setting that makes it so short."""

from __future__ import annotations

import shutil

import pytest
import torch
from equivalence.tiny_models import save_tiny_model
from local_server import LocalServer


@pytest.fixture(scope="module")
def streaming_server(smollm2, tmp_path_factory):
    """A Gemma 3 with windows of 24 tokens, which may stream: they are not computed beyond then."""
    folder = save_tiny_model("gemma3", tmp_path_factory.mktemp("gemma3"), dtype=torch.float32, vocab_size=49152)
    for file in smollm2.glob("*token*"):
        shutil.copy(file, folder)
    server = LocalServer(folder, kv_cache_memory_bytes=2**20, kv_offloading_size=0.001, allow_streaming=True)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [5] * 20, "max_tokens": 5}),
        ("/v1/completions", {"prompt": [5] * 24}),
        ("/v1/completions", {"prompt": "Too long. " * 100}),
    ],
)
def test_who_asks_for_more_than_a_window_is_told_of_streaming(streaming_server, path, fields):
    refused = streaming_server.http.post(path, json=fields)
    assert refused.status_code == 400
    said = refused.json()["error"]["message"]
    window = "gemma3_text's sliding window is not computed while allow_streaming is set"
    assert f"This model's maximum context length is 24 tokens, beyond which {window}" in said
    assert said.endswith(", or start without allow_streaming.")


def test_what_fits_is_served(streaming_server):
    answer = streaming_server.complete([5] * 20, max_tokens=4, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 24
