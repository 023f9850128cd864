"""What README and docs tell people to type, typed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
URL = "http://127.0.0.1:8000"
LESS = {"context_len=1024": "context_len=128, num_contexts=2, num_greedy_tokens=16, num_haystacks=0"}
"""What would take a minute is asked of shorter texts."""


def blocks_of(language: str) -> list[str]:
    """The fenced blocks of a language, each once. Those that only quote a file are the business of its own tests."""
    found = [block for page in PAGES for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)]
    return list(dict.fromkeys(block for block in found if not block.startswith("--8<--")))


def commands_in(page: Path) -> list[str]:
    """The curl commands of a page, indented or fenced."""
    text = re.sub(r"^    ", "", page.read_text(), flags=re.MULTILINE)
    return re.findall(r"^curl .*?'\{.*?\}'$", text, re.DOTALL | re.MULTILINE)


PYTHON = blocks_of("python")


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_runs(server, code, tmp_path):
    for asked, less in LESS.items():
        code = code.replace(asked, less)
    ended = subprocess.run(
        [sys.executable, "-c", code.replace(URL, server.url)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() or URL in code  # what random weights say over HTTP may be no text


def test_there_are_snippets_of_each_kind():
    assert sum("LLM(model=" in code for code in PYTHON) >= 1
    assert sum(URL in code for code in PYTHON) >= 1
    assert commands_in(ROOT / "README.md")
    assert all(any(asked in code for code in PYTHON) for asked in LESS)


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_curl_is_answered(server, page):
    """Sent twice, the second time all of the prompt but its last token comes out of the cache, as the text says."""
    for command in commands_in(ROOT / page):
        _, url, _, header, _, body = shlex.split(command)
        name, value = header.split(": ")
        for _ in range(2):
            response = httpx.post(url.replace(URL, server.url), content=body, headers={name: value}, timeout=60)
            assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
        assert 0 < usage["completion_tokens"] <= json.loads(body)["max_tokens"]
