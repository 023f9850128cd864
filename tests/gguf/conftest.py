"""What the tests of this room share with those of equality."""

from __future__ import annotations

from equivalence.conftest import one_thread

__all__ = ["one_thread"]
