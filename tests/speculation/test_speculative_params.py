"""What a request says of drafts, over what its server says."""

from __future__ import annotations

import pytest

from pagefold.errors import InvalidRequestError
from pagefold.speculation import SpeculativeParams

SERVERS = SpeculativeParams(method="ngram", num_speculative_tokens=8, prompt_lookup_min=3, prompt_lookup_max=7)


def test_what_a_request_leaves_out_is_as_the_server_has_it():
    asked = SpeculativeParams.of({"num_speculative_tokens": 2, "prompt_lookup_max": 6})
    expected = SpeculativeParams(method="ngram", num_speculative_tokens=2, prompt_lookup_min=3, prompt_lookup_max=6)
    assert asked.over(SERVERS) == expected
    assert hash(asked.over(SERVERS)) == hash(expected)
    assert asked.over(None) == SpeculativeParams(num_speculative_tokens=2, prompt_lookup_max=6)
    assert SpeculativeParams.of({"prompt_lookup_min": 7}).over(SERVERS).prompt_lookup_max == 7


def test_what_was_made_in_python_stands_for_itself():
    assert SpeculativeParams().over(SERVERS) == SpeculativeParams()
    assert SpeculativeParams.of({"num_speculative_tokens": 0}).over(SERVERS).is_off


def test_what_does_not_go_with_the_servers_is_refused():
    with pytest.raises(InvalidRequestError, match="prompt_lookup_max is 7"):
        SpeculativeParams.of({"prompt_lookup_min": 9}).over(SERVERS)
    with pytest.raises(InvalidRequestError, match="prompt_lookup_max is 5"):
        SpeculativeParams.of({"prompt_lookup_min": 7}).over(None)
    with pytest.raises(InvalidRequestError, match=r"There is no field speculative_config\.given"):
        SpeculativeParams.of({"given": ["method"]})
