"""``pagefold eval --kv-keep``: what a share of older tokens costs, what it takes, and the verdict that starts heed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from equivalence.packing_house import keep_random_scorer
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.config import EngineConfig
from pagefold.engine.planning import plan_engine
from pagefold.engine.verdicts import Verdict, check_quality, read_verdict, subject_of, write_verdict
from pagefold.errors import QualityError

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.quality.texts import Text


@pytest.mark.long
@pytest.mark.parametrize("codec", ["", pytest.param("int8_per_token_head", marks=pytest.mark.long)])
def test_shares_alone_and_of_a_codec_are_measured_and_heeded(
    tiny_chat_model: Path, own_cache: Path, story: Text, tmp_path: Path, codec: str
) -> None:
    keep_random_scorer(tiny_chat_model)
    file = tmp_path / "story.txt"
    file.write_text(story.content)
    asked = ["eval", str(tiny_chat_model), "--text", str(file), "--context-len", "900", "--num-contexts", "2", "--json"]
    asked += ["--needles", "0", "--greedy-tokens", "4", "--dtype", "float32"]
    asked += ["--recommend", "--kv-quality-floor", "0", "--max-perplexity-change", "1000"]
    result = CliRunner().invoke(app, [*asked, "--kv-keep", "0.5,0.25", *(["--kv-cache-dtype", codec] if codec else [])])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    found = {one["name"]: one for one in answer["settings"]}
    shares_of = [f"kv_keep {share}{of}" for share in (0.5, 0.25) for of in (["", f", {codec}"] if codec else [""])]
    assert list(found) == [*shares_of, *([codec] if codec else [])]
    # Of 901 tokens 512 are older than the last two chunks.
    taken = {name: one["bytes_per_token"] / answer["exact_bytes_per_token"] for name, one in found.items()}
    assert taken["kv_keep 0.25"] < taken["kv_keep 0.5"] < 1
    assert 1 - 512 / 901 * 0.6 < taken["kv_keep 0.5"] < 1 - 512 / 901 * 0.3
    assert all(one["kl"]["value"] != 0 for one in found.values())
    assert {found[name]["num_tokens"] for name in shares_of} == {2 * (899 - 512)}
    assert all(found["kv_keep 0.5"]["bins"][at]["kl"]["value"] == 0 for at in range(4))  # nothing is removed there
    assert answer["recommended"]["kv_cache_dtype"] == (codec or "auto")  # a share is smaller, and no codec
    if codec:
        assert found[codec]["num_tokens"] == 2 * 899
        assert taken[f"kv_keep 0.5, {codec}"] < taken["kv_keep 0.5"] * 0.5

    config = EngineConfig(model=str(tiny_chat_model), dtype="float32", kv_keep=(0.5,))
    applied = {"kv_keep 0.5": config, f"kv_keep 0.5, {codec}": replace(config, kv_cache_dtype=codec or "auto")}
    for name, one in list(applied.items())[: 1 + bool(codec)]:
        mask = plan_engine(one).mask
        assert mask is not None
        verdict = read_verdict(answer["fingerprint"], subject_of(one, "float32", mask=mask.names[0]), own_cache)
        assert verdict is not None
        assert verdict.top1_agreement == found[name]["top1_agreement"]["value"]
        assert read_verdict(answer["fingerprint"], subject_of(one, "float32", mask="another"), own_cache) is None


@pytest.mark.long
def test_beside_windows_what_the_other_layers_keep_is_counted(
    windowed_chat_model: Path, own_cache: Path, story: Text, tmp_path: Path
) -> None:
    keep_random_scorer(windowed_chat_model)
    file = tmp_path / "story.txt"
    file.write_text(story.content)
    asked = ["eval", str(windowed_chat_model), "--text", str(file), "--context-len", "900", "--num-contexts", "2"]
    asked += ["--needles", "0", "--greedy-tokens", "4", "--dtype", "float32", "--kv-keep", "0.5", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    (found,) = answer["settings"]
    # Half of the layers keep all of 901 tokens, of which 512 are older, and the others a window of 24.
    taken = found["bytes_per_token"] / answer["exact_bytes_per_token"]
    most = 901 + 24
    assert (most - 512 * 0.75) / most < taken < (most - 512 * 0.25) / most


MASK = "mask abc keeps 0.5"


def _check(config: EngineConfig, cache: Path) -> list[str]:
    said: list[str] = []
    check_quality(config, "float32", lambda: "f", cache, said.append, masks=[MASK])
    return said


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_a_share_under_its_floor_is_refused(own_cache: Path, codec: str) -> None:
    config = EngineConfig(model="m", kv_keep=(0.5,), kv_cache_dtype=codec)
    subjects = [subject_of(config, "float32", mask=MASK), subject_of(replace(config, kv_keep=()), "float32")]
    for subject, top1 in zip(subjects, (0.94, 0.99), strict=True):
        write_verdict(
            Verdict("m", "f", subject, top1, 0.001, 0.02, 0.003, 1000, 2048, "t", "d", "2026-01-02", "0"), own_cache
        )
    with pytest.raises(QualityError, match=r"kv_keep 0\.5.* is under the quality floor of 95\.0%") as caught:
        _check(config, own_cache)
    assert ("kv_cache_dtype int8" in str(caught.value)) == (codec == "int8")
    assert ("another codec" in caught.value.remedy) == (codec == "int8")
    assert "skip-layers" not in caught.value.remedy
    assert not _check(replace(config, kv_quality_floor=0.94), own_cache)
    assert not _check(replace(config, kv_quality_floor=0.0), own_cache)


def test_a_start_names_the_command_that_measures(own_cache: Path) -> None:
    config = EngineConfig(model="m", kv_keep=(1, 0.5), kv_cache_dtype="int8", block_size=32)
    said = _check(config, own_cache)
    assert [line.rsplit(": ", 1)[1] for line in said] == [
        "pagefold eval m --kv-cache-dtype int8 --block-size 32",
        "pagefold eval m --kv-keep 0.5 --block-size 32 --kv-cache-dtype int8",
    ]
