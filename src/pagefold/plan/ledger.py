"""Ledger: what the memory of a device goes to, part by part, each with the formula that it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.plan.span import GIB, NOTHING, Span

if TYPE_CHECKING:
    from pagefold.plan.memory import DeviceMemory, Memory
    from pagefold.plan.tables import Device

__all__ = ["Entry", "bar_legend", "entries_of", "ledger_bar"]

_BAR_WIDTH = 56
_SIGNS = {"weights": "#", "activations": "=", "outside": "+", "graphs": "%", "KV": "k", "drafts": "d", "free": "."}


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of a device's memory.

    Attributes:
        what: it is.
        span: how much it may be.
        formula: that it comes from.
    """

    what: str
    span: Span
    formula: str

    @property
    def size(self) -> str:
        """How much it is, for people."""
        if self.span.is_exact:
            return f"{self.span.likely / GIB:,.2f} GiB"
        return f"{self.span.likely / GIB:,.2f} GiB ({self.span.low / GIB:,.2f} to {self.span.high / GIB:,.2f})"


def entries_of(memory: Memory, part: DeviceMemory, device: Device) -> tuple[Entry, ...]:
    """Return the parts of a device's memory, which come to all of it."""
    shard, capacity, reserve = part.shard, part.capacity, part.reserve
    of_all = device.memory_bytes
    beside = "in 16 bit" if memory.weight_dtype.is_quantized and not memory.keeps_all_alike else ""
    kept = f", what no matrix is {beside}" if beside else ""
    more = capacity.weight_bytes - shard.weight_bytes
    extra = f" + {more / GIB:,.2f} GiB of ropes, towers and matrices in another form" if more > 0 else ""
    entries = [Entry("weights", part.weights, f"parameters of the device in {memory.weight_dtype.name}{kept}{extra}")]
    engine = memory.engine
    if not device.is_cpu:
        step = f"{memory.max_num_batched_tokens:,} tokens, {memory.max_num_seqs or engine.num_seqs(device):,} sequences"
        larger = f"the larger of layers and sampling ({engine.logit_bytes} B a logit) of a step of {step}"
        entries += [
            Entry("activations", reserve.activations, larger),
            Entry("outside", reserve.outside, "kernels and buffers of communication, outside of torch"),
        ]
        if reserve.graphs is not NOTHING and engine.graphs_in_budget:
            entries.append(Entry("graphs", reserve.graphs, "CUDA graphs, by layers"))
    share = "free memory" if device.is_cpu else f"{memory.utilization:g} x {of_all / GIB:,.2f} GiB"
    blocks = f"{capacity.num_blocks:,} blocks of {shard.layout.bytes_per_block:,} B"
    rest = "given" if part.kv.is_exact and not device.is_cpu else f"{share} - all above"
    entries.append(Entry("KV", part.kv, f"{rest} = {blocks}"))
    drafts = part.drafts
    if drafts.num_bytes:
        formula = f"logits of drafts {drafts.logit_bytes / GIB:,.2f} GiB"
        if drafts.share.layout is not None:
            kv = f"{capacity.draft_bytes // drafts.share.layout.bytes_per_block:,} blocks of its KV"
            formula = f"weights of the draft model {drafts.weight_bytes / GIB:,.2f} GiB + {kv} + {formula}"
        entries.append(Entry("drafts", Span.exactly(drafts.num_bytes + capacity.draft_bytes), formula))
    if reserve.graphs is not NOTHING and not engine.graphs_in_budget:
        entries.append(Entry("graphs", reserve.graphs, "CUDA graphs, by layers, beside the engine's share"))
    used = sum(entry.span.likely for entry in entries)
    entries.append(Entry("free", Span.exactly(max(0, of_all - used)), "what the engine leaves to others"))
    return tuple(entries)


def ledger_bar(entries: tuple[Entry, ...]) -> str:
    """Return the parts as a bar of characters, one sign a part."""
    whole = max(1, sum(entry.span.likely for entry in entries))
    bar, done = "", 0
    for entry in entries:
        done += entry.span.likely
        bar += _SIGNS[entry.what] * (round(done / whole * _BAR_WIDTH) - len(bar))
    return bar


def bar_legend(entries: tuple[Entry, ...]) -> str:
    """Say which sign is which part."""
    return "  ".join(f"{_SIGNS[entry.what]} {entry.what}" for entry in entries)
