"""Errors for users: each says what was wrong, which value it was, and what to do about it.

``assert`` is for our own bugs; everything that a user can cause is one of these types. The server maps them to an HTTP
status and OpenAI's error format (``server/errors.py``), the command line to one line and an exit code.
"""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "AdapterNotFoundError",
    "BudgetTooSmallError",
    "CardMemoryError",
    "ConfigError",
    "DoesNotFitError",
    "EngineStoppedError",
    "InvalidRequestError",
    "LicenseNotAcceptedError",
    "LoadShedError",
    "ModelNotFoundError",
    "NotCalibratedError",
    "PagefoldError",
    "PinQuotaError",
    "PrefixMismatchError",
    "QualityError",
    "QueueFullError",
    "RateLimitError",
    "RequestTimeoutError",
    "StepFailedError",
    "TraceError",
    "UnsupportedModelError",
]


class PagefoldError(Exception):
    """Base of every error meant for a user.

    Args:
        message: what was wrong, with the value.
        remedy: what the user can do about it; appended to the message.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message} {remedy}".strip())


class ConfigError(PagefoldError):
    """A setting, or a combination of settings, that cannot work. Raised before weights are loaded."""


class NotCalibratedError(ConfigError):
    """A setting takes what ``pagefold calibrate`` finds out of a model, and nobody has run that for its weights."""


class DoesNotFitError(ConfigError):
    """The memory does not hold what is asked for.

    Args:
        missing_bytes: how much memory more there would have to be; 0 where another setting is the remedy.
    """

    def __init__(self, message: str, *, missing_bytes: int = 0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.missing_bytes = missing_bytes


class BudgetTooSmallError(DoesNotFitError):
    """The KV budget holds less than one request of ``max_model_len`` tokens."""


class PrefixMismatchError(ConfigError):
    """A prefix file whose blocks are those of another model, codec, decoder or block size: says which, and both."""


class QualityError(ConfigError):
    """A codec that was measured on this model, and changes what the model says more than the floor allows."""


class AdapterError(ConfigError):
    """A LoRA adapter that cannot be served with this model, or not now: says what of it, and nothing is loaded."""


class AdapterNotFoundError(AdapterError):
    """There is no LoRA adapter of this name, or none in this folder."""


class TraceError(ConfigError):
    """A trace that cannot be read, or one of its lines that contradicts itself; says which."""


class ModelNotFoundError(PagefoldError):
    """A model name that is neither a built-in name, a folder with weights, nor a hub id that can be fetched."""


class LicenseNotAcceptedError(PagefoldError):
    """A built-in model whose terms somebody must accept before it is downloaded, and nobody has."""


class UnsupportedModelError(PagefoldError):
    """A model whose attention Pagefold would compute wrongly, or not at all: refused by name."""


class InvalidRequestError(PagefoldError):
    """A request that can never be served as it was sent.

    Args:
        param: the request field at fault, in OpenAI's spelling.
    """

    def __init__(self, message: str, *, param: str | None = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.param = param


class StepFailedError(PagefoldError):
    """The request made steps fail, or the device made all of them, or what it computes is NaN or infinite."""


class EngineStoppedError(PagefoldError):
    """The engine is draining or has stopped, and takes no more requests."""


class QueueFullError(PagefoldError):
    """More requests are here than may wait.

    Args:
        retry_after_s: when it is worth trying again.
    """

    def __init__(self, message: str, *, retry_after_s: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s


class RateLimitError(PagefoldError):
    """A tenant has used up the tokens that it may for now.

    Args:
        retry_after_s: when it has enough again.
    """

    def __init__(self, message: str, *, retry_after_s: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s


class LoadShedError(QueueFullError):
    """The request would wait longer for its first token than the server's target allows, so it was not taken.

    Args:
        reason: what would not be kept, as metrics name it.
        expected_s: seconds that it was expected to wait.
        threshold_s: seconds that this must not pass.
        target_s: of the time to the first token, in seconds.
        retry_after_s: whole seconds until the queue is expected to be short enough.
    """

    def __init__(  # noqa: PLR0913 - what a client is told, by name
        self,
        message: str,
        *,
        reason: str,
        expected_s: float,
        threshold_s: float,
        target_s: float,
        retry_after_s: int,
        remedy: str = "",
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, remedy=remedy)
        self.reason = reason
        self.expected_s = expected_s
        self.threshold_s = threshold_s
        self.target_s = target_s


class PinQuotaError(PagefoldError):
    """More blocks would be pinned than may be."""


class TierError(PagefoldError):
    """A tier did not do what was asked for; what is cached in it may still be found."""


class CardMemoryError(PagefoldError):
    """A card had too little memory for a step: more of it was in use than when the engine was started."""


class RequestTimeoutError(PagefoldError):
    """The request had not finished when its time was up."""
