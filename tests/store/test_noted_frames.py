"""Frames with a note: it comes back with the block, or the block is a miss; those without one are as they were."""

from __future__ import annotations

import struct
from random import Random

import pytest
from disk_blocks import frame_format, least_limit, path_of
from real_servers import NO_REDIS, PATIENCE_S, REDIS_SERVER, redis_server

from pagefold.kv import CODECS, BlockName, ChunkNotes, KVGeometry, Namespace
from pagefold.kv.transfers import MissCause
from pagefold.masks.packed import PACKED
from pagefold.runner.block_form import block_form
from pagefold.store.disk import DiskStore
from pagefold.store.export import export_frames, import_frames
from pagefold.store.frame import FrameFormat, checksum_of, sizes_of
from pagefold.store.protocol import Get
from pagefold.store.remote import open_remote

FRAMES = frame_format()
NOTES = [b"", b"a note", bytes(range(256)) * 4, b"\0" * FRAMES.most_note_bytes]


def _noted(num=4):
    return [block.put._replace(note=note) for block, note in zip(path_of(num), NOTES, strict=False)]


def _get(put):
    return Get(put.name, memoryview(bytearray(len(put.payload))), bytearray())


def _came_back(store, puts):
    gets = [_get(put) for put in puts]
    assert store.get(gets) == [put.checksum for put in puts]
    assert [get.into for get in gets] == [put.payload for put in puts]
    return [bytes(get.note) for get in gets]


@pytest.mark.parametrize("note", NOTES)
def test_a_header_says_its_note_and_one_without_is_as_before(note):
    (put,) = _noted(1)
    header = FRAMES.header(put.name, put.checksum, note=note)
    assert len(header) == FRAMES.header_bytes == 4096
    assert FRAMES.note_of(header) == note
    assert FRAMES.check(header, put.payload, put.name) == put.checksum
    assert struct.unpack_from("<I", header, 8) == (3 if note else 1,)
    assert (header == FRAMES.header(put.name, put.checksum)) == (not note)
    assert sizes_of(header).sizes == FRAMES.sizes


def test_a_note_that_is_too_long_is_nobodys():
    (put,) = _noted(1)
    with pytest.raises(AssertionError, match="no header has room"):
        FRAMES.header(put.name, put.checksum, note=bytes(FRAMES.most_note_bytes + 1))


def test_whatever_turns_in_a_header_with_a_note_is_seen():
    (put,) = _noted(1)
    header, random = FRAMES.header(put.name, put.checksum, note=b"a note of some bytes"), Random(0)
    end = 176 + FRAMES.key_bytes + 2 + 20 + 16
    for at in range(end):
        turned = bytearray(header)
        turned[at] ^= 1 << random.randrange(8)
        assert isinstance(FRAMES.check(bytes(turned), put.payload, put.name), MissCause)
        sizes_of(bytes(turned))  # of whatever somebody sends
    for length in range(end):
        assert isinstance(FRAMES.check(header[:length], put.payload, put.name), MissCause)
        sizes_of(header[:length])


def test_a_packed_payload_has_its_note_too():
    geometry = KVGeometry(4, 2, 32, 4, 16, CODECS["int8_per_token_head"], keeps=(PACKED,) * 4)
    plain = FrameFormat.of(Namespace(model="m", layout="l", dtype="d"), geometry)
    packs = plain.for_transport(block_form(geometry), 0)
    block = bytearray(packs.trial_block())
    assert 0 < geometry.mark_begin < len(block)
    block[geometry.mark_begin :] = Random(0).randbytes(len(block) - geometry.mark_begin)  # marks are no codes
    payload = memoryview(block)
    name = BlockName(bytes(32), bytes(32), bytes(32), bytes(plain.key_bytes))
    header, sent = packs.encode(name, payload, checksum_of(payload), b"a note")
    assert len(sent) < len(payload)
    get = Get(name, memoryview(bytearray(plain.block_bytes)), bytearray())
    assert packs.take(header, sent, get) == checksum_of(payload)
    assert (get.into, get.note) == (payload, b"a note")
    assert plain.read_header(header) is MissCause.OTHER_VERSION


def test_a_disk_keeps_notes_across_restarts_exports_and_imports(tmp_path):
    puts, limit = _noted(), least_limit(20)
    store = DiskStore(tmp_path / "a", limit, FRAMES)
    assert store.put(puts) == len(puts)
    assert _came_back(store, puts) == NOTES
    assert store.get([Get(puts[1].name, memoryview(bytearray(4096)))]) == [puts[1].checksum]  # who wants none
    store.close()
    export_frames(tmp_path / "a", tmp_path / "file", lambda *_: None)
    assert import_frames(tmp_path / "file", tmp_path / "b", limit, lambda *_: None).num_kept == len(puts)
    for folder in "ab":
        store = DiskStore(tmp_path / folder, limit, FRAMES)
        assert _came_back(store, puts) == NOTES
        store.close()


@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_a_pool_keeps_notes(tmp_path):
    puts = _noted()
    with redis_server(tmp_path) as server:
        store = open_remote(f"redis://127.0.0.1:{server.port}", FRAMES, timeout_s=PATIENCE_S)
        assert store.put(puts) == len(puts)
        assert _came_back(store, puts) == NOTES
        store.close()


class _Counts:
    """A number of entries, two a block, up to seven."""

    def encode(self, counts):
        return bytes([counts])

    def decode(self, raw):
        return raw[0] if len(raw) == 1 and raw[0] < 8 else None

    def num_blocks(self, counts):
        return -(-counts // 2)


def test_a_note_is_read_as_it_was_written_or_not_at_all():
    notes, name = ChunkNotes(2, 4, _Counts()), BlockName(bytes(32), bytes(32), bytes(32), b"", 3)
    assert [notes.is_packed(name._replace(group=group)) for group in range(4)] == [False, False, True, True]
    written = notes.write(70_000, 3, 5)
    found = notes.read(name, written)
    assert (found.number, found.num_blocks, found.counts, found.note) == (70_000, 3, 5, written)
    assert notes.read(name._replace(group=5), written) is None, "a chunk of three blocks has no fourth"
    for num_blocks, counts in ((2, 5), (4, 5), (3, 8), (0, 0), (5, 9), (65_535, 5)):
        assert notes.read(name._replace(group=2), notes.write(0, num_blocks, counts)) is None
    for length in range(len(written)):
        assert notes.read(name, written[:length]) is None
    assert notes.read(name, written + b"\0") is None
