"""Verdicts: kept by what they are about, read before weights are loaded, and nothing else decides."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from pagefold import LLM
from pagefold.cli import app
from pagefold.cli.evaluate import _floor, _window_settings
from pagefold.config import EngineConfig
from pagefold.engine.planning import plan_engine
from pagefold.engine.verdicts import (
    FORMAT,
    Verdict,
    check_quality,
    floor_of,
    format_floor_of,
    read_verdict,
    subject_of,
    write_verdict,
)
from pagefold.errors import ConfigError, QualityError
from pagefold.runner.content import content_fingerprint

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.quality.texts import Text


def _config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"model": "m", "kv_cache_dtype": "int8_per_token_head", **settings})


def _verdict(config: EngineConfig, fingerprint: str, top1: float, dtype: str = "float32") -> Verdict:
    return Verdict(
        config.model,
        fingerprint,
        subject_of(config, dtype),
        top1,
        0.001,
        0.02,
        0.003,
        1000,
        512,
        "t",
        "d",
        "2026-01-02",
        "0",
    )


def _check(config: EngineConfig, cache: Path, dtype: str = "float32") -> list[str]:
    said: list[str] = []
    check_quality(config, dtype, lambda: "f", cache, said.append)
    return said


def _dtype_of(config: EngineConfig) -> str:
    """What it computes in on this machine."""
    return str(plan_engine(config).dtype).removeprefix("torch.")


def test_a_verdict_comes_back_for_what_it_is_about_and_nothing_else(tmp_path: Path) -> None:
    verdict = _verdict(_config(), "f", 0.99)
    write_verdict(verdict, tmp_path)
    assert read_verdict("f", subject_of(_config(), "float32"), tmp_path) == verdict
    spelled = _config(kv_cache_dtype="int8")
    assert read_verdict("f", subject_of(spelled, "float32"), tmp_path) == verdict
    assert read_verdict("f", subject_of(_config(), "bfloat16"), tmp_path) is None
    for other in ({"block_size": 32}, {"kv_cache_dtype_skip_layers": (0,)}, {"quantization": "int8"}):
        assert read_verdict("f", subject_of(_config(**other), "float32"), tmp_path) is None
    assert read_verdict("g", subject_of(_config(), "float32"), tmp_path) is None
    newer = replace(verdict, top1_agreement=0.5)
    write_verdict(newer, tmp_path)
    assert read_verdict("f", subject_of(_config(), "float32"), tmp_path) == newer


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}'),
        lambda text: text.replace("0.99", "7.5"),
        lambda text: text.replace("0.99", '"high"'),
        lambda text: text.replace('"kl"', '"k"'),
        lambda text: text.replace('"fingerprint": "f"', '"fingerprint": "g"'),
        lambda _: "[]",
    ],
)
def test_a_damaged_verdict_is_none(tmp_path: Path, damage) -> None:
    file = write_verdict(_verdict(_config(), "f", 0.99), tmp_path)
    file.write_text(damage(file.read_text()))
    assert read_verdict("f", subject_of(_config(), "float32"), tmp_path) is None


def test_a_codec_under_the_floor_is_refused_unless_forced(tmp_path: Path) -> None:
    write_verdict(_verdict(_config(), "f", 0.9612), tmp_path)
    with pytest.raises(QualityError, match=r"under the quality floor of 97.0% .* 96.12% of 1,000 positions") as caught:
        _check(_config(), tmp_path)
    assert "--force-kv-cache-dtype" in caught.value.remedy
    (said,) = _check(_config(force_kv_cache_dtype=True), tmp_path)
    assert "forced" in said
    assert _check(_config(kv_quality_floor=0.96), tmp_path) == []
    assert _check(_config(kv_quality_floor=0.0), tmp_path) == []
    write_verdict(_verdict(_config(), "f", 0.97), tmp_path)
    assert _check(_config(), tmp_path) == []


@pytest.mark.parametrize(("codec", "can_skip"), [("int4", True), ("k8v4", True), ("kivi2", False)])
def test_a_refusal_names_only_what_goes_with_the_codec(tmp_path: Path, codec: str, *, can_skip: bool) -> None:
    config = _config(kv_cache_dtype=codec)
    write_verdict(_verdict(config, "f", 0.5), tmp_path)
    with pytest.raises(QualityError) as caught:
        _check(config, tmp_path)
    assert ("--kv-cache-dtype-skip-layers" in caught.value.remedy) == can_skip


def test_without_a_verdict_the_command_is_named(tmp_path: Path) -> None:
    (said,) = _check(_config(block_size=32, kv_cache_dtype_skip_layers=(0, 1)), tmp_path)
    assert said.endswith(
        "pagefold eval m --kv-cache-dtype int8_per_token_head --block-size 32 --kv-cache-dtype-skip-layers 0,1"
    )


def test_the_command_computes_as_the_engine_does(tmp_path: Path) -> None:
    """Else it would find out what another dtype costs, where ``auto`` depends on who computes."""
    (said,) = _check(_config(model_impl="transformers", attention_backend="reference"), tmp_path)
    assert said.endswith("--kv-cache-dtype int8_per_token_head --model-impl transformers --attention-backend reference")


def test_a_lossy_way_to_a_pool_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    lossy = {"kv_transport_codec": "lossy7", "kv_remote_url": "redis://127.0.0.1:1/0", "kv_offloading_size": 1.0}
    write_verdict(_verdict(_config(), "f", 0.99), tmp_path)
    (said,) = _check(_config(**lossy), tmp_path)
    assert "with kv_transport_codec lossy7 costs" in said
    assert said.endswith("--kv-cache-dtype int8_per_token_head --kv-transport-codec lossy7")
    write_verdict(_verdict(_config(**lossy), "f", 0.5), tmp_path)
    assert not _check(_config(), tmp_path)
    with pytest.raises(QualityError, match="with kv_transport_codec lossy7 is under"):
        _check(_config(**lossy), tmp_path)
    fp8 = _config(kv_cache_dtype="fp8", **lossy)  # nothing of it is rounded
    assert subject_of(fp8, "float32") == subject_of(_config(kv_cache_dtype="fp8"), "float32")


def test_what_is_stored_in_16_bit_has_no_floor(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError

    for name in ("auto", "float16", "bf16"):
        config = _config(kv_cache_dtype=name, kv_quality_floor=0.99)
        assert floor_of(config) == 0.0
        check_quality(config, "float32", never, tmp_path, never)
    assert floor_of(_config()) == 0.97


def _quantized(**settings: object) -> EngineConfig:
    return _config(**{"kv_cache_dtype": "auto", "quantization": "w8a8_int8", **settings})


def test_products_in_8_bit_have_a_floor_and_weights_alone_none(tmp_path: Path) -> None:
    assert [format_floor_of(_quantized(quantization=one)) for one in (None, "int8", "w8a8_int8")] == [0.0, 0.0, 0.97]
    assert _check(_quantized(quantization="int8"), tmp_path) == []
    (said,) = _check(_quantized(), tmp_path)
    assert said.startswith("nobody has measured what quantization w8a8_int8 costs on this model")
    assert said.endswith("pagefold eval m --number-formats w8a8_int8")
    (said,) = _check(_quantized(block_size=32), tmp_path, "bfloat16")
    assert said.endswith("pagefold eval m --number-formats bfloat16+w8a8_int8 --block-size 32")
    write_verdict(_verdict(_quantized(), "f", 0.96), tmp_path)
    with pytest.raises(QualityError, match=r"quantization w8a8_int8 is under the quality floor of 97.0%") as caught:
        _check(_quantized(force_kv_cache_dtype=True), tmp_path)
    assert "--force-quantization" in caught.value.remedy
    (said,) = _check(_quantized(force_quantization=True), tmp_path)
    assert "forced" in said
    assert _check(_quantized(kv_quality_floor=0.9), tmp_path) == []
    assert _check(_quantized(kv_quality_floor=0.0), tmp_path) == []


def test_a_codec_beside_products_in_8_bit_needs_a_verdict_on_each(tmp_path: Path) -> None:
    both = _quantized(kv_cache_dtype="int8_per_token_head")
    assert [said.split("to find out: ")[1] for said in _check(both, tmp_path)] == [
        "pagefold eval m --number-formats w8a8_int8",
        "pagefold eval m --kv-cache-dtype int8_per_token_head --quantization w8a8_int8",
    ]
    write_verdict(_verdict(_quantized(), "f", 0.99), tmp_path)
    write_verdict(_verdict(both, "f", 0.5), tmp_path)
    assert _check(_quantized(), tmp_path) == []
    with pytest.raises(QualityError, match="kv_cache_dtype int8_per_token_head is under"):
        _check(both, tmp_path)


def test_a_floor_is_a_share() -> None:
    with pytest.raises(ConfigError, match="kv_quality_floor"):
        _config(kv_quality_floor=97.0)


def test_an_engine_warns_then_refuses_then_is_forced(
    tiny_chat_model: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"kv_cache_dtype": "int8_per_token_head", "kv_cache_memory_bytes": 2**20, "max_model_len": 64}
    with caplog.at_level(logging.WARNING):
        LLM(str(tiny_chat_model), **settings)
    assert "pagefold eval" in caplog.text
    config = EngineConfig(model=str(tiny_chat_model), **settings)
    fingerprint = content_fingerprint(tiny_chat_model, own_cache)
    write_verdict(_verdict(config, fingerprint, 0.5, _dtype_of(config)), own_cache)
    with pytest.raises(QualityError, match="at 50"):
        LLM(str(tiny_chat_model), **settings)
    LLM(str(tiny_chat_model), **settings, force_kv_cache_dtype=True)
    result = CliRunner().invoke(app, ["serve", str(tiny_chat_model), "--port", "0", "--kv-cache-dtype", "int8"])
    assert result.exit_code == 2
    assert "quality floor" in result.output


def test_the_command_measures_keeps_and_recommends(
    tiny_chat_model: Path, own_cache: Path, story: Text, tmp_path: Path
) -> None:
    file, png = tmp_path / "story.txt", tmp_path / "story.png"
    file.write_text(story.content)
    asked = ["eval", str(tiny_chat_model), "--text", str(file), "--context-len", "96", "--num-contexts", "2"]
    asked += ["--needles", "0", "--greedy-tokens", "4", "--max-perplexity-change", "0.5", "--kv-quality-floor", "0.3"]
    asked += ["--kv-cache-dtype", "int8,auto", "--recommend"]
    lossy = [*asked[:-3], "--kv-cache-dtype", "int8", "--kv-transport-codec", "none,lossy6"]
    lossy += ["--max-num-batched-tokens", "32"]  # else the only chunk attends to itself alone
    result = CliRunner().invoke(app, [*asked, "--json", "--png", str(png)])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [found["name"] for found in answer["settings"]] == ["int8", "auto again"]
    assert answer["recommended"]["kv_cache_dtype"] == "int8"
    assert answer["settings"][1]["kl"]["value"] == 0.0
    assert png.read_bytes().startswith(b"\x89PNG")
    config = EngineConfig(model=str(tiny_chat_model), kv_cache_dtype="int8_per_token_head")
    verdict = read_verdict(answer["fingerprint"], subject_of(config, _dtype_of(config)), own_cache)
    assert verdict is not None
    assert verdict.top1_agreement == answer["settings"][0]["top1_agreement"]["value"]
    assert verdict.num_tokens == 190
    assert len(list((own_cache / "verdicts").iterdir())) == 1  # none on auto
    result = CliRunner().invoke(app, [*lossy, "--json"])
    kept, rounded = json.loads(result.stdout)["settings"]
    assert (kept["name"], rounded["name"], rounded["transport"]) == ("int8", "int8, lossy6", "lossy6")
    assert rounded["perplexity"] != kept["perplexity"]
    assert len(list((own_cache / "verdicts").iterdir())) == 2
    again = CliRunner().invoke(app, [*asked, "--no-save"])
    assert again.exit_code == 0
    assert "recommended: --kv-cache-dtype int8" in again.output


@pytest.mark.long
def test_number_formats_are_compared_with_float32_in_one_run(
    tiny_chat_model: Path, own_cache: Path, story: Text, tmp_path: Path
) -> None:
    file = tmp_path / "story.txt"
    file.write_text(story.content)
    asked = ["eval", str(tiny_chat_model), "--text", str(file), "--context-len", "96", "--num-contexts", "2", "--json"]
    asked += ["--needles", "0", "--greedy-tokens", "4", "--number-formats", "bfloat16,w8a8_int8,bfloat16+w8a8_int8"]
    result = CliRunner().invoke(app, [*asked, "--recommend"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    names = ("bfloat16", "w8a8_int8", "bfloat16+w8a8_int8")
    assert [found["name"] for found in answer["settings"]] == [f"numbers in {name}" for name in names]
    assert [found["dtype"] for found in answer["settings"]] == ["bfloat16", "float32", "bfloat16"]
    # Of so small a model the divergence is as large as what rounds it, and has either sign.
    assert all(found["kl"]["value"] != 0 for found in answer["settings"])
    assert answer["recommended"]["kv_cache_dtype"] == "auto"  # a number format is no codec
    assert len(list((own_cache / "verdicts").iterdir())) == 2  # none on bfloat16
    for dtype, at in (("float32", 1), ("bfloat16", 2)):
        subject = subject_of(_quantized(model=str(tiny_chat_model)), dtype)
        verdict = read_verdict(answer["fingerprint"], subject, own_cache)
        assert verdict is not None
        assert verdict.top1_agreement == answer["settings"][at]["top1_agreement"]["value"]
    both_sides = ["--quantization", "w8a8_int8", "--kv-cache-dtype", "auto"]
    result = CliRunner().invoke(app, [*asked[:-2], *both_sides])
    assert result.exit_code == 0, result.output
    assert len(list((own_cache / "verdicts").iterdir())) == 2  # what is compared with itself has no verdict


def test_a_window_has_no_floor_and_keeps_no_verdict_whatever_is_quantized_besides():
    """Else what a window costs would stand where a server looks for what its number format costs."""
    config = _quantized(model="tiny", streaming_llm=64)
    (setting,) = _window_settings(config, "64", 4, 1000).values()
    assert format_floor_of(config) > 0
    assert _floor(setting, config) == 0.0


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--streaming-llm", "32,x"], "which is no number of tokens"),
        (["--streaming-llm", "8"], "at least a block"),
        (["--streaming-llm", "60"], "hides nothing of 64 tokens"),
        (["--number-formats", "bfloat16", "--streaming-llm", "32"], "a run of its own"),
        (["--kv-keep", "0.5"], "of contexts of 64 tokens all are kept"),
        (["--kv-keep", "0.5,x", "--context-len", "600"], "'x', which is no share"),
        (["--kv-keep", "1.5", "--context-len", "600"], "above 0, and 1 for all at most"),
        (["--kv-keep", "0.5", "--context-len", "600", "--kv-cache-dtype", "kivi2"], "do not go together"),
        (["--kv-keep", "0.5", "--context-len", "600", "--kv-cache-dtype-skip-layers", "0"], "do not go together"),
        (["--kv-keep", "0.5", "--context-len", "600", "--kv-transport-codec", "lossy7"], "a run of its own"),
        (["--number-formats", "int5"], "There is no number format 'int5'"),
        (["--number-formats", "int8+w8a8_int8"], "each would take the other's place"),
        (["--number-formats", "bfloat16"], "a run of its own"),
        (["--number-formats", "w8a8_int8", "--quantization", "int8"], "Leave one of them out"),
        (["--kv-cache-dtype", "int5"], "one of auto"),
        (["--context-len", "4096"], "at most 2047"),
        (["--context-len", "512"], "longer text"),
        (["--num-contexts", "0"], "at least 1"),
        (["--text", "/no/such/file"], "Cannot read"),
        (["--kv-cache-dtype-skip-layers", "7"], "between 0 and 1"),
        (["--kv-transport-codec", "lossy5"], "one of none, lossless, lossy7, lossy6"),
        (["--kv-transport-codec", "lossy7", "--kv-cache-dtype", "int4"], "have none"),
        (["--kv-cache-dtype-skip-layers", "a"], "list of layers"),
        (["--max-perplexity-change", "-1"], "Give a share"),
        (["--png", "/no/such/folder/x.png"], "Cannot write"),
        (["--greedy-tokens", "-1"], "too small"),
    ],
)
def test_bad_input_is_refused_at_once(
    tiny_chat_model: Path, own_cache: Path, tmp_path: Path, flags: list[str], said: str
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("Call me Ishmael. " * 40)
    asked = ["eval", str(tiny_chat_model), "--text", str(file), "--context-len", "64", "--greedy-tokens", "4"]
    asked += ["--kv-cache-dtype", "int8", "--needles", "0", *flags]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (own_cache / "verdicts").exists()
