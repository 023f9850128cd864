"""Calibration: found once, kept under the weights' fingerprint, and never taken where it is damaged or another's."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from equivalence.tiny_models import save_tiny_model
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.errors import ConfigError, UnsupportedModelError
from pagefold.masks.attention_got import attention_got, recitals
from pagefold.masks.calibration import _contexts, calibrate, kept_scorer, scorer_path, shipped_text
from pagefold.masks.watched_model import WatchedModel
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def _sealed(whole: bytes) -> bytes:
    return whole + hashlib.sha256(whole).digest()


def test_a_scorer_predicts_what_keys_get_and_is_kept(tiny_chat_model: Path, own_cache: Path, story: str) -> None:
    assert kept_scorer(tiny_chat_model) is None
    told: list[tuple[str, int, int]] = []
    found = calibrate(tiny_chat_model, [story], num_contexts=2, progress=lambda *what: told.append(what))
    assert {what for what, *_ in told} == {"measuring attention", "finding thresholds"}
    assert all(0 <= done <= total for _, done, total in told)
    assert told[-1][1] == told[-1][2]
    scorer = found.scorer
    assert scorer.weights.shape == (2, 2, 32)
    assert (found.found_on.context_len, found.found_on.num_tokens) == (1280, 2560)
    again = kept_scorer(tiny_chat_model)
    assert again is not None
    assert again.found_on == found.found_on
    assert all(torch.equal(one, other) for one, other in zip(again.scorer, scorer, strict=True))
    assert again.scorer.digest == scorer.digest
    assert scorer_path(tiny_chat_model).is_relative_to(own_cache)
    assert found.found_on.explained[1] <= found.found_on.explained[0] <= found.found_on.explained[2]


def test_the_scorer_is_the_ridge_of_all_rows(tiny_chat_model: Path, own_cache: Path, story: str) -> None:
    found = calibrate(tiny_chat_model, [story], num_contexts=2)
    model, tokenizer = WatchedModel(tiny_chat_model), Tokenizer(tiny_chat_model)
    contexts = _contexts([story], tokenizer, 1280, 2)
    got = [attention_got(model, own, recitals(own, tokenizer)) for own in contexts]
    scores = []
    for layer in range(2):
        features = torch.cat([one.hidden[layer][4:] for one in got]).double().numpy()
        outputs = torch.cat([one.largest[layer, :, 4:].T for one in got]).double().log().numpy()
        centred = features - features.mean(0)
        strength = (len(centred) * found.found_on.penalty * centred.var(0).mean()) ** 0.5
        rows = np.vstack([centred, strength * np.eye(32)])
        asked = np.vstack([outputs - outputs.mean(0), np.zeros((32, 2))])
        twin = np.linalg.lstsq(rows, asked, rcond=None)[0]
        np.testing.assert_allclose(found.scorer.weights[layer].numpy().T, twin, atol=1e-4)
        scores.append(centred @ twin + outputs.mean(0))
    for keep in (0.25, 0.5, 0.9):
        kept = np.mean(np.stack(scores) >= float(found.scorer.thresholds(keep)[0, 0]))
        assert kept == pytest.approx(keep, abs=0.02)  # few words: many scores are nearly equal


def test_beside_windows_the_other_layers_are_fitted_alone(
    windowed_chat_model: Path, own_cache: Path, story: str
) -> None:
    folder = windowed_chat_model
    found = calibrate(folder, [story], num_contexts=2)
    scorer = found.scorer
    assert scorer.biases.isinf().tolist() == [[True, True], [False, False]] * 2
    assert [bool(weights.any()) for weights in scorer.weights] == [False, True, False, True]
    assert found.found_on.explained[1] <= found.found_on.explained[0] <= found.found_on.explained[2]
    model, tokenizer = WatchedModel(folder), Tokenizer(folder)
    scores = []
    for own in _contexts([story], tokenizer, 1280, 2):
        got = attention_got(model, own, recitals(own, tokenizer))
        assert not got.natural[0].any()  # no window reaches so far back
        scores += [scorer.scores(layer, got.hidden[layer])[:, 4:] for layer in (1, 3)]
    kept = torch.cat(scores, dim=1) >= scorer.thresholds(0.5)[1, 0]
    assert float(kept.float().mean()) == pytest.approx(0.5, abs=0.02)


def test_calibrating_twice_finds_the_same(tiny_chat_model: Path, own_cache: Path, story: str) -> None:
    digests = [calibrate(tiny_chat_model, [story], num_contexts=2).scorer.digest for _ in range(2)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("damage", ["a bit", "cut off", "empty", "gone"])
def test_a_damaged_file_is_not_taken(damage: str, tiny_chat_model: Path, own_cache: Path, story: str) -> None:
    _keep_something(tiny_chat_model)
    file = scorer_path(tiny_chat_model)
    whole = bytearray(file.read_bytes())
    whole[random.randrange(len(whole))] ^= 1 << random.randrange(8)
    file.write_bytes({"a bit": bytes(whole), "cut off": bytes(whole[:-5]), "empty": b"", "gone": b""}[damage])
    if damage == "gone":
        file.unlink()
    assert kept_scorer(tiny_chat_model) is None


def _keep_something(folder: Path) -> None:
    from pagefold.masks import calibration
    from pagefold.masks.scorer import Scorer
    from pagefold.masks.scorer_file import FoundOn, KeptScorer, write_scorer
    from pagefold.runner.content import content_fingerprint

    fingerprint = content_fingerprint(folder, calibration.cache_dir())
    found_on = FoundOn(calibration._VERSION, fingerprint, 2560, 1280, "ab", 0.01, (0.5, 0.1, 0.9))
    file = scorer_path(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_scorer(
        file, KeptScorer(Scorer(torch.rand(2, 2, 32), torch.rand(2, 2), torch.rand(9).sort().values), found_on)
    )
    assert kept_scorer(folder) is not None


def test_a_whole_file_of_something_else_is_not_taken(tiny_chat_model: Path, own_cache: Path) -> None:
    _keep_something(tiny_chat_model)
    file = scorer_path(tiny_chat_model)
    line, _, numbers = file.read_bytes()[:-32].partition(b"\n")
    head = json.loads(line)
    others = [
        head | {"found_on": head["found_on"] | {"version": 0}},
        head | {"found_on": head["found_on"] | {"fingerprint": "another"}},
        head | {"found_on": {"version": 1}},
        head | {"shapes": [[2, 2, 32], [2, 2], [10**6]]},
        head | {"shapes": [[2, 2, 32]]},
        [],
    ]
    for other in others:
        file.write_bytes(_sealed(json.dumps(other).encode() + b"\n" + numbers))
        assert kept_scorer(tiny_chat_model) is None
    file.write_bytes(_sealed(b"something else"))
    assert kept_scorer(tiny_chat_model) is None
    file.write_bytes(_sealed(line + b"\n" + numbers))
    assert kept_scorer(tiny_chat_model) is not None


def test_other_weights_have_another_scorer(tiny_chat_model: Path, own_cache: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _keep_something(tiny_chat_model)
    other = tmp_path / "other"
    shutil.copytree(tiny_chat_model, other)
    assert kept_scorer(other) is not None, "the same bytes elsewhere are the same model"
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert kept_scorer(other) is None
    shutil.copy(scorer_path(tiny_chat_model), scorer_path(other))
    assert kept_scorer(other) is None


def test_contexts_come_from_each_text_in_turn(tiny_chat_model: Path, story: str) -> None:
    tokenizer = Tokenizer(tiny_chat_model)
    other = "Peace " + story.replace("whale", "dove")
    found = _contexts([story[:9000], "too short", other], tokenizer, 1024, 5)
    assert all(len(own) == 1024 for own in found)
    first, second = (tokenizer.encode_rendered(text) for text in (story[:9000], other))
    expected = []
    for at in range(0, len(second), 1024):
        expected += [text[at : at + 1024] for text in (first, second) if at + 1024 <= len(text)]
    assert found == expected[:5]
    much = story * 40
    spread = _contexts([much], tokenizer, 1024, 3)
    assert spread[1] == tokenizer.encode_rendered(much[len(much) // 3 :][:20000])[:1024]


def test_the_text_that_is_shipped_has_a_context_of_full_length(tiny_chat_model: Path) -> None:
    assert len(Tokenizer(tiny_chat_model).encode_rendered(shipped_text())) >= 2048


def test_what_cannot_be_calibrated_is_said(tiny_chat_model: Path, own_cache: Path, story: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 0 contexts of 1,280 tokens.*Give a longer text"):
        calibrate(tiny_chat_model, ["A short story."])
    with pytest.raises(ConfigError, match="at least 2: one is held out"):
        calibrate(tiny_chat_model, [story], num_contexts=1)
    short = tmp_path / "short"
    shutil.copytree(tiny_chat_model, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    with pytest.raises(UnsupportedModelError, match="takes 1,024 tokens at most, and a calibration 1,600"):
        calibrate(short, [story])


def test_the_command_fits_keeps_and_tells(tiny_chat_model: Path, own_cache: Path, story: str, tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_text(story)
    asked = ["calibrate", str(tiny_chat_model), "--text", str(file), "--num-contexts", "2"]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    kept = kept_scorer(tiny_chat_model)
    assert kept is not None
    assert answer["digest"] == kept.scorer.digest
    assert answer["num_tokens"] == 2560
    assert answer["file"] == str(scorer_path(tiny_chat_model))
    assert answer["thresholds"]["0.25"] > answer["thresholds"]["0.5"] > answer["thresholds"]["0.75"]
    assert "measuring attention" in result.stderr
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 0, again.output
    assert kept.scorer.digest in again.stdout


@pytest.fixture
def named(tiny_chat_model: Path, story: str, tmp_path: Path) -> dict[str, Path]:
    text, windowed = tmp_path / "story.txt", tmp_path / "windowed"
    text.write_text(story)
    save_tiny_model("mistral-window", windowed)
    return {"model": tiny_chat_model, "text": text, "windowed": windowed}


@pytest.mark.parametrize(
    ("flags", "said"),
    [  # {model}, {text} and {windowed} are there
        (["no-such-model"], "There is no model 'no-such-model'"),
        (["{model}", "--text", "no-such-file"], "Cannot read no-such-file"),
        (["{model}", "--text", "{text}", "--num-contexts", "1"], "Give at least 2"),
        (["{model}", "--text", "{text}", "--threads", "0"], "threads is 0"),
        (["{windowed}", "--text", "{text}"], "has windows or chunks in all layers"),
    ],
)
def test_the_command_says_what_is_wrong(flags: list[str], said: str, own_cache: Path, named: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, ["calibrate", *(flag.format(**named) for flag in flags)])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not (own_cache / "calibration").exists()
