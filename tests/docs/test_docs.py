"""The docs build without a warning, say what the code says, and lead nowhere in vain."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from pagefold.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SITE = ROOT / "build" / "site"
# Flags of pip, and of scripts.
OTHERS = (
    *("--shard", "--measure-long", "--hostile-bodies"),
    *("--index-url", "--no-deps", "--json", "--help", "--check", "--site"),
    *("--engines", "--repeats", "--workloads"),
    *("--kv-cache-metrics", "--prefix-caching-hash-algo"),  # vLLM's
    *("--kv-transfer-config", "--disable-hybrid-kv-cache-manager"),  # vLLM's too
    *("--hf-overrides", "--quantization", "--load-format", "--enable-lora"),  # as well
    *("--head", "--num-cpus", "--non-blocking"),  # Ray's
)


def ran(*command: str) -> str:
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_what_is_made_from_the_code_is_fresh():
    """If this fails: make docs, and commit what it wrote."""
    ran(sys.executable, "tools/docs", "--check")


@pytest.fixture(scope="module")
def site() -> Path:
    ran(str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict")
    return SITE


def test_the_site_is_whole(site):
    assert "every link leads somewhere" in ran(sys.executable, "tools/docs", "--site", str(site))


def test_every_page_is_in_the_navigation(site):
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    listed = re.findall(r"'([\w/-]+\.md)'", str(config["project"]["nav"]))
    assert sorted(listed) == [str(page.relative_to(DOCS)) for page in PAGES]
    for name in listed:
        assert (site / name.replace("index.md", "").removesuffix(".md") / "index.html").exists(), name


def test_pages_fetch_nothing_from_elsewhere(site):
    """Readers are nobody's business: scripts, styles, fonts and pictures are the site's own."""
    for page in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|img)[^>]+src=\"?https?:", page.read_text()), page
        assert not re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect)\"?[^>]+href=\"?https?:", page.read_text()), (
            page
        )


def test_the_checker_finds_what_is_wrong(tmp_path, monkeypatch):
    """Its own twin: a site with one of each."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    complaints = importlib.import_module("site_check").complaints
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="top">A</h1><a href="../">up</a><a href="../#here">up</a>')
    (tmp_path / "index.html").write_text('<p id="here"><a href="a/#top">a</a><img src="a/" alt="words">')
    assert complaints(tmp_path) == []
    (tmp_path / "index.html").write_text(
        '<a href="b/">b</a><a href="a/#end">a</a><img src="x.png"><a href="#gone">x</a>'
    )
    assert sorted(complaints(tmp_path)) == [
        "a/index.html: ../#here leads to no place on its page",
        "index.html: #gone leads to no place on its page",
        "index.html: 1 pictures without alternative text",
        "index.html: a/#end leads to no place on its page",
        "index.html: b/ leads nowhere",
        "index.html: x.png leads nowhere",
    ]
    assert complaints(tmp_path / "nothing")


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_between_files_of_the_repository(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


def test_every_flag_that_is_named_exists():
    known = set(OTHERS)
    commands = [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        known |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for page in (ROOT / "README.md", *PAGES):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+\b", page.read_text()))
        assert named <= known, f"{page.name} names {sorted(named - known)}"


def test_every_error_code_has_its_remedy():
    from pagefold.server.errors import _FORMS, _HTTP_CODES

    text = (DOCS / "troubleshooting.md").read_text()
    codes = [form.code for form in _FORMS.values() if form.code] + list(_HTTP_CODES.values())
    assert [code for code in codes if f"`{code}`" not in text] == []


def test_every_benchmark_is_told_of():
    text = (DOCS / "benchmarks.md").read_text()
    scripts = [file.name for file in (ROOT / "benchmarks").glob("*.py") if file.name != "report.py"]
    assert [name for name in scripts if f"`benchmarks/{name}`" not in text] == []
