"""Record: what one request took."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Record"]


@dataclass(slots=True)
class Record:
    """One request, as its client saw it.

    Attributes:
        index: of its prompt.
        start_s: when it was sent, in seconds after the first one.
        ttft_s: seconds to the first piece of output.
        itls_s: seconds between pieces of output.
        latency_s: seconds to the end.
        prompt_tokens, output_tokens: as the server counts them.
        cached_tokens: of the prompt's tokens, those that the server had in its cache; None where it does not say.
        error: why it failed; empty where it did not.
    """

    index: int
    start_s: float = 0.0
    ttft_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None where there is none."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None
