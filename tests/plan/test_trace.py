"""Traces: the two public forms, and what is none."""

from __future__ import annotations

import pytest

from pagefold.errors import ConfigError
from pagefold.plan.trace import read_trace, trace_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 100, "output_length": 0, "hash_ids": [0]}
"""


def write(folder, name: str, content: str):
    path = folder / name
    path.write_text(content)
    return path


def test_azure(tmp_path):
    first, second = read_trace(write(tmp_path, "a.csv", AZURE))
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_mooncake(tmp_path):
    path = write(tmp_path, "m.jsonl", MOONCAKE)
    first, second = read_trace(path)
    assert first.prefix_ids == (0, 1, 2)
    assert (second.arrival_s, second.output_tokens) == (2.5, 1)  # a request without an output still has a step
    workload = trace_workload(path)
    assert workload.lengths == ((6758, 500), (100, 1))
    assert (workload.prefix_len, workload.prefix_share) == (512, 1.0)  # both begin with block 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "holds no requests"),
        ("a.csv", "x,y\n1,2\n", "Request 1 of the trace .* has no lengths"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,-4,5\n", "Request 3"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,four,5\n", "Request 3"),
        ("m.jsonl", MOONCAKE + "{\n", "Line 3 of the trace .* is no JSON object"),
        ("m.jsonl", '{"input_length": 5}\n', "Request 1"),
        ("m.jsonl", '{"input_length": Infinity, "output_length": 5}\n', "absurd"),
        ("m.jsonl", '{"input_length": 1e12, "output_length": 5}\n', "absurd"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "timestamp": NaN}\n', "absurd"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "tokens_per_id": -3}\n', "absurd"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "hash_ids": 7}\n', "absurd"),
        ("m.jsonl", "[" * 100_000 + "\n", "Line 1 of the trace .* is no JSON object"),
        ("a.csv", AZURE + "2023-11-16 18:15:51," + "9" * 200_000 + ",5\n", "no CSV"),
    ],
)
def test_bad_traces(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, name, content))


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00" * 10)
    with pytest.raises(ConfigError, match="is no text"):
        read_trace(tmp_path / "b.csv")
