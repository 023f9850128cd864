"""Cache only: a trace's prompts through the real cache one after another. No timing, and outputs are not cached.

What tables of hit ratios are made with: only the order of requests, the size of the cache and the policy count. The
size is what is kept between requests: the one that runs has room of its own, so no policy must evict before it knows
what came. (In a server it must; the simulator's full mode shows what that costs.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pagefold.curves.prompt_cache import PromptCache
from pagefold.errors import ConfigError
from pagefold.events import BlockEvicted
from pagefold.kv import make_policy
from pagefold.kv.tree import TOKEN_BYTES
from pagefold.sim.belady import BeladyCache, next_uses
from pagefold.sim.traces.tokens import IdTokens, name_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagefold.events import Event
    from pagefold.kv import EvictionPolicy
    from pagefold.sim.traces import TraceRequest

__all__ = ["BELADY", "CacheOnlyReport", "replay_cache_only", "reuse_oracle"]

BELADY = "belady"
"""The name of the bound that knows the future; see :mod:`pagefold.sim.belady`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOnlyReport:
    """What a cache found of a trace.

    Attributes:
        policy: what chose the victims.
        block_size: tokens a block.
        num_blocks: blocks of the cache.
        num_requests: how many were replayed.
        num_asked_tokens: prompt tokens of all requests.
        num_hit_tokens: the part that was cached when its request came.
        num_asked_blocks, num_hit_blocks: the same in blocks, a prompt's last and partial one among them.
        num_evictions: cached blocks that went to make room.
    """

    policy: str
    block_size: int
    num_blocks: int
    num_requests: int
    num_asked_tokens: int
    num_hit_tokens: int
    num_asked_blocks: int
    num_hit_blocks: int
    num_evictions: int

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def token_hit_ratio(self) -> float:
        """Share of prompt tokens that were found, 0 to 1."""
        return self.num_hit_tokens / self.num_asked_tokens if self.num_asked_tokens else 0.0

    def figures(self) -> dict[str, object]:
        """Return all figures by name, for JSON."""
        return {**asdict(self), "cache_tokens": self.cache_tokens, "token_hit_ratio": self.token_hit_ratio}


def replay_cache_only(  # noqa: PLR0913 - a trace, a cache, and what may come along
    requests: Sequence[TraceRequest],
    *,
    policy: str | EvictionPolicy,
    block_size: int,
    cache_tokens: int,
    hints: Sequence[Sequence[bool]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> CacheOnlyReport:
    """Replay ``requests`` in their order, each one alone: looked up, computed, cached.

    Tokens are made from the trace's ids, so blocks need not be as long as an id's. A prompt's last block is cached
    though it may be partial, as in the published tables, but no more than the prompt's length ever counts as found.

    Args:
        requests: of a trace.
        policy: a name of ``POLICIES``, ``default``, ``belady``, or a policy; one that has been used goes on as it is.
        block_size: tokens a block.
        cache_tokens: what the cache holds, rounded down to whole blocks.
        hints: for each request, whether each block of its prompt will be used again, as somebody thinks. What is not
            said (shorter lists) is not known. :func:`reuse_oracle` makes true ones.
        progress: told how many requests are done, after each.

    Raises:
        ConfigError: the policy has no such name, or the cache holds not one block.
    """
    num_blocks = cache_tokens // block_size
    if num_blocks < 1:
        msg = f"A cache of {cache_tokens} tokens holds no block of {block_size}."
        raise ConfigError(msg, remedy=f"Give at least {block_size} tokens.")
    replayer = _Replayer(requests, block_size)
    if policy == BELADY:
        return replayer.replay_belady(num_blocks, progress)
    return replayer.replay(num_blocks, policy, hints, progress)


def reuse_oracle(requests: Sequence[TraceRequest], *, block_size: int) -> list[list[bool]]:
    """Return, for each block of each prompt, whether a later prompt has it too: hints that are always right."""
    paths = _paths(_Replayer(requests, block_size))
    return [[use < len(paths) for use in each] for each in next_uses(paths)]


class _Replayer:
    def __init__(self, requests: Sequence[TraceRequest], block_size: int) -> None:
        self.requests = requests
        self.block_size = block_size
        self._tokens = IdTokens()

    def prompts(self) -> Iterator[bytes]:
        """Yield each prompt's packed tokens, its last block filled up."""
        for index, request in enumerate(self.requests):
            yield self._packed(index, request)

    def num_blocks_of(self, request: TraceRequest) -> int:
        return -(-request.prompt_tokens // self.block_size)

    def replay(
        self,
        num_blocks: int,
        policy: str | EvictionPolicy,
        hints: Sequence[Sequence[bool]] | None,
        progress: Callable[[int], None] | None,
    ) -> CacheOnlyReport:
        size = self.block_size
        evictor = make_policy(policy, num_blocks) if isinstance(policy, str) else policy
        num_evictions = 0

        def count(event: Event) -> None:
            nonlocal num_evictions
            num_evictions += isinstance(event, BlockEvicted)

        room = max(map(self.num_blocks_of, self.requests), default=0)
        cache = PromptCache(num_blocks, room, size, evictor, count)
        num_asked = num_hit = num_asked_blocks = num_hit_blocks = 0
        for index, packed in enumerate(self.prompts()):
            request = self.requests[index]
            num_tokens = self.num_blocks_of(request) * size
            num_found = cache.use(packed, num_tokens, None if hints is None else hints[index])
            num_asked += request.prompt_tokens
            num_hit += min(num_found, request.prompt_tokens)
            num_asked_blocks += self.num_blocks_of(request)
            num_hit_blocks += num_found // size
            if progress is not None:
                progress(index + 1)
        return CacheOnlyReport(
            policy=policy if isinstance(policy, str) else type(policy).__name__,
            block_size=size,
            num_blocks=num_blocks,
            num_requests=len(self.requests),
            num_asked_tokens=num_asked,
            num_hit_tokens=num_hit,
            num_asked_blocks=num_asked_blocks,
            num_hit_blocks=num_hit_blocks,
            num_evictions=num_evictions,
        )

    def replay_belady(self, num_blocks: int, progress: Callable[[int], None] | None) -> CacheOnlyReport:
        size = self.block_size
        cache = BeladyCache(num_blocks)
        num_hit = num_hit_blocks = 0
        paths = _paths(self)
        for index, (path, uses) in enumerate(zip(paths, next_uses(paths), strict=True)):
            num_found = cache.use(path, uses)
            num_hit += min(num_found * size, self.requests[index].prompt_tokens)
            num_hit_blocks += num_found
            if progress is not None:
                progress(index + 1)
        return CacheOnlyReport(
            policy=BELADY,
            block_size=size,
            num_blocks=num_blocks,
            num_requests=len(paths),
            num_asked_tokens=sum(request.prompt_tokens for request in self.requests),
            num_hit_tokens=num_hit,
            num_asked_blocks=sum(map(len, paths)),
            num_hit_blocks=num_hit_blocks,
            num_evictions=cache.num_evictions,
        )

    def _packed(self, index: int, request: TraceRequest) -> bytes:
        prompt = self._tokens.prompt(index, request)
        missing = self.num_blocks_of(request) * self.block_size - len(prompt)
        prompt.extend(prompt[-1:] * missing)  # the end of a block is what it begins with
        return prompt.tobytes()


def _paths(replayer: _Replayer) -> list[list[int]]:
    """Return each prompt as names of blocks; two have a name in common where they agree up to there."""
    names: dict[tuple[int, bytes], int] = {}
    return [name_blocks(packed, replayer.block_size * TOKEN_BYTES, names) for packed in replayer.prompts()]
