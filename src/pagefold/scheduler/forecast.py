"""Forecasts of outputs: how long a request's output will be, from how long others' of its tenant were.

Outputs are forecast by *kind*: those of a tenant whose prompts begin alike and may be about as long; where few of these
have ended yet, by all of the tenant that may be about as long, then by all of the tenant; and where few of those have,
an output is thought to be as long as it may be. Nobody's lengths say anything to another tenant, and nobody's many
prompts push out what is known of another's. Prompts in different namespaces of blocks (salts, adapters) are not alike.

Which kinds are kept is bounded for each tenant. A kind stays on *trial* until enough of it have ended; then it is
*known*. Those on trial push out one another, and known ones only known ones: prompts that come once never push out
those that come again.

Each forecast states an interval that should hold the length of 8 outputs in 10. It is kept so by adaptive conformal
inference (Gibbs & Candes 2021, "Adaptive Conformal Inference Under Distribution Shift", equation 2): every time that an
interval missed, the tenant's next ones are a little wider, and a little narrower each time that one did not. Before
there are data, no interval is stated. Where most outputs have the same length, no interval is narrow enough to miss any
of them: then it holds more than 8 in 10.

An output that a client, a deadline or ``max_tokens`` cut off counts as one that would have been at least as long
(``lengths.py``). One that ended by a fault says nothing, and nor does one of which no token was asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.events import Emit, OutputForecastChecked, ignore
from pagefold.scheduler.lengths import LEAST_LENGTHS, Lengths

if TYPE_CHECKING:
    from pagefold.request import Request

__all__ = ["LONGEST", "Forecast", "Forecaster", "LongestOutputs", "OutputForecasts"]

LIKELY_SHARE = 0.7
"""Of those that run, each is thought to end where so many of its kind have. The sum over many hardly differs from that
of their means, which are a little above the median: lengths have a long tail. Somewhat more than the mean is asked,
since who is longer than that is forecast anew when it gets there, and memory promised then may be there no more."""

MOST_SHARE = 0.9
"""Who is to be let in is thought to end where so many of its kind have. It is one, whose length no other makes up for;
and what it will not use is the margin that those who run have, which matters most where they are few."""

_COVERAGE = 0.8
"""Share of outputs that intervals should hold."""
_LEAST_MISS, _MOST_MISS = 0.02, 0.6
_STEP = 0.01
"""How far one miss moves the next interval's: with 0.01 a thousand outputs settle what was off by a half (Gibbs &
Candes, section 4, take 0.005 to 0.05)."""

_PREFIX_TOKENS = 32
"""Prompts that begin with the same so many tokens begin alike. A chat template alone has fewer."""

_MAX_TENANTS = 256
_MAX_KINDS = 32
_TENANT_LENGTHS, _KIND_LENGTHS = 256, 64
"""Bounds: 256 tenants of 32 known kinds, 32 on trial and some 20 by length alone, of 64 lengths at most: 30 MiB."""


class Forecast(NamedTuple):
    """How long an output is thought to become.

    Attributes:
        likely_tokens: of the output, where many are summed up.
        most_tokens: of the output, where it alone matters.
        interval: (least, most) tokens that should hold 8 in 10; None where there are no data.
    """

    likely_tokens: int
    most_tokens: int
    interval: tuple[int, int] | None = None


class Forecaster(Protocol):
    """Forecasts outputs."""

    def forecast(self, request: Request) -> Forecast:
        """Return how long the output of ``request``, which has none yet, will be. It is asked once of each."""

    def renewed(self, request: Request) -> int:
        """Return how many output tokens ``request`` will have that has got beyond its forecast."""

    def ended(self, request: Request) -> None:
        """Learn from ``request``, which has ended."""


class LongestOutputs:
    """Thinks that all outputs are as long as they may be."""

    def forecast(self, request: Request) -> Forecast:
        """See :class:`Forecaster`."""
        most = _most_tokens(request)
        return Forecast(most, most)

    def renewed(self, request: Request) -> int:
        """See :class:`Forecaster`."""
        return _most_tokens(request)

    def ended(self, request: Request) -> None:
        """See :class:`Forecaster`."""


LONGEST = LongestOutputs()


@dataclass(slots=True)
class _Tenant:
    """What is known of a tenant's outputs.

    Attributes:
        all_lengths: of its last outputs.
        by_size: by how long they might have been.
        known, on_trial: by how their prompts began, too; the one that was used last comes last.
        miss: share of outputs that the next interval is to leave out.
    """

    all_lengths: Lengths
    by_size: dict[int, Lengths]
    known: OrderedDict[bytes, Lengths]
    on_trial: OrderedDict[bytes, Lengths]
    miss: float = 1.0 - _COVERAGE


class OutputForecasts:
    """Learns how long outputs are.

    Args:
        emit: where it is told whether an interval held.
    """

    def __init__(self, emit: Emit = ignore) -> None:
        self._emit = emit
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._stated: dict[Request, tuple[int, int]] = {}  # of those that have not ended

    def forecast(self, request: Request) -> Forecast:
        """See :class:`Forecaster`. Costs some 10 us: one walk over the lengths of a kind."""
        most = _most_tokens(request)
        tenant = self._tenants.get(request.tenant)
        lengths = None if tenant is None else self._lengths_of(tenant, request, 0)
        if tenant is None or lengths is None or not most:
            return Forecast(most, most)
        miss = tenant.miss / 2
        shares = (miss, LIKELY_SHARE, MOST_SHARE, 1.0 - miss)
        order = sorted(range(len(shares)), key=shares.__getitem__)
        found = dict(zip(order, lengths.quantiles(tuple(shares[at] for at in order)), strict=True))
        low, likely, highest, high = (_within(found[at], 1, most) for at in range(len(shares)))
        self._stated[request] = (low, high)
        return Forecast(likely, highest, (low, high))

    def renewed(self, request: Request) -> int:
        """See :class:`Forecaster`. Of those that were longer still; where few were, it is thought to double."""
        most, num_tokens = _most_tokens(request), request.num_output_tokens
        tenant = self._tenants.get(request.tenant)
        lengths = None if tenant is None else self._lengths_of(tenant, request, num_tokens)
        if lengths is None:
            return min(most, 2 * num_tokens + 1)
        (likely,) = lengths.quantiles((LIKELY_SHARE,), num_tokens)
        return _within(likely, min(most, num_tokens + 1), most)

    def ended(self, request: Request) -> None:
        """See :class:`Forecaster`."""
        stated = self._stated.pop(request, None)
        is_whole = request.has_whole_output
        if request.has_no_output or (request.finish_reason == "error" and not is_whole):
            return
        tenant = self._tenant(request.tenant)
        num_tokens = request.num_output_tokens
        if stated is not None and request.has_answer:
            is_within = stated[0] <= num_tokens <= stated[1]
            tenant.miss += _STEP * (1.0 - _COVERAGE - (not is_within))
            tenant.miss = min(max(tenant.miss, _LEAST_MISS), _MOST_MISS)
            self._emit(OutputForecastChecked(request.request_id, *stated, num_tokens))
        for lengths in (tenant.all_lengths, self._by_size(tenant, request), self._by_kind(tenant, request)):
            lengths.add(num_tokens, is_cut=not is_whole)

    # Inside.

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(Lengths(_TENANT_LENGTHS), {}, OrderedDict(), OrderedDict())
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(name)
        return tenant

    @staticmethod
    def _by_size(tenant: _Tenant, request: Request) -> Lengths:
        return tenant.by_size.setdefault(_size_of(request), Lengths(_KIND_LENGTHS))

    @staticmethod
    def _by_kind(tenant: _Tenant, request: Request) -> Lengths:
        """Return the lengths of a request's kind, to which one is about to be added."""
        kind = _kind_of(request)
        known, on_trial = tenant.known, tenant.on_trial
        lengths = known.get(kind)
        if lengths is not None:
            known.move_to_end(kind)
            return lengths
        lengths = on_trial.pop(kind, None) or Lengths(_KIND_LENGTHS)
        queue = known if len(lengths) + 1 >= LEAST_LENGTHS else on_trial
        queue[kind] = lengths
        if len(queue) > _MAX_KINDS:
            queue.popitem(last=False)
        return lengths

    @staticmethod
    def _lengths_of(tenant: _Tenant, request: Request, beyond: int) -> Lengths | None:
        """Return the lengths of the narrowest kind of which enough got beyond so many tokens; None if there is none."""
        for lengths in (
            tenant.known.get(_kind_of(request)),
            tenant.by_size.get(_size_of(request)),
            tenant.all_lengths,
        ):
            if lengths is not None and lengths.num_beyond(beyond) >= LEAST_LENGTHS:
                return lengths
        return None


def _most_tokens(request: Request) -> int:
    """Return how many output tokens a request may have."""
    return max(0, request.stop.max_total_tokens - request.num_prompt_tokens)


def _within(num_tokens: int | None, least: int, most: int) -> int:
    """Return a length as it can be; where nothing is known, the most."""
    return most if num_tokens is None else min(max(num_tokens, least), most)


def _size_of(request: Request) -> int:
    """Return how often 1 must be doubled to pass what a request may have of output: so sizes of a kind are alike."""
    return _most_tokens(request).bit_length()


def _kind_of(request: Request) -> bytes:
    """Return a name of a request's kind. It hangs on which prompts are equal, not on what they say."""
    begins = request.token_ids[: min(_PREFIX_TOKENS, request.num_prompt_tokens)].tobytes()
    space = request.namespace
    return blake2b(
        len(space).to_bytes(4, "big") + space + begins, digest_size=16, salt=bytes((_size_of(request),))
    ).digest()
