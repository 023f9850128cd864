"""Every example, run as a user runs it against a real server; and what it prints is true."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from equivalence.settings import long_but
from vllm_environments import VERSIONS, python_of, variables

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(file.name for file in EXAMPLES.glob("*.py"))
INSIDE = ["vllm_connector.py"]
"""Those that are no clients."""
CLIENTS = [script for script in SCRIPTS if script not in INSIDE]


def run(script: str, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def output_of(script: str, server, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    ended = run(script, "--url", f"{server.url}/v1", *arguments, typed=typed)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


# Chat.


def test_chat_once(server):
    question = "Why is the sky blue? " * 8
    for _ in range(2):
        ended = output_of("chat.py", server, "--once", question, "--max-tokens", "20", "--temperature", "0")
    prompt, cached = (int(number) for number in re.findall(r"\[(\d+) prompt tokens, (\d+) from", ended.stderr)[0])
    assert cached == prompt - 1  # the last one is computed, since the model must look at something


def test_chat_keeps_the_conversation(server):
    ended = output_of("chat.py", server, "--max-tokens", "4", typed="Name a river.\nAnd another one?\n")
    assert "smollm2-135m at http" in ended.stdout
    (one, _), (two, cached) = re.findall(r"\[(\d+) prompt tokens, (\d+) from", ended.stderr)
    assert int(two) > int(one)
    assert int(cached) >= int(one) // 2


# Batch.


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    lines = [
        {
            "id": f"q{number}",
            "messages": [{"role": "user", "content": f"Count to {number}."}],
            "max_tokens": 120,
            "ignore_eos": True,
        }
        for number in range(9)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def answers_in(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_batch_answers_everything_although_the_queue_is_full(server, requests, tmp_path):
    """Nine at once, where four may be here."""
    answers = tmp_path / "answers.jsonl"
    ended = output_of("batch.py", server, str(requests), str(answers), "--concurrency", "9")
    said = re.fullmatch(r"9 asked, 0 answered before, 0 refused, (\d+) times the queue was full", ended.stdout.strip())
    assert said, ended.stdout
    assert int(said[1]) > 0  # or this test showed nothing
    written = answers_in(answers)
    assert sorted(answer["id"] for answer in written) == [f"q{number}" for number in range(9)]
    assert all(answer["finish_reason"] == "length" for answer in written)
    assert "100%" in ended.stderr


def test_batch_goes_on_where_it_stopped(server, requests, tmp_path):
    """Three lines were written and the fourth only half: six are asked, and every id is there once."""
    answers = tmp_path / "answers.jsonl"
    whole = [json.dumps({"id": f"q{number}", "text": "from before"}) for number in (0, 4, 7)]
    answers.write_text("\n".join([*whole, '{"id": "q3", "text": "cut o']))
    ended = output_of("batch.py", server, str(requests), str(answers), "--concurrency", "2")
    assert ended.stdout.startswith("6 asked, 3 answered before, 0 refused")
    written = answers_in(answers)
    assert sorted(answer["id"] for answer in written) == [f"q{number}" for number in range(9)]
    assert [answer["id"] for answer in written if answer["text"] == "from before"] == ["q0", "q4", "q7"]
    assert output_of("batch.py", server, str(requests), str(answers)).stdout.startswith("0 asked, 9 answered before")
    assert answers_in(answers) == written


def test_batch_tells_of_what_was_refused(server, requests, tmp_path):
    with requests.open("a") as file:
        file.write(json.dumps({"id": "bad", "messages": [], "max_tokens": 1}) + "\n")
    answers = tmp_path / "answers.jsonl"
    ended = run("batch.py", "--url", f"{server.url}/v1", str(requests), str(answers), "--concurrency", "2")
    assert ended.returncode == 1
    assert "1 refused" in ended.stdout
    (error,) = [answer["error"] for answer in answers_in(answers) if answer["id"] == "bad"]
    assert "messages" in error


@pytest.mark.parametrize("line", ["{}", '{"id": 5}', '{"id": "q0"}', "[]", "{"])
def test_batch_names_a_line_that_is_no_request(requests, line):
    with requests.open("a") as file:
        file.write(f"{line}\n")
    batch = runpy.run_path(str(EXAMPLES / "batch.py"))
    with pytest.raises(ValueError, match="line 10"):
        list(batch["read_requests"](requests))


# What sharing is worth.


def test_shared_prompt(server):
    said = output_of("shared_prompt.py", server).stdout
    shared, of, alone = (
        int(number)
        for number in re.search(
            r"Out of the cache: (\d+) of (\d+) prompt tokens when shared, (\d+) alone", said
        ).groups()
    )
    assert alone == 0
    assert of // 2 < shared < of


def test_agent_tree(server):
    said = output_of("agent_tree.py", server, "--branches", "3", "--depth", "2", "--max-tokens", "8").stdout
    (plan, from_nothing), *branches = [
        (int(prompt), int(cached)) for prompt, cached in re.findall(r"(\d+) prompt tokens, (\d+) from", said)
    ]
    assert from_nothing == 0
    assert len(branches) == 6
    # The plan's prompt but for its last tokens, which open the answer: the part that no answer can change.
    assert all(plan // 2 < cached < prompt for prompt, cached in branches)
    total = sum(cached for _, cached in branches)
    assert f"7 requests, {plan + sum(prompt for prompt, _ in branches)} prompt tokens: {total} out of" in said


def test_many_tenants(server):
    said = output_of("many_tenants.py", server, "--tenants", "3").stdout
    rows = re.findall(r"^tenant \d +(\d+) +(\d+)$", said, flags=re.MULTILINE)
    assert len(rows) == 3
    assert all(int(first) == 0 and int(second) > 100 for first, second in rows)


# Inside vLLM.


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is there")
def test_vllm_that_is_not_there():
    ended = run("vllm_connector.py")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: No module named 'vllm'")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_finds_a_conversation_in_memory_and_at_the_next_start_on_the_disk(smollm2, version, tmp_path):
    lent = tmp_path / "lent"
    lent.mkdir()
    command = [python_of(version), EXAMPLES / "vllm_connector.py", smollm2, "--disk", tmp_path / "kv"]
    found = []
    for _ in range(2):
        ended = subprocess.run(
            list(map(str, command)), env=variables(lent), capture_output=True, text=True, timeout=500, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        found.append(
            [tuple(map(int, each)) for each in re.findall(r"\[(\d+) prompt tokens, (\d+) found\]", ended.stdout)]
        )
    ((first, nothing), (_, returned)), ((again, on_disk), (_, returned_again)) = found
    assert (again, nothing) == (first, 0)
    # All but the last block that is not whole, of a size that is vLLM's to choose.
    assert all(first - 128 <= num < first + 128 for num in (returned, on_disk, returned_again)), found


# All of them.


def test_every_example_is_tested():
    tested = set(re.findall(r'(?:run|output_of)\(\s*"(\w+\.py)"', Path(__file__).read_text()))
    assert tested == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_table_know_it(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    docstring = (EXAMPLES / script).read_text().split('"""')[1]
    assert docstring.strip() in capsys.readouterr().out
    assert f"| `{script}` |" in (EXAMPLES / "README.md").read_text()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("script", long_but(["chat.py", "batch.py"], CLIENTS))
def test_a_server_that_is_not_there(script, requests, tmp_path):
    arguments = {"chat.py": ["--once", "a"], "batch.py": [str(requests), str(tmp_path / "answers.jsonl")]}
    ended = run(script, "--url", "http://127.0.0.1:9/v1", *arguments.get(script, []))
    assert ended.returncode == 1
    assert "error: " in ended.stderr
    assert "Traceback" not in ended.stderr
