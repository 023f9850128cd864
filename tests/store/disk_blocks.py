"""Blocks for tests of stores: bytes that follow from a number, named as the core names them."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from pagefold.kv.names import path_digest, root_digest
from pagefold.store.disk_folder import folder_bytes
from pagefold.store.frame import BlockName, FrameFormat, checksum_of
from pagefold.store.protocol import Get, Put

KEY_BYTES = 16


class Block(NamedTuple):
    name: BlockName
    payload: np.ndarray
    checksum: bytes

    @property
    def put(self) -> Put:
        return Put(self.name, memoryview(self.payload), self.checksum)


def frame_format(block_bytes=4096, model="model"):
    return FrameFormat(hashlib.sha256(f"{model} {block_bytes}".encode()).digest(), block_bytes, KEY_BYTES)


def aligned(num_bytes):
    raw = np.zeros(num_bytes + 4096, np.uint8)
    begin = -raw.ctypes.data % 4096
    return raw[begin : begin + num_bytes]


def path_of(num, *, of=0, block_bytes=4096, namespace="namespace", in_line=True) -> list[Block]:
    """Return the blocks of a path; ``of`` tells paths apart."""
    root = parent = root_digest(namespace.encode())
    blocks = []
    for index in range(num):
        key = of.to_bytes(8, "little") + index.to_bytes(8, "little")
        digest = path_digest(parent, key)
        rng = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:8], "little")))
        payload = aligned(block_bytes) if in_line else np.zeros(block_bytes + 1, np.uint8)[1:]
        payload[:] = np.frombuffer(rng.bytes(block_bytes), np.uint8)
        blocks.append(Block(BlockName(digest, parent, root, key), payload, checksum_of(payload.data)))
        parent = digest
    return blocks


def put(store, blocks) -> int:
    return store.put([block.put for block in blocks])


def get(store, blocks, *, in_line=True):
    """Return what a store answers. What it says is there is compared, to the byte."""
    intos = [
        aligned(len(block.payload)) if in_line else np.zeros(len(block.payload) + 1, np.uint8)[1:] for block in blocks
    ]
    results = store.get([Get(block.name, memoryview(into)) for block, into in zip(blocks, intos, strict=True)])
    assert len(results) == len(blocks)
    for block, into, result in zip(blocks, intos, results, strict=True):
        if isinstance(result, bytes):
            assert result == block.checksum
            assert np.array_equal(into, block.payload)
    return results


def checksums(blocks):
    return [block.checksum for block in blocks]


def count(store, blocks) -> int:
    return store.count([block.name for block in blocks])


def least_limit(num_blocks, block_bytes=4096) -> int:
    """Return a limit that holds about ``num_blocks``, and not many more."""
    place_bytes = 4096 + -(-block_bytes // 4096) * 4096
    return 3 * 2**20 + 2**16 + 2**18 + 2**17 + place_bytes + num_blocks * (place_bytes + 512)


def bytes_of(folder) -> int:
    return folder_bytes(folder)
