"""The fused decoder beyond sliding windows: near transformers' forward pass, and the same to the bit in any company.

Gemma 3 has two ropes and norms of q and k, Gemma 2 softcaps; both norm what is added. A Mistral has windows in all
layers, and a Qwen2 in some.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from random import Random

import pytest
import torch

from equivalence.prompts import full_prompts, short_prompts
from equivalence.settings import SETTINGS
from equivalence.suite import Trial, Workload
from equivalence.test_fused import LOGITS_BOUND, _engine, _plan
from equivalence.test_number_formats import BFLOAT16, FORMATS, INT8, Format
from equivalence.test_windows import expected_of_windows
from equivalence.tiny_models import MAX_POSITIONS, VOCAB_SIZE
from pagefold.kv import BlockId
from pagefold.runner.fused.decoder import FusedDecoder
from pagefold.runner.fused.formats import decoder_formats

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FULL = Workload(full_prompts(VOCAB_SIZE), num_outputs=40)
WINDOWS = {"gemma3": 24, "gemma2-window-64": 64, "mistral-window-40": 40, "qwen2-window-24": 24}
FLOAT32 = Format("float32")
ALL_SETTINGS = [
    replace(expected_of_windows(setting, FULL), attention_backend="auto")
    for setting in SETTINGS
    if setting.knows_groups and setting.block_size >= 4 and not (setting.num_host_blocks and setting.damage_rate)
]
NAMES = {"chunks of 17", "short of memory", "everything at once"}
FEW_SETTINGS = [setting for setting in ALL_SETTINGS if setting.name in NAMES]


def _tokens(seed, length):
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def _groups(runner):
    return len(runner.geometry.groups)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", WINDOWS)
def test_logits_are_near_those_of_transformers(family, tiny_folder, tiny_references):
    """A ragged batch, then one token more for each of its sequences, against float64 without a cache."""
    model = tiny_references(family, SHORT.num_outputs).model
    window = WINDOWS[family]
    lengths = (10 * window, 700, 1, window - 1, window, window + 1, 3 * window + 5)
    sequences, more = [_tokens(at, length) for at, length in enumerate(lengths)], _tokens(99, len(lengths))
    runner = _engine(tiny_folder(family)).runner
    assert isinstance(runner.decoder, FusedDecoder)
    assert {group.keeps.window for group in runner.geometry.groups} >= {window}
    blocks = [range(50 * at, 50 * at + 50) for at in range(len(sequences))]
    rows = [(ids, 0, own) for ids, own in zip(sequences, blocks, strict=True)]
    first = runner.logits(_plan(rows, _groups(runner))).clone()
    rows = [([one], len(ids), own) for one, ids, own in zip(more, sequences, blocks, strict=True)]
    second = runner.logits(_plan(rows, _groups(runner))).clone()
    for at, ids in enumerate(sequences):
        with torch.inference_mode():
            expected = model(torch.tensor([[*ids, more[at]]])).logits[0, -2:]
        told = torch.stack([first[at], second[at]]).double()
        assert (told - expected).abs().max() < LOGITS_BOUND


def _last_logits(runner, ids, blocks, size):
    """Compute a prompt in chunks; return the logits of its last token.

    Before each chunk, blocks that its tokens do not see any more are taken out of the tables of windows.
    """
    block_size = runner.geometry.block_size
    for start in range(0, len(ids), size):
        plan = _plan([(ids[start : start + size], start, blocks)], _groups(runner))
        for table, group in zip(plan.tables[0], runner.geometry.groups, strict=True):
            num_left = group.keeps.first_seen(start) // block_size
            num_sink_blocks = -(-group.keeps.num_sinks // block_size)
            if num_left > num_sink_blocks:
                table.num_trimmed, table.sink_ids = num_left, table.block_ids[:num_sink_blocks]
                del table.block_ids[:num_left]
        logits = runner.logits(plan)[0].clone()
    return logits


def _case(family, form, *, is_short):
    return pytest.param(family, form, id=f"{family}-{form}", marks=[] if is_short else [pytest.mark.long])


COMPANY = [
    _case(
        family, form, is_short=form is FLOAT32 or (family, form) in {("gemma3", BFLOAT16), ("gemma2-window-64", INT8)}
    )
    for family in WINDOWS
    for form in (FLOAT32, *FORMATS)
]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("family", "form"), COMPANY)
def test_logits_are_the_same_to_the_bit_in_any_company(family, form, tiny_folder):
    """Alone or among others, in chunks of any size, over shared blocks or its own, with one thread or two."""
    prefix, tails = _tokens(3, 256), [_tokens(50 + at, length) for at, length in enumerate((1, 3, 17, 40, 111))]
    told = []
    for threads in (1, 2):
        runner = _engine(tiny_folder(family), threads=threads, **form.settings).runner
        own = [range(64 * at, 64 * at + 64) for at in range(len(tails))]
        whole = [(prefix + tail, 0, own[at]) for at, tail in enumerate(tails)]
        alone = [runner.logits(_plan([row], _groups(runner)))[0].clone() for row in whole]
        runner.slab.data.fill_(float("nan"))  # a slot that was never written may hold anything
        together = list(runner.logits(_plan(whole, _groups(runner))).clone())
        runner.slab.data.fill_(float("nan"))
        in_chunks = {
            size: [_last_logits(runner, ids, blocks, size) for ids, _, blocks in whole[-2:]]
            for size in (1, 16, 17, 512)
        }
        runner.logits(_plan([(prefix, 0, own[0])], _groups(runner)))
        shared = [[*own[0][:16], *own[at][16:]] for at in range(len(tails))]
        rows = [(tail, 256, shared[at]) for at, tail in enumerate(tails)]
        warm = list(runner.logits(_plan(rows, _groups(runner))).clone())
        for at, tail in enumerate(tails):  # the last token again: a decode row over what the others share
            rows[at] = ([tail[-1]], 256 + len(tail) - 1, shared[at])
        again = list(runner.logits(_plan(rows, _groups(runner))).clone())
        told += [alone, together, warm, again, *(alone[:-2] + last for last in in_chunks.values())]
    for results in zip(*told, strict=True):
        assert not results[0].isnan().any()
        assert all(torch.equal(results[0], result) for result in results)


def test_what_a_window_has_left_behind_is_read_into_nothing(tiny_folder):
    """Blocks of the windowed group that no row sees hold NaN, and every table begins with them."""
    runner = _engine(tiny_folder("gemma3")).runner
    ids, blocks = _tokens(8, 200), range(20)
    expected = runner.logits(_plan([(ids, 0, blocks)], _groups(runner)))[0].clone()
    runner.logits(_plan([(ids[:-1], 0, blocks)], _groups(runner)))
    broken = BlockId(50)
    runner.slab.data[broken].fill_(float("nan"))
    plan = _plan([(ids[-1:], len(ids) - 1, blocks)], _groups(runner))
    for table, group in zip(plan.tables[0], runner.geometry.groups, strict=True):
        num_left = group.keeps.first_seen(len(ids) - 1) // runner.geometry.block_size
        table.block_ids[:num_left] = [broken] * num_left
    assert torch.equal(runner.logits(plan)[0], expected)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("setting", FEW_SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("family", ["gemma3", "gemma2-window-64"])
def test_outputs_are_those_alone(family, setting, tiny_folder, alone_in):
    trial = Trial(replace(setting, **FLOAT32.settings), SHORT, tiny_folder(family))
    trial.run()
    trial.assert_exact(alone_in(family, FLOAT32, SHORT.num_outputs))


def _dealt():
    """Every setting with two of the pairs of a family and a format, others for each setting.

    Where every layer slides, a host tier ends sequences at the window.
    """
    pairs = [(family, form) for form in (FLOAT32, *FORMATS) for family in WINDOWS]
    for number, setting in enumerate(ALL_SETTINGS):
        for place in range(2):
            family, form = pairs[(2 * number + place) % len(pairs)]
            if family != "mistral-window-40" or not setting.num_host_blocks:
                yield pytest.param(family, form, setting, id=f"{family}-{form}-{setting.name}")


@pytest.mark.long
@pytest.mark.parametrize(("family", "form", "setting"), list(_dealt()))
def test_outputs_are_those_alone_in_full(family, form, setting, tiny_folder, alone_in):
    trial = Trial(replace(setting, at_least=None, **form.settings), FULL, tiny_folder(family))
    trial.run()
    trial.assert_exact(alone_in(family, form, FULL.num_outputs))


ONE_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}
CHANGES = [
    ("gemma3", {"sliding_window": MAX_POSITIONS}),
    ("gemma3", {"sliding_window": 25}),
    ("gemma3", {"rope_parameters": {"full_attention": ONE_ROPE, "sliding_attention": ONE_ROPE}}),
    ("gemma3", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}}),
    ("gemma3", {"query_pre_attn_scalar": 16}),
    ("gemma3", {"final_logit_softcapping": 3.0}),
    ("gemma2-window-64", {"sliding_window": MAX_POSITIONS}),
    ("gemma2-window-64", {"attn_logit_softcapping": None}),
    ("gemma2-window-64", {"final_logit_softcapping": None}),
    ("gemma2-window-64", {"hidden_activation": "silu"}),
    ("mistral-window-40", {"sliding_window": None}),
    ("mistral-window-40", {"sliding_window": 41}),
    ("qwen2-window-24", {"sliding_window": MAX_POSITIONS}),
]


@pytest.mark.quick(every=9)
@pytest.mark.parametrize(("family", "change"), CHANGES, ids=str)
def test_what_a_config_says_matters(family, change, tiny_folder, tmp_path):
    """Else the tests above would not tell a decoder that does not listen."""
    folder = tmp_path / "changed"
    shutil.copytree(tiny_folder(family), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    told = []
    for where in (tiny_folder(family), folder):
        runner = _engine(where).runner
        told.append(runner.logits(_plan([(_tokens(1, 300), 0, range(20))], _groups(runner)))[0].clone())
    assert (told[0] - told[1]).abs().max() > 1e-2


def test_embeddings_are_multiplied_by_what_transformers_has_in_that_dtype():
    """The root of 640 is 25.298; Gemma was trained with what bfloat16 makes of it."""
    assert decoder_formats("float32", None).rounded(640**0.5) == torch.tensor(640**0.5)
    for quantization in (None, "int8", "w8a8_int8"):
        assert decoder_formats("bfloat16", quantization).rounded(640**0.5) == 25.25
