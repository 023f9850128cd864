"""The lifecycle of a block: every legal move works, every other raises, and nobody but block.py makes one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pagefold.kv
from pagefold.kv.block import LEGAL_MOVES, Block, BlockId, BlockState, IllegalMoveError, Node

MOVES = [(old, new) for old in BlockState for new in BlockState]
LEGAL = {
    ("FREE", "ACTIVE"),
    ("ACTIVE", "CACHED"),
    ("ACTIVE", "FREE"),
    ("CACHED", "ACTIVE"),
    ("CACHED", "FREE"),
}
"""Written out again, so that a change of the table is a change of a test."""


def block_in(state: BlockState) -> Block:
    block = Block(BlockId(3))
    if state == BlockState.CACHED:
        block.to(BlockState.ACTIVE)
    if state != BlockState.FREE:
        block.to(state)
    return block


@pytest.mark.parametrize(("old", "new"), MOVES, ids=lambda state: state.name)
def test_moves(old: BlockState, new: BlockState) -> None:
    block = block_in(old)
    if (old.name, new.name) in LEGAL:
        block.to(new)
        assert block.state == new
    else:
        with pytest.raises(IllegalMoveError, match=f"block 3: {old.name} -> {new.name} is not a legal move"):
            block.to(new)
        assert block.state == old


def test_the_table_says_the_same() -> None:
    assert {(old.name, new.name) for old, news in LEGAL_MOVES.items() for new in news} == LEGAL
    assert set(LEGAL_MOVES) == set(BlockState)


@pytest.mark.parametrize("holder", ["num_table_refs", "num_io_refs", "num_pin_refs", "node"])
def test_a_block_that_somebody_holds_cannot_be_freed(holder: str) -> None:
    block = block_in(BlockState.ACTIVE)
    setattr(block, holder, Node(b"", None, (block,), 0) if holder == "node" else 1)
    with pytest.raises(IllegalMoveError, match="block 3 cannot be freed"):
        block.to(BlockState.FREE)
    assert block.state == BlockState.ACTIVE


def test_a_new_block_is_free_and_nobody_holds_it() -> None:
    block = Block(BlockId(0))
    assert (block.state, block.num_table_refs, block.num_io_refs, block.node) == (BlockState.FREE, 0, 0, None)


def test_repr_names_what_a_bug_report_needs() -> None:
    assert repr(block_in(BlockState.ACTIVE)) == "Block(3, ACTIVE, tables=0, io=0, pins=0, published=False)"


def test_no_other_file_sets_a_state() -> None:
    kv = Path(pagefold.kv.__file__).parent
    setters = {
        path.name
        for path in kv.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)
    }
    assert setters == {"block.py"}
