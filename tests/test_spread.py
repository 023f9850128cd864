"""Flags that take several values behind one name."""

from __future__ import annotations

import pytest

from pagefold.cli.spread import spread

FLAG = "--lora-modules"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["m", FLAG, "a=/x"], ["m", FLAG, "a=/x"]),
        (["m", FLAG, "a=/x", "b=/y"], ["m", FLAG, "a=/x", FLAG, "b=/y"]),
        ([FLAG, "a=/x", "m"], [FLAG, "a=/x", "m"]),
        ([FLAG, '{"name": "a"}', '{"name": "b"}', "m"], [FLAG, '{"name": "a"}', FLAG, '{"name": "b"}', "m"]),
        ([FLAG, "a=/x", "--port=1", "b=/y"], [FLAG, "a=/x", "--port=1", "b=/y"]),
        ([FLAG, "a=/x", FLAG, "b=/y", "c=/z"], [FLAG, "a=/x", FLAG, "b=/y", FLAG, "c=/z"]),
        ([FLAG, "nothing", "a=/x"], [FLAG, "nothing", FLAG, "a=/x"]),
        ([FLAG], [FLAG]),
        (["m", "a=b"], ["m", "a=b"]),
    ],
)
def test_values_that_follow_get_the_flag(given, meant):
    assert spread(given, (FLAG,)) == meant
