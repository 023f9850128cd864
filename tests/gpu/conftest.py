"""What needs a card: skipped, visibly, where there is none that will do."""

from __future__ import annotations

import pytest

from pagefold.runner.card import find_card, why_unfit


def pytest_collection_modifyitems(items):
    why = why_unfit(find_card())
    if why:
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=f"{why}: make test-gpu needs a card"))


@pytest.fixture(scope="session")
def card():
    return find_card()
