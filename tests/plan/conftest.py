"""What the tests of the planner share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fewer_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a third of the steps, where no test asks for its own number and none is long: they say the same."""
    if not request.node.get_closest_marker("long"):
        monkeypatch.setattr("pagefold.plan.concurrency._MAX_REQUEST_STEPS", 200_000)
