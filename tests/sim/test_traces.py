"""Traces: the forms that are read, what is refused and how, where traces lie, and the generators."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import pairwise

import pytest

from pagefold.errors import ConfigError, TraceError
from pagefold.plan.trace import trace_workload
from pagefold.sim import hashed_token
from pagefold.sim.traces import GENERATORS, ChatWorkload, parse_workload, read_trace, traces_folder

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1536, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 100, "output_length": 0, "hash_ids": [0]}
"""
SMALL = {name: parse_workload(name) for name in GENERATORS}


def write(folder, name: str, content: str):
    path = folder / name
    path.write_text(content)
    return path


# What is read.


def test_azure(tmp_path):
    first, second = read_trace(write(tmp_path, "a.csv", AZURE)).requests
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_azure_of_2024_has_zones(tmp_path):
    rows = "2024-05-10 00:00:00.009930+00:00,10,1\n2024-05-10 02:00:01.5+02:00,10,1\n"
    trace = read_trace(write(tmp_path, "a.csv", AZURE.splitlines()[0] + "\n" + rows))
    assert trace.requests[1].arrival_s == pytest.approx(1.49007)


def test_mooncake(tmp_path):
    path = write(tmp_path, "m.jsonl", MOONCAKE)
    first, second = read_trace(path).requests
    assert first.prefix_ids == (0, 1, 2)
    assert (second.arrival_s, second.output_tokens) == (2.5, 1)  # a request without an output still has a step
    workload = trace_workload(path)
    assert workload.lengths == ((1536, 500), (100, 1))
    assert (workload.prefix_len, workload.prefix_share) == (512, 1.0)  # both begin with block 0


def test_no_more_than_asked_for(tmp_path):
    assert len(read_trace(write(tmp_path, "m.jsonl", MOONCAKE + "{\n"), max_requests=2).requests) == 2


# What is refused.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "holds no requests"),
        ("a.csv", "x,y\n1,2\n", "Line 2 of the trace .*: it has no input_length: x='1', y='2'. Lengths are named"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,-4,5\n", "Line 4 .* input length is '-4'"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,four,5\n", "Line 4"),
        ("a.csv", AZURE + "yesterday,4,5\n", "Line 4 .* its time is 'yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:15:50,4,5\n", "Line 4 .*: time goes backwards, by 0.995169 s"),
        ("m.jsonl", MOONCAKE + "\n{\n", "Line 4 of the trace .*: it is no JSON object: '{'"),
        ("m.jsonl", '{"input_length": 5}\n', "Line 1 .* no output_length"),
        ("m.jsonl", '{"input_length": Infinity, "output_length": 5}\n', "input length is 'inf'"),
        ("m.jsonl", '{"input_length": 1e12, "output_length": 5}\n', "input length is '1000000000000.0'"),
        ("m.jsonl", '{"input_length": 1000000000000000, "output_length": 5}\n', "not a number from 1 to 16,777,216"),
        ("m.jsonl", '{"input_length": 5.5, "output_length": 5}\n', "Line 1 .* input length is '5.5'"),
        ("m.jsonl", '{"input_length": 5, "output_length": 0.5}\n', "output length is '0.5'"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "hash_ids": [1.5]}\n', "an id is no whole number"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,4.5,5\n", "Line 4 .* input length is '4.5'"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "timestamp": NaN}\n', "its time is nan"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "tokens_per_id": -3}\n', "tokens_per_id is '-3'"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "hash_ids": 7}\n', "its ids are '7', no list"),
        ("m.jsonl", '{"input_length": 5, "output_length": 5, "hash_ids": ["a"]}\n', "an id is no whole number"),
        (
            "m.jsonl",
            '{"input_length": 513, "output_length": 5, "hash_ids": [3]}\n',
            "1 ids of 512 .* contradicts .* 513",
        ),
        ("m.jsonl", '{"input_length": 512, "output_length": 5, "hash_ids": [3, 4]}\n', "2 ids .* contradicts"),
        ("m.jsonl", MOONCAKE + '{"input_length": 9, "output_length": 5, "timestamp": 3000}\n', "backwards, by 0.5 s"),
        ("m.jsonl", "[" * 100_000 + "\n", "Line 1 of the trace .*: it is no JSON object"),
        ("a.csv", AZURE + "2023-11-16 18:15:51," + "9" * 200_000 + ",5\n", "no CSV"),
    ],
)
def test_bad_traces(tmp_path, name, content, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, name, content))


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00" * 10)
    with pytest.raises(TraceError, match="is no text"):
        read_trace(tmp_path / "b.csv")


def test_bad_lines_are_skipped_and_counted(tmp_path):
    late = '{"input_length": 9, "output_length": 5, "timestamp": 3000}\n'
    trace = read_trace(write(tmp_path, "m.jsonl", "oh\n" + MOONCAKE + "{}\n" + late), skip_bad_lines=True)
    assert (len(trace.requests), trace.num_bad_lines) == (2, 3)
    assert "Line 1 of the trace" in trace.first_bad_line
    with pytest.raises(TraceError, match=r"holds no requests\. Line 1 "):
        read_trace(write(tmp_path, "n.jsonl", "oh\n"), skip_bad_lines=True)


def test_the_planner_wants_lengths_only(tmp_path):
    content = '{"input_length": 6758, "output_length": 5, "hash_ids": [3], "timestamp": 9}\n' + MOONCAKE
    path = write(tmp_path, "m.jsonl", content.replace("1000", "1"))
    assert len(trace_workload(path).lengths) == 3
    with pytest.raises(TraceError, match="contradicts"):
        read_trace(path)


# Where they lie.


def test_traces_are_found_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEFOLD_TRACES", str(tmp_path))
    assert traces_folder() == tmp_path
    monkeypatch.setenv("PAGEFOLD_TRACES", str(tmp_path / "none"))
    assert traces_folder() is None


def test_the_real_traces_are_good():
    folder = traces_folder()
    if folder is None:
        pytest.skip("no traces here: set PAGEFOLD_TRACES")
    conversation = read_trace(folder / "mooncake_conversation.jsonl")
    assert (len(conversation.requests), conversation.prompt_tokens) == (12_031, 144_793_823)
    assert len(read_trace(folder / "azure_conv_2023.csv").requests) == 19_366


# The generators.


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", GENERATORS)
def test_equal_parameters_make_equal_requests(name):
    workload = SMALL[name]
    assert workload.generate() == parse_workload(name).generate()
    assert workload.generate() != parse_workload(f"{name}:seed=1").generate()
    arrivals = [request.arrival_s for request in workload.generate()]
    assert arrivals == sorted(arrivals)
    names = [request.name for request in workload.generate()]
    assert len(set(names)) == len(names)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("size", [16, 100])
def test_ids_say_of_prompts_what_tokens_say(name, size):
    """Equal ids exactly where all tokens up to there are equal: the slow twin looks at the tokens."""
    generated = SMALL[name].generate()[:60]
    by_tokens: dict[bytes, int] = {}
    by_id: dict[int, bytes] = {}
    for request, traced in zip(generated, SMALL[name].trace(size).requests, strict=False):
        packed = request.request().packed()
        assert len(packed) == 4 * traced.prompt_tokens == 4 * request.prompt_tokens
        assert len(traced.prefix_ids) == -(-traced.prompt_tokens // size)
        for depth, each in enumerate(traced.prefix_ids, start=1):
            prefix = packed[: 4 * size * depth]
            assert by_tokens.setdefault(prefix, each) == each
            assert by_id.setdefault(each, prefix) == prefix


def test_a_turn_goes_on_from_what_the_null_runner_answered():
    for workload in (ChatWorkload(num_chats=10), parse_workload("agents:num_tasks=10")):
        prompts = {request.name: request for request in workload.generate()}
        followers = Counter(len(request.segments) for request in prompts.values())
        assert len(followers) > 1
    chats = ChatWorkload(num_chats=30).generate()
    for number in range(30):
        turns = [request for request in chats if request.name.startswith(f"chat-{number}-")]
        for before, after in pairwise(turns):
            said = [
                *before.request().token_ids,
                *(hashed_token(before.answer.seed, i) for i in range(before.answer[1])),
            ]
            assert list(after.request().token_ids[: len(said)]) == said


def test_some_prompts_are_popular():
    firsts = Counter(request.segments[0] for request in parse_workload("shared:popularity=1.5").generate())
    assert firsts.most_common(1)[0][1] > 300
    evenly = Counter(request.segments[0] for request in parse_workload("shared:popularity=0").generate())
    assert evenly.most_common(1)[0][1] < 60


def test_a_workload_tells_what_it_is():
    text = "chat:num_chats=5,turn_gap_s=1.5-2.0,seed=7"
    assert str(parse_workload(text)) == text
    assert str(parse_workload("agents")) == "agents"
    assert parse_workload("chat:num_turns=3").num_turns == (3, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chats", r"no generator 'chats'\. There are chat, shared, agents, retrieval, bursts"),
        ("chat:turns=4", "no parameter 'turns'. It has num_chats, "),
        ("chat:num_chats=many", "num_chats is 'many'"),
        ("chat:num_turns=a-b", "must be LEAST-MOST, such as 1-5"),
        ("chat:num_turns=5-1", "num_turns is 5-1"),
        ("chat:num_chats=0", "at least 1"),
        ("chat:num_chats=1000000000000", "num_chats is 1000000000000"),
        ("chat:num_chats=10000000", "may have 50,000,000 requests. Choose parameters for at most 2,000,000"),
        ("chat:num_turns=1-1000000,num_chats=1", "tokens in its longest prompt"),
        ("chat:num_turns=1-50000,num_chats=30", "tokens in all prompts"),
        ("shared:num_prompts=10000000", "may have 10,000,000 requests"),
        ("agents:num_levels=40,num_branches=2", "may have .* requests"),
        ("agents:num_levels=9,num_branches=9", "may have .* requests"),
        ("retrieval:documents_per_request=1-100000", "tokens in its longest prompt"),
        ("bursts:num_bursts=1000000", "may have 100,000,000 requests"),
        ("shared:requests_per_s=0", "requests_per_s is 0.0"),
        ("shared:popularity=nan", "popularity is nan"),
    ],
)
def test_bad_workloads(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_workload(text)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_parameter_is_documented(name):
    doc = GENERATORS[name].__doc__ or ""
    for field in fields(GENERATORS[name]):
        assert f"{field.name}: " in doc or f"{field.name}, " in doc, field.name
