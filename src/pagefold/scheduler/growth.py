"""Growth: what those that run are expected to take yet, and whether somebody more may be let in beside that.

Which requests are let in is a rule, by name in ``--admission``. All rules want that the tokens there are now fit, of
who is to be let in and of those that run (``relief.py``). What they want beyond that is here and in
``expected_growth.py``:

- ``prompt``: nothing. Memory is used best, and who was let in too early is preempted and computed anew.
- ``max_tokens``: the most that each may ever hold. Nobody is preempted, and most of that is never used.
- ``predicted``: what each is forecast to hold.

Whatever the rule, who would run alone is let in: so nobody waits for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import Block
    from pagefold.request import Request

__all__ = ["NOBODY_GONE", "AdmissionRule", "Gone", "PromptOnly"]


class Gone(NamedTuple):
    """Those that run, and would be gone.

    Attributes:
        requests: with each beam and sample of theirs.
        num_blocks: that nobody else has.
    """

    requests: Sequence[Request]
    num_blocks: int


NOBODY_GONE = Gone((), 0)


class AdmissionRule(Protocol):
    """Says whether growth leaves room, and is told what becomes of requests.

    Attributes:
        name: in ``--admission``.
        num_promised: blocks that those that run are expected to take yet.
    """

    name: str
    num_promised: int

    def ended(self, request: Request) -> None:
        """A request has ended."""

    def note(self, request: Request, step_id: int) -> None:
        """A request runs from the step of that number on; or runs, and has taken blocks for it."""

    def forget(self, request: Request) -> None:
        """A request has given back its blocks, or is about to."""

    def has_room(
        self,
        request: Request,
        found: list[Block],
        step_id: int,
        *,
        beside: Request | None = None,
        gone: Gone = NOBODY_GONE,
    ) -> bool:
        """Whether a request that waits may be let in beside the growth of those that run.

        Args:
            request: to be let in.
            found: blocks that it begins with.
            step_id: number of the step that would let it in.
            beside: somebody who waits, too, and whose memory nobody else is to take; None for nobody.
            gone: of those that run, who would not run any more then.
        """


class PromptOnly:
    """Expects no growth at all."""

    name = "prompt"
    num_promised = 0

    def ended(self, request: Request) -> None:
        """See :class:`AdmissionRule`."""

    def note(self, request: Request, step_id: int) -> None:
        """See :class:`AdmissionRule`."""

    def forget(self, request: Request) -> None:
        """See :class:`AdmissionRule`."""

    def has_room(
        self,
        request: Request,  # noqa: ARG002
        found: list[Block],  # noqa: ARG002
        step_id: int,  # noqa: ARG002
        *,
        beside: Request | None = None,  # noqa: ARG002
        gone: Gone = NOBODY_GONE,  # noqa: ARG002
    ) -> bool:
        """See :class:`AdmissionRule`."""
        return True
