"""A draft model beside the model: what it must have in common with that, what it gets, and who drafts with it.

It runs as the model does, from a blueprint of its own. Its blocks are its own too, a share of the KV budget: what they
hold is nobody's but the drafter's, and no request ever waits for one of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pagefold.config import EngineConfig
from pagefold.errors import ConfigError
from pagefold.kv import KVCore, make_policy
from pagefold.memory.capacity import Capacity, human_bytes
from pagefold.speculation import ModelDrafter, StepCosts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagefold.engine.blueprint import Blueprint
    from pagefold.runner.torch_runner import TorchRunner

__all__ = [
    "capacity_of_draft",
    "check_device",
    "check_draft",
    "draft_config",
    "line_of_draft",
    "longest_of",
    "model_drafter",
]

_TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """Return the config of the draft model that ``config`` asks for; None where it asks for none.

    Its KV is stored as it is computed, on the device alone.
    """
    asked = config.speculative_config
    if asked is None or asked.model is None or not config.max_draft_tokens:
        return None
    return EngineConfig(
        model=asked.model,
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        attention_backend=config.attention_backend,
        quantization=asked.quantization,
        threads=config.threads,
    )


def check_device(config: EngineConfig, device: str) -> None:
    """See that draft models are computed on a device.

    Raises:
        ConfigError: they are not.
    """
    if device != "cpu":
        msg = f"speculative_config.model is {config.model}, and draft models are not computed on {device} yet."
        raise ConfigError(msg, remedy="Use method tree or ngram, or device=cpu.")


def check_draft(draft: Blueprint, model: Blueprint) -> None:
    """See that a draft model can draft for the model.

    Raises:
        ConfigError: it has other tokens, or fewer positions: with what to do.
    """
    name, other = draft.spec.folder.name, model.spec.folder.name
    longest, most = longest_of(model), draft.limit.length
    if longest > most:
        why = draft.limit.why or "it was made for no more positions"
        is_asked = isinstance(model.config.max_model_len, int)
        what = f"max_model_len is {longest}" if is_asked else f"{other} goes up to {longest} tokens"
        msg = f"{what}, and {name}, the draft model, ends at {most}: {why}."
        raise ConfigError(msg, remedy=f"Give max_model_len={most}, or a draft model that has as many positions.")
    tokens, others = _tokens_of(draft.spec.folder), _tokens_of(model.spec.folder)
    if tokens is None and others is None:  # nobody knows what their tokens are
        if draft.spec.vocab_size != model.spec.vocab_size:
            msg = f"{name}, the draft model, has {draft.spec.vocab_size} tokens, and {other} {model.spec.vocab_size}."
            raise ConfigError(msg, remedy="Give a draft model that has the same tokens.")
        return
    if tokens != others:
        msg = f"{name}, the draft model, has another tokenizer than {other}: {_difference(tokens, others)}."
        raise ConfigError(msg, remedy="Give a draft model that has the same tokens, mostly one of the same family.")


def capacity_of_draft(draft: Blueprint, model: Capacity) -> Capacity:
    """Return what fits into the draft model's share of the KV budget."""
    layout = draft.geometry.layout
    num_blocks = layout.num_blocks(model.draft_bytes)
    return Capacity(
        weight_bytes=0,  # counted before
        kv_budget_bytes=num_blocks * layout.bytes_per_block,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_model_len=model.max_model_len,
        num_blocks_per_request=layout.num_blocks_for(model.max_model_len),
        num_groups=len(layout.groups),
    )


def line_of_draft(draft: Blueprint, weight_bytes: int) -> str:
    """Return the line that a start prints of it."""
    capacity = draft.capacity
    kv = f"{human_bytes(capacity.kv_budget_bytes)} of KV = {capacity.num_tokens:,} tokens"
    return f"draft      {draft.spec.folder.name}: weights {human_bytes(weight_bytes)}, {kv}"


def model_drafter(
    runner: TorchRunner, draft: Blueprint, vocab_size: int, max_num_seqs: int
) -> Callable[[], ModelDrafter]:
    """Return what makes the drafter, with what the draft model's steps take here.

    Args:
        runner: of the draft model.
        draft: its blueprint.
        vocab_size: of the model.
        max_num_seqs: requests that there may be drafts for at once.
    """
    sizes = [size for size in _TIMED_ROWS if size <= max(2, max_num_seqs)]
    costs = StepCosts(sizes, runner.seconds_of_steps(sizes))
    config, geometry = draft.config, draft.geometry

    def make() -> ModelDrafter:
        core = KVCore(
            draft.capacity.num_blocks,
            block_size=geometry.block_size,
            rules=[group.keeps for group in geometry.groups],
            policy=make_policy("lru"),
            enable_prefix_caching=config.enable_prefix_caching,
        )
        return ModelDrafter(
            core,
            runner,
            costs=costs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=vocab_size,
            own_vocab_size=draft.spec.vocab_size,
            block_bytes=geometry.bytes_per_block,
        )

    return make


def longest_of(model: Blueprint) -> int:
    """Return how long a sequence may become at most."""
    asked, most = model.config.max_model_len, model.limit.length
    return min(asked, most) if isinstance(asked, int) else most


def _tokens_of(folder: Path) -> dict[str, int] | None:
    """Return the tokens of a model's tokenizer, with their ids; None where it has none."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from pagefold.tokenizer import Tokenizer  # noqa: PLC0415 - heavy; only when it is needed

    whole: dict[str, Any] = json.loads(Tokenizer(folder).to_json())
    vocab = whole["model"]["vocab"]
    tokens = dict(vocab) if isinstance(vocab, dict) else {piece[0]: at for at, piece in enumerate(vocab)}
    return tokens | {added["content"]: added["id"] for added in whole["added_tokens"]}


def _difference(tokens: dict[str, int] | None, others: dict[str, int] | None) -> str:
    """Say how tokens differ."""
    if tokens is None or others is None:
        return "one of them has none"
    odd = next((token for token in tokens if tokens[token] != others.get(token)), None)
    if odd is None:
        return f"it has {len(tokens):,} tokens, and the other {len(others):,}"
    place = "no token" if odd not in others else f"token {others[odd]}"
    return f"{odd!r} is token {tokens[odd]}, and {place} there"
