"""Kind: how the blocks of a request are made, of the ways that an engine offers. Kinds share no blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import Namespace
    from pagefold.request import Caller

__all__ = ["EXACT", "Kind", "kind_of"]

EXACT = "exact"
"""The name of the kind that keeps all."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How blocks are made.

    Attributes:
        share: of older tokens, that is kept; 1 for all.
        mask: by which of the model's masks; see :class:`~pagefold.request.Request`.
        namespace: model, layout and dtype of its blocks; tenant and salt are the request's.
        codec: that encodes them; empty for none.
    """

    share: float
    mask: int
    namespace: Namespace
    codec: str = ""

    def namespace_of(self, caller: Caller, fingerprint: str = "") -> Namespace:
        """Return the namespace of the blocks of a caller's request.

        Args:
            caller: who asks.
            fingerprint: of the adapter that it is computed with; empty for none.
        """
        return dataclasses.replace(
            self.namespace, adapter=fingerprint, tenant=caller.tenant, cache_salt=caller.cache_salt
        )

    @property
    def name(self) -> str:
        """What a request calls it in ``kv_quality``."""
        return EXACT if self.share == 1 else f"keep {self.share}"


def kind_of(caller: Caller, kinds: Sequence[Kind]) -> Kind:
    """Return the kind that a caller asks for; the first one if it asks for none.

    Raises:
        InvalidRequestError: there is no such kind, or it asks for two.
    """
    wanted = [kind for kind in kinds if caller.kv_keep in (None, kind.share) and caller.kv_quality in ("", kind.name)]
    if wanted:
        return wanted[0]
    field = "kv_quality" if caller.kv_keep is None else "kv_keep"
    asked = [f"kv_keep is {caller.kv_keep}"] if caller.kv_keep is not None else []
    asked += [f"kv_quality is {caller.kv_quality!r}"] if caller.kv_quality else []
    offered = " or ".join(f"{kind.name!r} (kv_keep {kind.share})" for kind in kinds)
    msg = f"{' and '.join(asked)}, and this server offers {offered}."
    raise InvalidRequestError(msg, param=field, remedy="Ask for what it offers, or leave it out.")
