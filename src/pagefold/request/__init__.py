"""A request on its way through, who asks for it and on what terms, and when things happened to it."""

from pagefold.request.caller import (
    ANYBODY,
    DEFAULT_RETENTION_PRIORITY,
    MAX_RETURNS_IN_S,
    MAX_WEIGHT,
    MIN_WEIGHT,
    Caller,
    WarmUp,
)
from pagefold.request.hint_pin import HintPin, hints_within
from pagefold.request.order_key import OrderKey
from pagefold.request.request import LEGAL_MOVES, FinishReason, Request, RequestStatus, StopRule
from pagefold.request.session import MAX_SESSION_ID, EndedSession, SessionRef, session_ref
from pagefold.request.times import RequestTimes

__all__ = [
    "ANYBODY",
    "DEFAULT_RETENTION_PRIORITY",
    "LEGAL_MOVES",
    "MAX_RETURNS_IN_S",
    "MAX_SESSION_ID",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "Caller",
    "EndedSession",
    "FinishReason",
    "HintPin",
    "OrderKey",
    "Request",
    "RequestStatus",
    "RequestTimes",
    "SessionRef",
    "StopRule",
    "WarmUp",
    "hints_within",
    "session_ref",
]
