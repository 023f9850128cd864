"""Prefix files: what is in them, what is found wrong in them, and what becomes of them in a folder."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cases import LIMIT, TOKENS, exported, folder_of, layout_of, payload_of, quiet
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.errors import ConfigError, InvalidRequestError, PagefoldError, PrefixMismatchError, TierError
from pagefold.kv.names import names_behind
from pagefold.kv.transfers import StoreError
from pagefold.store.disk import DiskStore
from pagefold.store.disk_folder import folder_bytes
from pagefold.store.export import export_frames, import_frames
from pagefold.store.export_head import EXPORT_HEADER_BYTES, export_head
from pagefold.store.frame import checksum_of
from pagefold.store.prefix_blocks import PrefixBlocks
from pagefold.store.prefix_conversion import PAIRS, PANELS, conversion_of
from pagefold.store.prefix_file import is_prefix_file, open_prefix
from pagefold.store.prefix_folder import WantedPrefix, export_prefix, import_prefix
from pagefold.store.prefix_intake import PrefixIntake
from pagefold.store.prefix_layout import PrefixLayout
from pagefold.store.protocol import Get

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = layout_of()


def read(file, target=None, **whose):
    """Return what a file has for a layout: names, tokens of each, payloads; all of it was checked."""
    with open_prefix(file) as prefix:
        prefix.check(quiet)
        blocks = PrefixBlocks(prefix, target, **whose)
        puts = [put for batch in blocks.backwards(3) for put in reversed(batch)][::-1]
        assert [put.name for put in puts] == blocks.names
        return puts


def imported(file, folder, target=None, limit=LIMIT, **whose):
    with open_prefix(file) as prefix:
        prefix.check(quiet)
        return import_prefix(PrefixBlocks(prefix, target, **whose), folder, limit, quiet)


def held(folder, layout, tokens=TOKENS, limit=LIMIT, **whose):
    """Return the payloads that a folder has of a prompt's first blocks, each checked by the store."""
    root = layout.root(**whose)
    names = names_behind(root, root, array("i", tokens).tobytes(), layout.frames.key_bytes)
    store = DiskStore(folder, limit, layout.frames)
    try:
        names = names[: store.count(names)]
        raws = [np.zeros(layout.block_bytes + 4096, np.uint8) for _ in names]
        views = [raw[-raw.ctypes.data % 4096 :][: layout.block_bytes] for raw in raws]
        found = store.get([Get(name, memoryview(view)) for name, view in zip(names, views, strict=True)])
        assert found == [checksum_of(view) for view in views]
        return [bytes(view) for view in views]
    finally:
        store.close()


def payloads_of(layout, tokens=TOKENS, **whose):
    root = layout.root(**whose)
    names = names_behind(root, root, array("i", tokens).tobytes(), layout.frames.key_bytes)
    return [payload_of(layout, name.key, name.parent) for name in names]


def test_a_prefix_goes_through_a_file_into_another_folder(tmp_path):
    file = exported(tmp_path, LAYOUT)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size == EXPORT_HEADER_BYTES + 4 * LAYOUT.frames.frame_bytes
    with open_prefix(file) as prefix:
        prefix.check(quiet)
        about = prefix.about
        assert prefix.packed == array("i", TOKENS[:64]).tobytes()
    assert (about.num_tokens, about.num_prompt_tokens, about.num_blocks) == (64, 70, 4)
    assert about.layout == LAYOUT
    assert about.is_anybodys
    assert imported(file, tmp_path / "there") == 4
    assert held(tmp_path / "there", LAYOUT) == payloads_of(LAYOUT)
    assert imported(file, tmp_path / "there") == 4, "again changes nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported from", "prefix.kv", "there"]


def test_it_is_an_exported_cache_like_any_other(tmp_path):
    """So who knows nothing of prefixes can import it, and a whole cache says that it is none."""
    file, whole = exported(tmp_path, LAYOUT), tmp_path / "whole"
    assert import_frames(file, tmp_path / "there", LIMIT, quiet).num_kept == 4
    assert held(tmp_path / "there", LAYOUT) == payloads_of(LAYOUT)
    export_frames(tmp_path / "there", whole, quiet)
    assert is_prefix_file(file)
    assert not is_prefix_file(whole)
    with pytest.raises(ConfigError, match="is a whole exported cache"), open_prefix(whole):
        pass


def test_what_a_folder_lacks_is_said(tmp_path):
    folder, file = folder_of(tmp_path / "cache", LAYOUT, num=3), tmp_path / "file"
    wanted = WantedPrefix(LAYOUT, LAYOUT.root(), TOKENS)
    with pytest.raises(ConfigError, match=r"has 48 of the prompt's 64 tokens.*--partial"):
        export_prefix(folder, file, wanted, quiet)
    assert not file.exists()
    assert export_prefix(folder, file, wanted, quiet, partial=True).num_tokens == 48
    assert len(read(file)) == 3
    for other in (
        wanted._replace(token_ids=TOKENS[1:]),
        wanted._replace(namespace=LAYOUT.root(tenant="acme")),
        wanted._replace(layout=layout_of(32), namespace=layout_of(32).root()),
    ):
        with pytest.raises(ConfigError, match="has 0 of the prompt's 64 tokens"):
            export_prefix(folder, file, other, quiet, partial=True)
    with pytest.raises(ConfigError, match=r"it has no blocks of tiny in this layout .*panels-v1/32/fused"):
        export_prefix(folder, file, wanted._replace(layout=layout_of(32), namespace=layout_of(32).root()), quiet)
    with pytest.raises(ConfigError, match="do not fill a block of 16"):
        export_prefix(folder, file, wanted._replace(token_ids=TOKENS[:15]), quiet)
    assert len(read(file)) == 3, "the file that was there stays"


def test_a_damaged_block_is_where_a_prefix_ends(tmp_path):
    folder = folder_of(tmp_path / "cache", LAYOUT)
    segment = next(folder.glob("*/*.frames"))
    raw = bytearray(segment.read_bytes())
    place = -(-LAYOUT.frames.frame_bytes // 4096) * 4096
    raw[2 * place + LAYOUT.frames.header_bytes + 5] ^= 1
    segment.write_bytes(raw)
    wanted = WantedPrefix(LAYOUT, LAYOUT.root(), TOKENS)
    with pytest.raises(ConfigError, match="has 32 of the prompt's 64 tokens: block 2 is damaged"):
        export_prefix(folder, tmp_path / "file", wanted, quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_whose_it_is_stays_so(tmp_path):
    file = exported(tmp_path, LAYOUT, tenant="acme", cache_salt="pepper")
    with open_prefix(file) as prefix:
        assert not prefix.about.is_anybodys
    raw = file.read_bytes()
    assert b"acme" not in raw
    assert b"pepper" not in raw
    imported(file, tmp_path / "there")
    assert held(tmp_path / "there", LAYOUT) == []
    assert held(tmp_path / "there", LAYOUT, tenant="acme") == []
    assert len(held(tmp_path / "there", LAYOUT, tenant="acme", cache_salt="pepper")) == 4
    for other in ({"tenant": "acme"}, {"tenant": "beta", "cache_salt": "pepper"}, {"tenant": ""}):
        with pytest.raises(PrefixMismatchError, match="another tenant or another salt"):
            imported(file, tmp_path / "nowhere", **other)
    with pytest.raises(PrefixMismatchError, match="it must be known whose"):
        imported(file, tmp_path / "nowhere", layout_of(32))
    assert not (tmp_path / "nowhere").exists()
    theirs = {"tenant": "acme", "cache_salt": "pepper"}
    assert imported(file, tmp_path / "larger", layout_of(32), **theirs) == 2
    assert len(held(tmp_path / "larger", layout_of(32), **theirs)) == 2


def test_what_is_anybodys_may_be_given_to_a_tenant(tmp_path):
    file = exported(tmp_path, LAYOUT)
    assert imported(file, tmp_path / "there", tenant="acme") == 4
    assert held(tmp_path / "there", LAYOUT) == []
    assert held(tmp_path / "there", LAYOUT, tenant="acme") == payloads_of(LAYOUT)


# Other layouts.


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (layout_of(model="77" * 32, label="other"), r"its model is 3f3f.*\(tiny\), and here 7777.*\(other\)"),
        (layout_of(dtype="torch.bfloat16"), "its dtype is torch.float32, and here torch.bfloat16"),
        (
            layout_of(layout="codec-panels-v3/int8_per_token_head//ab/16/fused: float32 by FMA"),
            "its codec and arrangement is panels-v1, and here codec-panels-v3/int8_per_token_head",
        ),
        (
            layout_of(layout="panels-v1/16/fused: float32 by AMX"),
            "its decoder is fused: float32 by FMA, and here fused: float32 by AMX",
        ),
        (layout_of(block_bytes=12), "its blocks have 3,072 bytes and heads of 8, and here they have 12 and 8"),
    ],
)
def test_what_differs_is_named_and_nothing_is_written(tmp_path, target, said):
    file = exported(tmp_path, LAYOUT)
    with pytest.raises(PrefixMismatchError, match=said):
        imported(file, tmp_path / "there", target)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("arrangement", "decoder", "dtype", "why"),
    [
        ("panels-v1", "transformers, rows in 16 lanes", "torch.float32", "it may change what is computed"),
        ("panels-v1", "transformers: FMA; rows in 16 lanes", "torch.float32", "it may change what is computed"),
        ("rows-v1", "transformers, rows in 16 lanes", "torch.float16", "as they were computed on a CPU"),
        ("codec-panels-v3/int8//ab", "fused: FMA", "torch.float32", "as they were computed on a CPU"),
        ("panels-v1", "fused: FMA", "torch.float64", "not known for torch.float64"),
    ],
)
def test_sizes_that_cannot_be_changed_without_loss_are_refused(arrangement, decoder, dtype, why):
    source, target = (layout_of(size, layout=f"{arrangement}/{size}/{decoder}", dtype=dtype) for size in (16, 32))
    with pytest.raises(PrefixMismatchError, match=rf"blocks have 16 tokens, and here they have 32.*{why}"):
        conversion_of(source, target, "file")


@pytest.mark.parametrize("arrangement", [PANELS, PAIRS])
@pytest.mark.parametrize(("size", "other"), [(16, 4), (16, 64), (8, 16), (32, 16)])
def test_blocks_of_another_size_hold_the_same_numbers(arrangement, size, other):
    """As the slab reads them, which is who knows where they lie."""
    import torch

    from pagefold.kv import KVGeometry
    from pagefold.runner.slab import Slab

    dtype = {PANELS: torch.float32, PAIRS: torch.bfloat16}[arrangement]
    tokens = torch.arange(64)

    def slab_of(block_size):
        geometry = KVGeometry(1, 3, 8, dtype.itemsize, block_size)
        return Slab.allocate(geometry, 64 // block_size, dtype, layout=arrangement)

    def layout(block_size):
        geometry = KVGeometry(1, 3, 8, dtype.itemsize, block_size)
        return PrefixLayout(
            "", "", f"{arrangement}/{block_size}/fused: x", str(dtype), block_size, geometry.bytes_per_block, 8
        )

    written, wanted = slab_of(size), slab_of(other)
    generator = torch.Generator().manual_seed(0)
    for cell in range(3):
        kv = tuple(torch.randn(64, 8, generator=generator).to(dtype) for _ in range(2))
        written.write(cell, tokens // size, tokens, kv)
        wanted.write(cell, tokens // other, tokens, kv)
    blocks = [bytes(block) for block in written.as_bytes()]
    conversion = conversion_of(layout(size), layout(other), "file")
    made = [
        conversion.part(conversion.join(blocks[at : at + conversion.num_joined]), part)
        for at in range(0, len(blocks), conversion.num_joined)
        for part in range(conversion.num_parts)
    ]
    assert made == [bytes(block) for block in wanted.as_bytes()]


@pytest.mark.parametrize("size", [4, 8, 32, 64])
def test_a_file_is_put_in_blocks_of_another_size_and_back(tmp_path, size):
    file, target = exported(tmp_path, LAYOUT), layout_of(size)
    num_tokens = 64 // size * size
    assert imported(file, tmp_path / "there", target) == num_tokens // size
    again, wanted = tmp_path / "again", WantedPrefix(target, target.root(), TOKENS[:num_tokens])
    export_prefix(tmp_path / "there", again, wanted, quiet)
    assert imported(again, tmp_path / "back", LAYOUT) == num_tokens // 16
    assert held(tmp_path / "back", LAYOUT) == payloads_of(LAYOUT)[: num_tokens // 16]


def test_a_prefix_that_fills_no_block_there_is_refused(tmp_path):
    file = exported(tmp_path, LAYOUT)
    with pytest.raises(PrefixMismatchError, match="holds 64 tokens, which do not fill a block of 128"):
        imported(file, tmp_path / "there", layout_of(128))


# A folder that has little room, or whose import is cut short.


def test_the_head_of_a_path_stays_where_not_all_fits(tmp_path):
    tokens = list(range(16 * 1000))
    file = exported(tmp_path, LAYOUT, tokens)
    limit = 5 * 2**20
    num_kept = imported(file, tmp_path / "there", limit=limit)
    assert 8 <= num_kept < 1000
    assert folder_bytes(tmp_path / "there") <= limit
    assert held(tmp_path / "there", LAYOUT, tokens, limit) == payloads_of(LAYOUT, tokens)[:num_kept]


def test_an_import_that_is_killed_leaves_a_folder_that_is_right(tmp_path):
    tokens = list(range(16 * 200))
    file, there = exported(tmp_path, LAYOUT, tokens), tmp_path / "there"
    script = """
import os, signal, sys
from pathlib import Path
from pagefold.store.prefix_blocks import PrefixBlocks
from pagefold.store.prefix_file import open_prefix
from pagefold.store.prefix_folder import import_prefix
def kill(done, total):
    if done >= total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
with open_prefix(Path(sys.argv[1])) as prefix:
    prefix.check(lambda *_: None)
    import_prefix(PrefixBlocks(prefix), Path(sys.argv[2]), int(sys.argv[3]), kill)
"""
    command = [sys.executable, "-c", script, str(file), str(there), str(LIMIT)]
    done = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -signal.SIGKILL
    assert folder_bytes(there) <= LIMIT
    assert held(there, LAYOUT, tokens) == [], "the last blocks are there, which nobody finds without the first"
    assert imported(file, there) == 200
    assert held(there, LAYOUT, tokens) == payloads_of(LAYOUT, tokens)


def test_a_folder_that_somebody_uses_is_refused(tmp_path):
    file = exported(tmp_path, LAYOUT)
    store = DiskStore(tmp_path / "there", LIMIT, LAYOUT.frames)
    try:
        with pytest.raises(ConfigError, match="is in use by process"):
            imported(file, tmp_path / "there")
    finally:
        store.close()


def test_blocks_of_a_known_layout_with_another_size_drop_nothing(tmp_path):
    """A layout's digest says nothing of bytes, and a store drops frames of its own layout that have other sizes."""
    folder = folder_of(tmp_path / "cache", LAYOUT)
    liar = exported(tmp_path, layout_of(block_bytes=64), TOKENS[:32])
    with pytest.raises(PrefixMismatchError, match="3,072 bytes, and the file's have 64"):
        imported(liar, folder)
    assert len(held(folder, LAYOUT)) == 4


# Files that somebody made up, or broke.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return exported(folder, LAYOUT).read_bytes()


def refused(raw: bytes, file: Path) -> str:
    """Return why a file is not taken, which is said in one error before anything is written."""
    file.write_bytes(raw)
    with pytest.raises(PagefoldError) as caught, open_prefix(file) as prefix:
        prefix.check(quiet)
    said = str(caught.value)
    assert str(file) in said
    assert said.isprintable()
    return said


@settings(max_examples=150)
@given(data=st.data())
def test_no_flipped_bit_is_taken(whole, tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "flipped.kv"
    raw = bytearray(whole)
    at = data.draw(
        st.one_of(st.integers(0, 400), st.integers(0, EXPORT_HEADER_BYTES), st.integers(0, len(raw) - 1)), "byte"
    )
    raw[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    refused(bytes(raw), file)


@settings(max_examples=60)
@given(data=st.data())
def test_no_file_that_was_cut_or_mended_is_taken(whole, tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "cut.kv"
    place = st.integers(0, len(whole))
    first, second = sorted((data.draw(place, "from"), data.draw(place, "to")))
    made = data.draw(
        st.sampled_from(
            [whole[:first], whole[:first] + whole[second:], whole + whole[first:second], whole[first:], whole * 2]
        )
    )
    if made != whole:
        refused(made, file)


def told_in(raw: bytes) -> dict:
    size = int.from_bytes(raw[56:60], "little")
    return json.loads(raw[60 : 60 + size])


def lying(raw: bytes, **fields: object) -> bytes:
    """Return the file with other things in its header, all of whose checksums are right."""
    told = told_in(raw)
    told["layout"] |= fields.pop("layout", {})
    told |= fields
    return export_head(4, len(raw), json.dumps(told).encode()) + raw[EXPORT_HEADER_BYTES:]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_tokens": 48}, "is not whole"),
        ({"num_tokens": 2**47, "num_prompt_tokens": 2**47}, "is not whole"),
        ({"num_tokens": 2**63, "num_prompt_tokens": 2**63}, "its tokens are"),
        ({"num_tokens": 63}, "do not fill blocks"),
        ({"num_tokens": True}, "its tokens are"),
        ({"num_tokens": -64}, "its tokens are"),
        ({"num_prompt_tokens": 10}, "its tokens are"),
        ({"path": "00" * 32}, "others than its header says"),
        ({"frames": "00" * 32}, "others than its header says"),
        ({"frames": "00"}, "a digest is none"),
        ({"frames": 7}, "a digest is none"),
        ({"frames": "x" * 64}, "does not say what prefix"),
        ({"namespace": "00" * 32}, "block 0 is not one"),
        ({"more": 1}, "it has other fields"),
        ({"layout": {"model": "00" * 32}}, "block 0 is other layout"),
        ({"layout": {"dtype": "torch.bfloat16"}}, "block 0 is other layout"),
        ({"layout": {"block_size": 32}}, "is not whole|block 0 is other layout"),
        ({"layout": {"block_size": 0}}, "its block_size is 0"),
        ({"layout": {"block_bytes": 2**31}}, "which no model has"),
        ({"layout": {"block_bytes": 2**40}}, "its block_bytes is"),
        ({"layout": {"block_bytes": 1.5}}, "its block_bytes is"),
        ({"layout": {"label": "\x1b[2J"}}, "its label is"),
        ({"layout": {"label": "\ud800"}}, "its label is"),
        ({"layout": {"label": None}}, "its label is"),
        ({"layout": {"more": "x"}}, "it is no layout"),
    ],
)
def test_a_header_that_lies_is_not_believed(whole, tmp_path, fields, said):
    assert re.search(said, refused(lying(whole, **fields), tmp_path / "lying.kv"))


@pytest.mark.parametrize(
    "told", [b"null", b"[]", b"{}", b"\xff", b"[" * 2000, b'{"layout":' * 300, b"1" * 3000, b'{"layout":NaN}']
)
def test_a_header_with_other_json_is_refused(whole, tmp_path, told):
    raw = export_head(4, len(whole), told) + whole[EXPORT_HEADER_BYTES:]
    assert "does not say what prefix it holds" in refused(raw, tmp_path / "odd.kv")


def test_blocks_in_another_order_are_refused(whole, tmp_path):
    size = LAYOUT.frames.frame_bytes
    first, second, *_ = (whole[at : at + size] for at in range(EXPORT_HEADER_BYTES, len(whole), size))
    swapped = whole[:EXPORT_HEADER_BYTES] + second + first + whole[EXPORT_HEADER_BYTES + 2 * size :]
    assert "block 0 is not one that comes behind" in refused(swapped, tmp_path / "swapped.kv")
    doubled = whole[:EXPORT_HEADER_BYTES] + first + first + whole[EXPORT_HEADER_BYTES + 2 * size :]
    assert "block 1 is not one that comes behind" in refused(doubled, tmp_path / "doubled.kv")


def test_a_file_that_changes_while_it_is_read_is_refused(whole, tmp_path):
    file = tmp_path / "changing.kv"
    file.write_bytes(whole)
    with open_prefix(file) as prefix:
        prefix.check(quiet)
        other = exported(tmp_path, LAYOUT._replace(label="other"), TOKENS[::-1]).read_bytes()
        file.write_bytes(other)
        with pytest.raises(ConfigError, match=r"has changed since it was read|is damaged"):
            import_prefix(PrefixBlocks(prefix), tmp_path / "there", LIMIT, quiet)
    assert held(tmp_path / "there", LAYOUT) == []


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file, said in ((tmp_path / "pipe", "it is no file"), (tmp_path, "it is no file"), (tmp_path / "x", "Cannot")):
        assert not is_prefix_file(file)
        with pytest.raises(ConfigError, match=said), open_prefix(file):
            pass


def test_a_layout_that_no_header_has_room_for_is_refused(tmp_path):
    layout = layout_of(layout="panels-v1/16/fused: " + "x" * 5000)
    folder = folder_of(tmp_path / "cache", layout)
    with pytest.raises(ConfigError, match="What is to be told of the model takes"):
        export_prefix(folder, tmp_path / "file", WantedPrefix(layout, layout.root(), TOKENS), quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


class KeepingStore:
    """Remembers what is put into it, or cannot be written."""

    tier = "disk"

    def __init__(self, why: str = "") -> None:
        self.kept: dict[bytes, bytes] = {}
        self._why = why

    def put(self, puts):
        if self._why:
            raise StoreError(self._why)
        self.kept |= {put.name.digest: bytes(put.payload) for put in puts}
        return len(puts)


@settings(max_examples=100)
@given(data=st.data())
def test_an_engine_takes_whole_right_frames_and_nothing_else(whole, data):
    store, frames = KeepingStore(), bytearray(whole[EXPORT_HEADER_BYTES:])
    intake = PrefixIntake(LAYOUT, [store])
    size = LAYOUT.frames.frame_bytes
    at = data.draw(st.one_of(st.integers(0, 300), st.integers(0, len(frames) - 1)), "byte")
    if at % size < 176 + 64 + 16 or at % size >= LAYOUT.frames.header_bytes:  # not the zeros behind a header
        frames[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    else:
        del frames[at]
    with pytest.raises(InvalidRequestError, match=r"is not right|a frame of a block has"):
        intake.take(bytes(frames))
    assert not store.kept


def test_an_engine_s_tiers_get_all_blocks(whole):
    stores = KeepingStore(), KeepingStore()
    stores[1].tier = "remote"
    taken = PrefixIntake(LAYOUT, stores).take(whole[EXPORT_HEADER_BYTES:])
    assert (taken.num_blocks, taken.num_kept) == (4, {"disk": 4, "remote": 4})
    assert [*stores[0].kept.values()] == [*stores[1].kept.values()] == payloads_of(LAYOUT)
    with pytest.raises(InvalidRequestError, match="The body has 0 bytes"):
        PrefixIntake(LAYOUT, stores).take(b"")
    with pytest.raises(InvalidRequestError, match=r"Block 0 .*other layout"):
        PrefixIntake(LAYOUT._replace(model="77" * 32), stores).take(whole[EXPORT_HEADER_BYTES:])
    with pytest.raises(TierError, match="The disk tier cannot be written: it is closed"):
        PrefixIntake(LAYOUT, [KeepingStore("it is closed")]).take(whole[EXPORT_HEADER_BYTES:])


def test_a_name_that_is_markup_is_shown_as_it_is(tmp_path):
    """Labels come with files, into folders, and are shown in tables."""
    layout = LAYOUT._replace(label="[/b][link=http://evil]")
    imported(exported(tmp_path, layout), tmp_path / "there")
    for command in (("ls", tmp_path / "there"), ("stats", tmp_path / "there"), ("show", tmp_path / "prefix.kv")):
        result = CliRunner().invoke(app, ["cache", *map(str, command)], env={"COLUMNS": "200"})
        assert result.exit_code == 0
        assert layout.label in result.stdout


def test_arrangements_are_those_of_the_runner():
    from pagefold.runner.slab import LAYOUT as OF_RUNNER
    from pagefold.runner.slab import PAIRS_LAYOUT

    assert (PANELS, PAIRS) == (OF_RUNNER, PAIRS_LAYOUT)
