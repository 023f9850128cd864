"""LateEngine: stands where the engine will be, so that the door can open while the model loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.engine.status import EngineStatus
from pagefold.errors import EngineStoppedError
from pagefold.request import ANYBODY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.adapters import LoadedAdapter
    from pagefold.engine.client import EngineClient
    from pagefold.engine.foresight import Foreseen
    from pagefold.engine.intake import Intake
    from pagefold.engine.pins import PinReport
    from pagefold.engine.quota_report import QuotaStatus
    from pagefold.engine.together import Together
    from pagefold.engine.token_stream import TokenStream
    from pagefold.memory.limit import Limit
    from pagefold.request import Caller, EndedSession, SessionRef
    from pagefold.sampling import SamplingParams
    from pagefold.structured.grammar import Grammar
    from pagefold.structured.params import StructuredOutputsParams
    from pagefold.tokenizer import Tokenizer

__all__ = ["LateEngine"]


class LateEngine:
    """An ``EngineClient`` that refuses everything until ``arrive``, and then is the engine that arrived."""

    def __init__(self) -> None:
        self._engine: EngineClient | None = None
        self._is_closing = False

    def arrive(self, engine: EngineClient) -> None:
        """Be ``engine`` from now on."""
        self._engine = engine

    def close(self) -> None:
        """Refuse new requests from now on. Those that run are not touched."""
        self._is_closing = True

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._arrived().tokenizer

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return () if self._engine is None else self._engine.adapters

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> LoadedAdapter:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().load_adapter(name, path, in_place=in_place)

    async def unload_adapter(self, name: str) -> LoadedAdapter:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().unload_adapter(name)

    @property
    def max_model_len(self) -> int:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._arrived().max_model_len

    def check_kind(self, caller: Caller) -> None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        self._arrived().check_kind(caller)

    @property
    def context(self) -> Limit:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._arrived().context

    @property
    def cached_block_size(self) -> int | None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._arrived().cached_block_size

    def ensure_ready(self) -> None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        if self._is_closing:
            msg = "The server is shutting down and takes no more requests."
            raise EngineStoppedError(msg, remedy="Try another replica, or again later.")
        self._arrived().ensure_ready()

    async def compile_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().compile_grammar(params)

    def submit(  # noqa: PLR0913 - a request, by name
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        caller: Caller = ANYBODY,
        grammar: Grammar | None = None,
        *,
        together: Together | None = None,
    ) -> TokenStream:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._arrived().submit(request_id, prompt_token_ids, sampling, caller, grammar, together=together)

    async def reset_prefix_cache(self) -> int:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().reset_prefix_cache()

    async def foresee(self, prompt_token_ids: Sequence[int], caller: Caller = ANYBODY) -> Foreseen:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().foresee(prompt_token_ids, caller)

    def intake(self) -> Intake:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._arrived().intake()

    async def pins(self) -> PinReport:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().pins()

    async def quotas(self) -> tuple[QuotaStatus, ...]:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().quotas()

    async def unpin(self, pin_id: str) -> bool:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().unpin(pin_id)

    async def end_session(self, session: SessionRef) -> EndedSession | None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._arrived().end_session(session)

    def status(self) -> EngineStatus:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return EngineStatus() if self._engine is None else self._engine.status()

    def _arrived(self) -> EngineClient:
        if self._engine is None:
            msg = "The model is still loading."
            raise EngineStoppedError(msg, remedy="Try again when /ready answers 200.")
        return self._engine
