"""Together: requests that come as one, such as the prompts of one HTTP request: taken together, or none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.engine.prompt_charge import PromptCharge

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.errors import LoadShedError

__all__ = ["Together"]


class Together:
    """Whether requests that come as one are taken. The first is judged, and the others follow it.

    So none of them is refused since the others are there. The engine's thread alone has them judged.

    Args:
        num_prompt_tokens: of all prompts together.

    Attributes:
        charge: what their tenant is charged for the prompts.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.charge = PromptCharge(num_prompt_tokens)
        self._is_judged = False
        self._refusal: LoadShedError | None = None

    def judge(self, judge: Callable[[], LoadShedError | None]) -> None:
        """Have the first of them judged by ``judge``, which returns why it is refused.

        Raises:
            LoadShedError: they are refused.
        """
        if not self._is_judged:
            self._is_judged = True
            self._refusal = judge()
        if self._refusal is not None:
            raise self._refusal
