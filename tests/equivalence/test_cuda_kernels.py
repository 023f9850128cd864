"""The card's kernels are dense attention, as Triton's interpreter runs them; and compile for cards that are not here.

What the interpreter shows: numbers, addresses, masks. What it cannot: races, speed, what a card refuses. The last is
shown by compiling: ``ptxas`` is inside Triton's wheel. Triton reads once whether it interprets: each needs a process.

Bounds are absolute, for numbers of standard deviation 1 that the dtype holds exactly: two units in the last place of
outputs of up to 4, where float32's sums do not show; in float32 as ``test_attention.py`` has it.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from itertools import product
from random import Random

import pytest

from equivalence import compiled_for_cards, interpreted
from equivalence.alone import AloneOutputs
from equivalence.attention_cases import Lengths, Shape
from equivalence.coded_cases import attend_coded, encode_extremes
from equivalence.prompts import short_prompts
from equivalence.references import References
from equivalence.sealed_cases import attend_sealed, seal_extremes
from equivalence.settings import long_but
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model
from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.runner.attention.cuda.configs import MAX_SHARED_BYTES
from pagefold.runner.codecs import CELL_CODECS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")

BOUNDS = {"float32": 8e-6, "float16": 2 * 2**-9, "bfloat16": 2 * 2**-6}

SHAPES = (
    Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3),  # SmolLM2
    Shape(block_size=16, head_dim=128, num_kv_heads=2, group=4, num_layers=1),  # Llama 3
    Shape(block_size=16, head_dim=32, num_kv_heads=4, group=1),  # MHA
    Shape(block_size=32, head_dim=80, num_kv_heads=1, group=20),  # MQA, and no power of two
    Shape(block_size=4, head_dim=96, num_kv_heads=2, group=2, num_layers=1),
    Shape(block_size=64, head_dim=256, num_kv_heads=1, group=5, num_layers=1),
)
RAGGED = [Lengths(300, 1), Lengths(37, 5), Lengths(0, 70), Lengths(70, 1, 70), Lengths(0, 1), Lengths(15, 17, 15)]


def _pool(begin):
    """Return one fresh process that has begun so: nothing of this one's is in it."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin)


@pytest.fixture(scope="module")
def interpreter():
    with _pool(interpreted.begin) as pool:
        yield lambda function, *args, **made: pool.submit(function, *args, **made).result(300)


@pytest.fixture(scope="module")
def compiler():
    with _pool(compiled_for_cards.begin) as pool:

        def compile_kernel(*args, function=compiled_for_cards.compile_kernel, **flags):
            return pool.submit(function, *args, **flags).result(300)

        yield compile_kernel


def _shapes_and_dtypes(*quick_shapes):
    """Each shape with each dtype: quick are ``quick_shapes`` in float32, and the first of them in every dtype."""
    return [
        pytest.param(shape, dtype, marks=[] if is_quick else [pytest.mark.long])
        for shape in SHAPES
        for dtype in BOUNDS
        for is_quick in [shape == quick_shapes[0] or (dtype == "float32" and shape in quick_shapes)]
    ]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(("shape", "dtype"), _shapes_and_dtypes(SHAPES[0]), ids=str)
def test_they_are_dense_attention(shape, dtype, interpreter):
    seed = Random().randrange(2**32)
    for per_head in (False, True):
        error = interpreter(interpreted.attend, shape, RAGGED, dtype, BOUNDS[dtype], per_head=per_head, seed=seed)
        print(f"seed {seed}: {error:.2e}")


@pytest.mark.parametrize("num_splits", long_but([8], [1, 2, 8, 64]))
def test_any_number_of_splits_gives_the_same(num_splits, interpreter):
    """Lengths from one entry to more than four of the smallest splits; some splits are empty."""
    lengths = [Lengths(num, 1) for num in (0, 255, 256, 1100)]
    bound = BOUNDS["float32"]
    interpreter(
        interpreted.attend, SHAPES[0], lengths, "float32", bound, per_head=True, seed=num_splits, num_splits=num_splits
    )


@pytest.mark.long
@pytest.mark.parametrize("sharpness", long_but([30.0], [1.0, 30.0]))
@pytest.mark.parametrize("softcap", long_but([5.0], [0.0, 5.0]))
def test_soft_capping_and_sharp_scores(sharpness, softcap, interpreter):
    made = {"per_head": False, "seed": 7, "sharpness": sharpness, "softcap": softcap}
    interpreter(interpreted.attend, SHAPES[0], RAGGED, "float32", BOUNDS["float32"] * sharpness, **made)


@pytest.mark.long
@pytest.mark.parametrize("num_splits", long_but([8], [1, 8]))
def test_sinks_have_their_share(num_splits, interpreter):
    """Once, however decoding is cut into splits; and whole beside codes, whose scores were centred."""
    made = {"per_head": False, "seed": 7, "sink_size": 3.0, "num_splits": num_splits}
    sequences = [*RAGGED, Lengths(1100, 1)]
    interpreter(interpreted.attend, SHAPES[0], sequences, "float32", BOUNDS["float32"], **made)
    interpreter(attend_coded, "k8v4", SHAPES[0], sequences[:3], "float32", CODED_BOUNDS["float32"], **made)


SMALL = Shape(block_size=16, head_dim=32, num_kv_heads=1, group=2, num_layers=1)
GROUPS = {
    "all, less than a block": (KEEP_ALL, KeepRule(7)),
    "all, a block": (KEEP_ALL, KeepRule(16)),
    "a block and one, chunks of blocks": (KeepRule(17), KeepRule(32, is_chunked=True)),
    "more than a split, uneven chunks": (KeepRule(300), KeepRule(100, is_chunked=True)),
    "one, chunks of more than a split, all": (KeepRule(1), KeepRule(270, is_chunked=True), KEEP_ALL),
}
"""Cache groups of one step, by what they are."""
EDGES = [Lengths(end, num_new) for end, num_new in ((14, 5), (15, 1), (16, 1), (31, 1), (32, 1), (299, 5), (300, 1))]
EDGES += [Lengths(330, 40), Lengths(0, 40), Lengths(320, 1, 320)]
"""One before, at and behind where a window, a chunk or a block ends; decoding, tiles of prompts, shared blocks."""


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("groups", long_but([*GROUPS][2:4], GROUPS))
def test_each_group_sees_what_it_keeps(groups, interpreter):
    """Before that all is NaN: what was given back, and what is held still."""
    rules = GROUPS[groups]
    for layer in range(len(rules)):
        made = {"rules": rules, "layer": layer, "seed": 20 + layer}
        made |= {"per_head": True, "trims": None} if layer else {"per_head": False, "trims": True}
        interpreter(interpreted.attend, SMALL, EDGES, "float32", BOUNDS["float32"], **made)


@pytest.mark.long
@pytest.mark.parametrize(("shape", "dtype"), [(shape, dtype) for shape in SHAPES for dtype in BOUNDS], ids=str)
def test_groups_of_any_shape(shape, dtype, interpreter):
    random = Random()
    rules = tuple(random.choice([KEEP_ALL, KeepRule(random.randint(1, 400), random.random() < 0.4)]) for _ in "123")
    made = {"rules": rules, "trims": random.choice([True, None]), "per_head": random.random() < 0.5}
    made |= {"num_splits": random.choice([None, 1, 3]), "softcap": random.choice([0.0, 5.0])}
    made |= {"sink_size": random.choice([0.0, 3.0]), "seed": random.randrange(2**32)}
    print(made)
    interpreter(interpreted.attend, shape, RAGGED, dtype, BOUNDS[dtype], **made)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_splits", [1, 8])
def test_windows_of_scores_that_are_capped_or_have_sinks(num_splits, interpreter):
    made = {"rules": (KeepRule(300), KEEP_ALL), "trims": True, "per_head": False, "seed": 4, "num_splits": num_splits}
    made |= {"softcap": 5.0, "sink_size": 3.0, "layer": 0}
    interpreter(interpreted.attend, SMALL, EDGES[-5:], "float32", BOUNDS["float32"], **made)


@pytest.mark.long
def test_a_window_costs_the_same_at_any_length(interpreter):
    """In tiles of entries: work begins where the first of them is seen."""
    for rule in (KeepRule(300), KeepRule(100, is_chunked=True)):
        for num_new in (1, 40):
            short, long = (
                interpreter(interpreted.tiles_taken, SMALL, Lengths(num_old, num_new), rule) for num_old in (900, 3300)
            )
            assert 0 < short == long


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_padding", [1, 5])
def test_rows_that_fill_up_a_batch_write_nothing(num_padding, interpreter):
    lengths = [Lengths(40, 1), Lengths(0, 1)]
    interpreter(interpreted.attend_padded, SHAPES[0], lengths, num_padding)
    for layer, rules in enumerate([(KeepRule(17), KEEP_ALL), (KEEP_ALL, KeepRule(24, is_chunked=True))]):
        interpreter(interpreted.attend_padded, SMALL, lengths, num_padding, rules=rules, layer=layer, trims=True)


BEYOND = [[7 + at * at % 230 for at in range(first, first + num)] for first, num in ((0, 80), (100, 21))]
BEYOND_SETTINGS = {
    "has_graphs": True,
    "is_overlapped": True,
    "block_size": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 40,
    "max_model_len": 92,
    "kv_cache_memory_bytes": 2**18,
}
WITH_WINDOWS = ("gemma3", "llama4", "gpt-oss", "gemma3n")
"""Windows in some layers, chunks, sinks, layers that read the K and V of others, a group of each kind."""


@pytest.mark.long
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.long] * bool(at)) for at, family in enumerate(WITH_WINDOWS)]
)
def test_an_engine_on_them_goes_beyond_windows(family, interpreter, tmp_path):
    """More than three windows of 24 tokens; in chunks, with blocks given back, as graphs, overlapped."""
    folder = save_tiny_model(family, tmp_path)
    outputs, num_replayed, num_ahead = interpreter(interpreted.complete, folder, BEYOND, 6, **BEYOND_SETTINGS)
    assert outputs == [References(folder, 6).of(prompt) for prompt in BEYOND]
    assert num_replayed > 3
    assert num_ahead > 3


@pytest.mark.long
@pytest.mark.parametrize("name", ["kivi2"])
def test_an_engine_on_codes_goes_beyond_windows(name, interpreter, tmp_path):
    folder = save_tiny_model("gemma3", tmp_path)
    how = BEYOND_SETTINGS | {"kv_cache_dtype": name, "block_size": 16}
    outputs, num_replayed, _ = interpreter(interpreted.complete, folder, BEYOND, 6, **how)
    assert num_replayed > 3
    how = {"dtype": "float32", "model_impl": "transformers", "attention_backend": "reference", "max_model_len": 92}
    alone = AloneOutputs(folder, 6, kv_cache_dtype=name, **how)
    assert outputs == [alone.of(prompt) for prompt in BEYOND]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "has_graphs", "is_overlapped"),
    [
        ("llama", True, True),
        pytest.param("gemma2", False, False, marks=pytest.mark.long),
        pytest.param("llama", False, True, marks=pytest.mark.long),
        pytest.param("llama", True, False, marks=pytest.mark.long),
    ],
)
def test_an_engine_on_them_says_what_generate_says(family, has_graphs, is_overlapped, interpreter, tmp_path):
    """Prompts in chunks, prefixes shared, requests preempted; in float32, whose noise is far below the gaps.

    Overlapped, most tokens are taken from where the last step left them, before the host knows them.
    """
    folder = save_tiny_model(family, tmp_path)
    prompts = [prompt[:60] for prompt in short_prompts(VOCAB_SIZE)[:5]]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 80, "kv_cache_memory_bytes": 2**17}
    how = {"has_graphs": has_graphs, "is_overlapped": is_overlapped} | settings
    outputs, num_replayed, num_ahead = interpreter(interpreted.complete, folder, prompts, 12, **how)
    assert outputs == [References(folder, 12).of(prompt) for prompt in prompts]
    assert (num_replayed > 0) == has_graphs
    assert (num_ahead > 10) == is_overlapped


CODEC_NAMES = sorted(set(CELL_CODECS) - {"float32", "fp8", "kivi2"})  # fp8 is fp8_e4m3; of kivi2, which seals, below
FEW = [Lengths(40, 1), Lengths(7, 5), Lengths(0, 1), Lengths(8, 2, 8)]
CODED_BOUNDS = BOUNDS | {"float32": 3e-5}
"""Of float32 as ``test_codecs.py`` has it: rotated heads are sums of many numbers."""


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("k8v4", KeepRule(17)),
        pytest.param("int8_per_token_head", KeepRule(300), marks=pytest.mark.long),
        pytest.param("k8v4", KeepRule(100, is_chunked=True), marks=pytest.mark.long),
        pytest.param("int4_plain", KeepRule(1), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_codes_of_a_window_are_read_and_written_as_the_reference_does(name, rule, interpreter):
    """What was taken off K follows from an entry's number, also where the first ones are gone."""
    for rules, layer in (((rule, KEEP_ALL), 0), ((rule, KEEP_ALL), 1)):
        made = {"rules": rules, "layer": layer, "trims": True, "per_head": False, "seed": 21}
        interpreter(attend_coded, name, SMALL, EDGES[2:7], "float32", CODED_BOUNDS["float32"], **made)


QUICK_NAMES = ("fp8_e4m3", "int8_per_token_head", "int4_per_token_head", "k8v4")


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(["int4_per_token_head"], CODEC_NAMES))
def test_codes_are_read_and_written_as_the_reference_does(name, interpreter):
    """Outputs are those of what the slab holds; and its bytes are equal, with poison in all that nobody wrote."""
    seed, bound = 11, CODED_BOUNDS["float32"]
    for shape, sequences, per_head in ((SHAPES[0], RAGGED, False), (Shape(8, 80, 2, 4), FEW, True)):
        made = {"per_head": per_head, "seed": seed}
        error = interpreter(attend_coded, name, shape, sequences, "float32", bound, **made)
        print(f"seed {seed}: {error:.2e}")


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_what_no_model_computes_is_encoded_as_the_reference_does(name, interpreter):
    interpreter(encode_extremes, name)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("num_splits", long_but([2], [1, 2]))
@pytest.mark.parametrize("name", [None, "int8_per_token_head", "k8v4"])
def test_what_is_no_number_is_not_hidden(name, num_splits, interpreter):
    interpreter(interpreted.attend_to_none, name, num_splits)


@pytest.mark.long
@pytest.mark.parametrize("dtype", long_but(["bfloat16"], ["float16", "bfloat16"]))
@pytest.mark.parametrize("name", long_but(QUICK_NAMES[1:2], QUICK_NAMES[:3]))
def test_codes_are_computed_with_in_the_models_dtype(name, dtype, interpreter):
    made = {"per_head": False, "seed": 12}
    bound = 4 * CODED_BOUNDS[dtype]  # queries are rounded once more where K is rotated, and centres make scores sharp
    interpreter(attend_coded, name, SHAPES[0], RAGGED, dtype, bound, **made)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for at, name in enumerate(CODEC_NAMES) for shape in SHAPES[at % 2 :: 2]],
    ids=str,
)
def test_codes_of_any_shape(name, shape, interpreter):
    bound = CODED_BOUNDS["float32"]
    made = {"per_head": False, "seed": Random().randrange(2**32)}
    interpreter(attend_coded, name, shape, RAGGED, "float32", bound, **made)


@pytest.mark.long
@pytest.mark.parametrize("name", ["k8v4", "int4_per_token_head"])
def test_each_range_of_positions_has_its_centre(name, interpreter):
    """What was taken off K is in scores again: in each split, and under a softcap, which sees all of it."""
    sequences = [Lengths(num_old, 3) for num_old in (1, 254, 257, 767)] + [Lengths(255, 1), Lengths(1100, 1)]
    for softcap, num_splits in ((0.0, 8), (5.0, 1)):
        made = {"per_head": False, "seed": 7, "softcap": softcap, "num_splits": num_splits}
        interpreter(attend_coded, name, SHAPES[0], sequences, "float32", CODED_BOUNDS["float32"], **made)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head"])
def test_rows_that_fill_up_a_batch_encode_nothing(name, interpreter):
    made = {"per_head": False, "seed": 3, "num_padding": 3}
    lengths = [Lengths(40, 1), Lengths(0, 1)]
    interpreter(attend_coded, name, SHAPES[0], lengths, "float32", CODED_BOUNDS["float32"], **made)


SEALED = [(300, 1, 0), (37, 5, 0), (0, 70, 0), (64, 1, 64), (0, 1, 0), (15, 1, 0), (16, 17, 16), (31, 20, 0)]
"""Of each sequence what it had, what it computes, and what it shares: rows in, to the end of, and over blocks."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=[] if (shape, dtype) == (SHAPES[0], "float32") else [pytest.mark.long])
        for shape in SHAPES
        for dtype in BOUNDS
    ],
    ids=str,
)
def test_sealed_blocks_are_read_and_written_as_the_reference_does(shape, dtype, interpreter):
    """Blocks and residuals are equal in bytes; outputs see a token's own block in 16 bit, and all before it sealed."""
    seed = 13
    bound = CODED_BOUNDS[dtype] * (1 if dtype == "float32" else 2)
    for num_splits, softcap in ((1, 0.0), (4, 5.0)):
        made = {"seed": seed, "num_splits": num_splits, "softcap": softcap}
        error = interpreter(attend_sealed, shape, SEALED, dtype, bound, **made)
        print(f"seed {seed}: {error:.2e}")


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sealed_blocks_of_any_lengths(shape, interpreter):
    random = Random()
    for _ in range(5):
        seed = random.randrange(2**32)
        sequences = [
            (random.choice([0, random.randrange(70), random.randrange(700)]), random.choice([1, 1, 9, 90]), 900)
            for _ in range(random.randint(1, 5))
        ]
        made = {"seed": seed, "num_splits": random.choice([None, 1, 3]), "layer": random.randrange(2)}
        interpreter(attend_sealed, shape, sequences, "float32", CODED_BOUNDS["float32"], **made)


@pytest.mark.long
@pytest.mark.parametrize(
    "rule",
    long_but([KeepRule(40)], [KeepRule(size, kind) for size in (1, 7, 40, 300) for kind in (False, True)]),
    ids=str,
)
def test_sealed_blocks_of_a_window_are_read_and_written_as_the_reference_does(rule, interpreter):
    """Also where the window begins in a token's own block; poison in what was given back."""
    sequences = [*SEALED, (511, 1, 0), (512, 40, 0), (330, 1, 320)]
    for trims, num_splits in ((True, 1), (False, 4)):
        made = {"seed": 13, "rule": rule, "trims": trims, "num_splits": num_splits}
        interpreter(attend_sealed, SMALL, sequences, "float32", CODED_BOUNDS["float32"], **made)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_padding", [1, 5])
def test_rows_that_fill_up_a_batch_seal_nothing(num_padding, interpreter):
    lengths = [(40, 1, 0), (0, 1, 0), (15, 1, 0)]
    for rule in (KEEP_ALL, KeepRule(17)):
        made = {"seed": 3, "num_padding": num_padding, "rule": rule, "trims": True}
        interpreter(attend_sealed, SMALL, lengths, "float32", CODED_BOUNDS["float32"], **made)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", long_but([80], [32, 80]))
def test_what_no_model_computes_is_sealed_as_the_reference_does(head_dim, interpreter):
    """Also where a tile is wider than a head: what fills it up is in no scale."""
    interpreter(seal_extremes, head_dim)


@pytest.mark.parametrize(
    ("name", "skipped", "has_graphs"),
    [
        pytest.param("int8_per_token_head", (), True, marks=pytest.mark.long),
        pytest.param("int4_per_token_head", (0,), False, marks=pytest.mark.long),
        pytest.param("kivi2", (), True, marks=pytest.mark.long),
    ],
)
def test_an_engine_on_codes_says_what_the_reference_says_alone(name, skipped, has_graphs, interpreter, tmp_path):
    """Each prompt alone, by the reference, is the slow twin; once with layers of two codecs in one block."""
    folder = save_tiny_model("llama", tmp_path)
    prompts = [prompt[:60] for prompt in short_prompts(VOCAB_SIZE)[:5]]
    codec = {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": skipped}
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 80, "kv_cache_memory_bytes": 2**16}
    how = {"has_graphs": has_graphs, "is_overlapped": has_graphs} | settings | codec
    outputs, num_replayed, num_ahead = interpreter(interpreted.complete, folder, prompts, 12, **how)
    assert (num_replayed > 0) == (num_ahead > 10) == has_graphs
    how = {"dtype": "float32", "model_impl": "transformers", "attention_backend": "reference"} | codec
    alone = AloneOutputs(folder, 12, **how)
    assert outputs == [alone.of(prompt) for prompt in prompts]


KERNELS = ("write_kv", "decode", "merge_splits", "prefill")
CODED_KERNELS = ("write_codes", "bring_queries", "decode", "prefill")
SEALING_KERNELS = ("write_sealed", "decode", "prefill")


@pytest.mark.parametrize("dtype", long_but(["bfloat16"], BOUNDS))
def test_every_configuration_compiles_for_an_h100_and_fits(dtype, compiler):
    for head_dim in (32, 64, 80, 128, 256):
        for name in KERNELS:
            shared_bytes, _ = compiler(name, dtype, head_dim, 4, (9, 0))
            assert shared_bytes <= MAX_SHARED_BYTES[9, 0], f"{name} of head_dim {head_dim}"


@pytest.mark.long
@pytest.mark.parametrize("capability", MAX_SHARED_BYTES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_configuration_compiles_for_other_cards_and_fits(capability, dtype, compiler):
    for head_dim in (32, 64, 80, 128, 256):
        for name in KERNELS:
            shared_bytes, _ = compiler(name, dtype, head_dim, 4, capability)
            assert shared_bytes <= MAX_SHARED_BYTES[capability], f"{name} of head_dim {head_dim}"


@pytest.mark.parametrize(
    ("flags", "group"),
    [
        ({"has_window": True}, 1),
        pytest.param({"has_window": True, "is_chunked": True}, 4, marks=pytest.mark.long),
        pytest.param({"has_softcap": True}, 3, marks=pytest.mark.long),
        ({"has_sinks": True}, 8),
        pytest.param({}, 32, marks=pytest.mark.long),
    ],
)
def test_windows_softcaps_sinks_and_groups_compile(flags, group, compiler):
    for name in ("decode", "prefill"):
        shared_bytes, _ = compiler(name, "bfloat16", 128, group, (9, 0), **flags)
        assert shared_bytes <= MAX_SHARED_BYTES[9, 0]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("write_kv", None),
        ("write_codes", "int8_per_token_head"),
        pytest.param("write_codes", "int4_per_token_head", marks=pytest.mark.long),
        ("write_sealed", "kivi2"),
        pytest.param("decode", "kivi2", marks=pytest.mark.long),
        pytest.param("prefill", "kivi2", marks=pytest.mark.long),
        pytest.param("prefill", "int8_per_token_head", marks=pytest.mark.long),
    ],
)
def test_what_writes_and_reads_codes_of_windows_compiles(name, codec, compiler):
    shared_bytes, _ = compiler(name, "bfloat16", 128, 4, (9, 0), has_window=True, codec=codec)
    assert shared_bytes <= MAX_SHARED_BYTES[9, 0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        ("bfloat16", 128),
        pytest.param("bfloat16", 64, marks=pytest.mark.long),
        pytest.param("float32", 128, marks=pytest.mark.long),
    ],
)
def test_no_register_is_spilled_on_an_h100(dtype, head_dim, compiler):
    for name, has_window in product(("decode", "prefill"), (False, True)):
        how = {"function": compiled_for_cards.spilled_bytes, "has_window": has_window}
        assert compiler(name, dtype, head_dim, 4, (9, 0), **how) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "name", long_but(["int8_per_token_head"], ["int8_per_token_head", "int4_per_token_head", "kivi2"])
)
def test_codes_compile_for_an_h100_spill_nothing_and_are_encoded_without_fused_additions(name, compiler):
    for head_dim in (64, 128):
        for kernel in SEALING_KERNELS if name == "kivi2" else CODED_KERNELS:
            shared_bytes, ptx = compiler(kernel, "bfloat16", head_dim, 4, (9, 0), codec=name)
            assert shared_bytes <= MAX_SHARED_BYTES[9, 0], f"{kernel} of head_dim {head_dim}"
            if kernel in {"write_codes", "write_sealed"}:
                assert "fma." not in ptx
                assert "div.full" not in ptx
                assert "div.rn.f32" in ptx
        for kernel in ("decode", "prefill"):
            how = {"function": compiled_for_cards.spilled_bytes, "codec": name}
            assert compiler(kernel, "bfloat16", head_dim, 4, (9, 0), **how) == 0


@pytest.mark.parametrize("codec", long_but([None], [None, "int4_per_token_head", "k8v4", "kivi2"]))
def test_what_a_layer_launches_compiles(codec, compiler):
    """Arguments have the names of the kernels' parameters, and are such as Triton compiles for."""
    kernels = KERNELS if codec is None else SEALING_KERNELS if codec == "kivi2" else CODED_KERNELS
    shared_bytes = compiler(codec, function=compiled_for_cards.compile_launched)
    assert shared_bytes.keys() == {*kernels, "merge_splits"}
    assert max(shared_bytes.values()) <= MAX_SHARED_BYTES[9, 0]


@pytest.mark.parametrize("codec", long_but([None], [None, "k8v4", "kivi2"]))
def test_what_a_layer_of_a_window_launches_compiles(codec, compiler):
    """Of a step of two groups; the window, of two tiles, is not split."""
    kernels = KERNELS if codec is None else SEALING_KERNELS if codec == "kivi2" else CODED_KERNELS
    rules = KeepRule(100), KEEP_ALL
    shared_bytes = compiler(codec, rules, function=compiled_for_cards.compile_launched)
    assert shared_bytes.keys() == {*kernels} - {"merge_splits"}


@pytest.mark.long
def test_blocks_of_any_size_are_sealed_in_registers(compiler):
    """A program holds all of a block: with too many numbers a thread it spills, and takes minutes to compile."""
    how = {"function": compiled_for_cards.spilled_bytes, "codec": "kivi2"}
    for block_size, head_dim in ((1, 32), (4, 80), (32, 128), (64, 128), (64, 256)):
        for has_recent in (False, True):
            how |= {"block_size": block_size, "has_recent": has_recent}
            assert compiler("write_sealed", "bfloat16", head_dim, 4, (9, 0), **how) == 0, how
    how |= {"block_size": 256, "function": compiled_for_cards.compile_kernel}
    assert compiler("write_sealed", "bfloat16", 128, 4, (8, 6), **how)[0] <= MAX_SHARED_BYTES[8, 6]


def test_the_measured_steps_kernels_are_those_of_all_others():
    """That step has one residual, and few blocks: nothing is compiled for these numbers."""
    from pagefold.runner.attention.cuda.kernels import decode, prefill
    from pagefold.runner.attention.cuda.seal import write_sealed

    for kernel in (write_sealed, decode, prefill):
        assert {one.name for one in kernel.params if one.do_not_specialize} >= {"num_residuals", "layer"}


SIZES = [(dtype, head_dim) for dtype in ("bfloat16", "float32") for head_dim in (32, 64, 80, 128, 256)]
WIDEST = [("float32", 256)]


def _codecs_on_cards():
    """Each codec with a card in turn, of the widest heads in the widest dtype; and of the other sizes an eighth."""
    cards = [*MAX_SHARED_BYTES]
    pairs = [(name, cards[at % len(cards)]) for at, name in enumerate([*CODEC_NAMES, "kivi2"])]
    others = [size for size in SIZES if size not in WIDEST]
    return [
        pytest.param(*pair, WIDEST + others[number % 8 :: 8], id=f"{pair[0]}-{pair[1]}")
        for number, pair in enumerate(pairs)
    ]


@pytest.mark.long
@pytest.mark.parametrize(("name", "capability", "sizes"), _codecs_on_cards())
def test_codes_compile_for_cards_and_fit(name, capability, sizes, compiler):
    """Of numbers of two and of four bytes; float16 is as wide as bfloat16, and compiles once a pair."""
    for dtype, head_dim in sizes:
        for kernel in SEALING_KERNELS if name == "kivi2" else CODED_KERNELS:
            shared_bytes, _ = compiler(kernel, dtype, head_dim, 4, capability, codec=name)
            assert shared_bytes <= MAX_SHARED_BYTES[capability], f"{kernel} of {dtype} and head_dim {head_dim}"


def test_prefill_on_an_h100_multiplies_by_wgmma_and_copies_ahead(compiler):
    _, ptx = compiler("prefill", "bfloat16", 128, 4, (9, 0))
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx
