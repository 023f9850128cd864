"""lm-eval, the harness itself, against a real server: what it is told of likelihoods and texts is transformers' own."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from local_server import ProcessServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

GOING_ON_TEXT = """output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def benchmark():
    """Return ``benchmarks/lm_eval_agreement.py``, which has the harness and the task."""
    file = Path(__file__).parents[2] / "benchmarks" / "lm_eval_agreement.py"
    spec = importlib.util.spec_from_file_location("lm_eval_agreement", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def python(benchmark):
    from pagefold.config import cache_dir

    try:
        return benchmark.harness(cache_dir())
    except subprocess.CalledProcessError:
        pytest.skip("pip could not install lm-eval")


@pytest.fixture(scope="module")
def tasks(benchmark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    items = benchmark.going_on(24)
    benchmark.write_task(folder, "going_on", items, benchmark.GOING_ON)
    texts = [{"query": item["query"], "answer": item["choices"][item["label"]]} for item in items[:10]]
    benchmark.write_task(folder, "going_on_text", texts, GOING_ON_TEXT)
    return folder


NAMES = ["going_on", "going_on_text"]


@pytest.fixture(scope="module")
def exact():
    """The built-in model in float32, as the harness computes it."""
    sizes = "--kv-cache-memory-bytes", "200M", "--max-model-len", "2048"
    server = ProcessServer("smollm2-135m", "--dtype", "float32", *sizes)
    yield server
    server.close()


def test_likelihoods_and_texts_are_those_of_transformers(benchmark, python, tasks, exact, smollm2):
    common = {"model": exact.model, "tokenizer": smollm2, "tokenizer_backend": "huggingface"}
    url = f"{exact.url}/v1/completions"
    ours = benchmark.evaluate(python, tasks, NAMES, "local-completions", base_url=url, batch_size=8, **common)
    texts = benchmark.evaluate(
        python, tasks, NAMES, "local-completions", base_url=url, num_concurrent=4, tokenized_requests=False, **common
    )
    theirs = benchmark.evaluate(python, tasks, NAMES, "hf", pretrained=smollm2, dtype="float32")
    for run in (ours, texts):
        for got, expected in zip(run["samples"]["going_on"], theirs["samples"]["going_on"], strict=True):
            assert got["doc"] == expected["doc"]
            for (sum_got, greedy_got), (sum_expected, greedy_expected) in zip(
                got["filtered_resps"], expected["filtered_resps"], strict=True
            ):
                assert float(sum_got) == pytest.approx(float(sum_expected), abs=5e-3)
                assert greedy_got == greedy_expected
        assert run["results"]["going_on"]["acc,none"] == theirs["results"]["going_on"]["acc,none"]
        said = [sample["filtered_resps"] for sample in run["samples"]["going_on_text"]]
        assert said == [sample["filtered_resps"] for sample in theirs["samples"]["going_on_text"]]
    assert theirs["results"]["going_on"]["acc,none"] > 0.3, "a task that tells nothing"
