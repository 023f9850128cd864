"""EngineClient: the engine as an event loop sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pagefold.request import ANYBODY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.adapters import LoadedAdapter
    from pagefold.engine.foresight import Foreseen
    from pagefold.engine.intake import Intake
    from pagefold.engine.pins import PinReport
    from pagefold.engine.quota_report import QuotaStatus
    from pagefold.engine.status import EngineStatus
    from pagefold.engine.together import Together
    from pagefold.engine.token_stream import TokenStream
    from pagefold.memory.limit import Limit
    from pagefold.request import Caller, EndedSession, SessionRef
    from pagefold.sampling import SamplingParams
    from pagefold.structured.grammar import Grammar
    from pagefold.structured.params import StructuredOutputsParams
    from pagefold.tokenizer import Tokenizer

__all__ = ["EngineClient"]


class EngineClient(Protocol):
    """What the server knows of an engine."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """The adapters that requests may name, in the order in which they came."""

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> LoadedAdapter:
        """Read an adapter, and let requests name it.

        Args:
            name: what they call it.
            path: its folder.
            in_place: whether it may take the name of another, which is unloaded then.

        Raises:
            AdapterNotFoundError: there is none in that folder.
            AdapterError: it does not go with the model, is damaged, or there is no room for it; nothing has changed.
            EngineStoppedError: the engine takes no more commands.
        """

    async def unload_adapter(self, name: str) -> LoadedAdapter:
        """Take an adapter's name away at once, and return when the last request that has it has ended.

        Nothing is left of it then. It goes on so though nobody waits.

        Raises:
            AdapterNotFoundError: there is none of that name.
            EngineStoppedError: the engine takes no more commands.
        """

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""

    def check_kind(self, caller: Caller) -> None:
        """See that the engine offers the kind of blocks that a caller asks for.

        Raises:
            InvalidRequestError: it does not.
        """

    @property
    def context(self) -> Limit:
        """The same, with what ends it there, where a setting does."""

    @property
    def cached_block_size(self) -> int | None:
        """How many tokens a block of the prefix cache holds; None where prefixes are not cached."""

    def ensure_ready(self) -> None:
        """Return if it takes requests now.

        Raises:
            EngineStoppedError: it does not; the message says why.
        """

    async def compile_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of what an output must look like, for :meth:`submit`.

        Raises:
            InvalidRequestError: it does not compile, or takes too much.
        """

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
        """Queue a request; its stream must be closed, also when it was never read. Called in an event loop.

        Those that come as one have one ``together``. Where the server has a target for the first token, the engine may
        refuse them yet: the stream's :meth:`~pagefold.engine.token_stream.TokenStream.taken` says so.

        Raises:
            InvalidRequestError: it can never be served; with the field at fault.
            EngineStoppedError: the engine takes no more requests.
            QueueFullError: too many wait already.
            RateLimitError: the caller's tenant has used up the tokens that it may for now.
        """

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; return how many blocks became free.

        Raises:
            EngineStoppedError: the engine takes no more commands.
            TierError: a slow tier could not forget.
        """

    async def foresee(self, prompt_token_ids: Sequence[int], caller: Caller = ANYBODY) -> Foreseen:
        """Return what a prompt would find in the cache; nothing is done for it.

        Raises:
            InvalidRequestError: the engine does not offer the kind of blocks that the caller asks for.
            EngineStoppedError: the engine takes no more commands.
        """

    def intake(self) -> Intake:
        """Return what takes blocks into the slow tiers.

        Raises:
            EngineStoppedError: the engine takes nothing now.
        """

    async def pins(self) -> PinReport:
        """Return what is pinned now.

        Raises:
            EngineStoppedError: the engine takes no more commands.
        """

    async def quotas(self) -> tuple[QuotaStatus, ...]:
        """Return what tenants with a quota have now.

        Raises:
            EngineStoppedError: the engine takes no more commands.
        """

    async def unpin(self, pin_id: str) -> bool:
        """Take a pin away; its blocks stay cached. False if there is no such pin.

        Raises:
            EngineStoppedError: the engine takes no more commands.
        """

    async def end_session(self, session: SessionRef) -> EndedSession | None:
        """End a session, with its sub-agents: its requests go on, its blocks go first. None if there is none.

        Raises:
            EngineStoppedError: the engine takes no more commands.
        """

    def status(self) -> EngineStatus:
        """Return what it is doing now."""
