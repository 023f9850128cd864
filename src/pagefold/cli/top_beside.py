"""Beside: what ``pagefold top`` asks a server for beside the dashboard: its advice, and the curve of other sizes.

Both change slowly, and a curve costs the server seconds of a core. So they are asked for seldom, and while somebody
looks nobody waits for them.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import PagefoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagefold.cli.running_server import RunningServer

__all__ = ["Beside"]

_SELDOM_S = 30.0
_LEAST_S = 5.0
"""Between questions to a server that comes and goes."""


class _Part(NamedTuple):
    """Something that is asked for beside.

    Attributes:
        object: what its answer says of itself.
        absent: what is said where the dashboard's answer names no place to ask for it.
    """

    object: str
    absent: str


_NEVER = "A server that was started with --no-enable-explain never has one."
_PARTS = {
    "advice": _Part("list", f"There is no advice yet: no request has ended. {_NEVER}"),
    "whatif": _Part("cache.whatif", f"There is no curve yet: no request has ended. {_NEVER}"),
}
"""By the names that the dashboard has for them in ``more``."""


class Beside:
    """Asks seldom, and remembers what was answered.

    Args:
        server: that is asked.
        clock: seconds.
    """

    def __init__(self, server: RunningServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._told: dict[str, Any] = {}
        self._places: Mapping[str, str | None] = {}
        self._asked_s = -_LEAST_S
        self._asks: threading.Thread | None = None

    def ask(self, places: Mapping[str, str | None]) -> dict[str, Any]:
        """Ask now, and return each part: what is answered, or None, and then ``NAME_why`` says why.

        Args:
            places: where to ask, by part; None for what the server does not tell, or not yet.
        """
        told: dict[str, Any] = {}
        for name, part in _PARTS.items():
            place = places.get(name)
            try:
                told[name] = None if place is None else self._server.ask(place, part.object)
                why = part.absent if place is None else ""
            except PagefoldError as error:
                told[name], why = None, str(error)
            if why:
                told[f"{name}_why"] = why
        return told

    def look(self, places: Mapping[str, str | None]) -> dict[str, Any]:
        """Return what was answered last, and have it asked again on a thread of its own where that is long ago.

        Args:
            places: as above. Where they change, what was known is of another time.
        """
        if places != self._places:
            self.forget()
            self._places = dict(places)
        if not any(places.values()):
            return self.ask(places)  # which asks nobody
        since_s = self._clock() - self._asked_s
        is_anew = self._asks is None and since_s >= _LEAST_S
        if is_anew or (self._asks is not None and since_s >= _SELDOM_S and not self._asks.is_alive()):
            self._asked_s = self._clock()
            self._asks = threading.Thread(target=self._ask_aside, args=(dict(places),), daemon=True)
            self._asks.start()
        return self._told

    def forget(self) -> None:
        """What was known is of another time, or of a server that has gone; so is what is being asked."""
        self._told, self._places, self._asks = {}, {}, None

    def _ask_aside(self, places: Mapping[str, str | None]) -> None:
        told = self.ask(places)
        if self._asks is threading.current_thread():
            self._told = told
