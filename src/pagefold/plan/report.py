"""What a plan says: figures by name for ``--json``, and rows of tables for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.memory.capacity import human_bytes
from pagefold.plan.ledger import bar_legend, entries_of, ledger_bar
from pagefold.plan.memory import tokens_in
from pagefold.plan.weights import AS_IN_FILE

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout, Codec, LayerKV
    from pagefold.plan.floors import Floor
    from pagefold.plan.memory import DeviceMemory
    from pagefold.plan.plan import Plan
    from pagefold.plan.refusal import Remedy
    from pagefold.plan.span import Span
    from pagefold.plan.techniques import Technique

__all__ = [
    "VERDICTS",
    "Section",
    "figures",
    "formula",
    "headline",
    "notes",
    "refusal_figures",
    "remedy_lines",
    "sections",
    "technique_rows",
]


_ALIKE = 0.005
"""Requests that are told as one number."""
VERDICTS = {
    True: "fits, also where all is as unfavourable as it may be",
    False: "may not fit: it does where all is favourable, and not where all is unfavourable",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A table of two columns: what, and how much.

    Attributes:
        title: above it.
        rows: rows of the table.
    """

    title: str
    rows: tuple[tuple[str, str], ...]


def headline(plan: Plan) -> str:
    """Return what was asked, in a line."""
    question, memory = plan.question, plan.memory
    parts = [question.shape.name, f"weights in {memory.weight_dtype.name}", f"KV in {memory.codec.name}"]
    settings = question.settings
    devices = question.device.name if settings.num_devices == 1 else f"{settings.num_devices} x {question.device.name}"
    if settings.num_devices > 1:
        devices += f" (TP {settings.tensor_parallel_size}, PP {settings.pipeline_parallel_size})"
    return f"{', '.join(parts)}; on {devices}"


def formula(layout: CacheLayout) -> list[str]:
    """Return the sums of bytes a token and a block, written out with their numbers."""
    kinds: dict[LayerKV, int] = {}
    for layer in layout.layers:
        kinds[layer] = kinds.get(layer, 0) + 1
    terms = [_term(kind, num_layers, kind.codec or layout.codec) for kind, num_layers in kinds.items()]
    lines = [f"bytes a token = {' + '.join(terms)} = {layout.bytes_per_token:,}"]
    if layout.lasting_bytes_per_token != layout.bytes_per_token:
        lines.append(f"of them for every token however long the sequence: {layout.lasting_bytes_per_token:,}")
    if len(layout.groups) == 1:
        size = layout.groups[0].block_size
        lines.append(f"bytes a block = {size} tokens x {layout.bytes_per_token:,} = {layout.bytes_per_block:,}")
    else:
        each = len(max(layout.groups, key=lambda group: len(group.layers)).layers)
        groups = f"{len(layout.groups)} groups of up to {each} layers"
        lines.append(f"bytes a block = {layout.bytes_per_block:,}: {groups}, of {_sizes(layout)} tokens")
    if layout.residual_bytes:
        lines.append(f"unsealed block of a running sequence, in 16 bit = {layout.residual_bytes:,} bytes")
    if layout.state_bytes:
        lines.append(f"state a sequence = {layout.state_bytes:,} bytes = {layout.num_state_blocks} blocks")
    return lines


def _term(kind: LayerKV, num_layers: int, codec: Codec) -> str:
    """Return what so many layers of a kind add to the bytes of a token."""
    key, value = codec.key_bytes(kind.key_dim), codec.value_bytes(kind.value_dim)
    if kind.value_dim == 0:
        what = f"{num_layers} layers x {key} B (latent vector of {kind.key_dim})"
    elif key == value:
        what = f"2 (K and V) x {num_layers} layers x {kind.num_kv_heads} KV heads x {key} B (head_dim {kind.key_dim})"
    else:
        what = f"{num_layers} layers x {kind.num_kv_heads} KV heads x ({key} B of K + {value} B of V)"
    keeps = kind.keeps
    if keeps.window is not None:
        sinks = f"the first {keeps.num_sinks:,} and a " if keeps.num_sinks else ""
        what += f" [{sinks}{'chunk' if keeps.is_chunked else 'window'} of {keeps.window:,} tokens]"
    return what if kind.codec is None else f"{what} [{kind.codec.name}]"


def _sizes(layout: CacheLayout) -> str:
    return " or ".join(str(size) for size in sorted({group.block_size for group in layout.groups}))


def figures(plan: Plan) -> dict[str, Any]:
    """Return the plan by names, ready for JSON. Sizes are bytes, times seconds."""
    question, memory, load, timing = plan.question, plan.memory, plan.load, plan.timing
    shape, device, settings = question.shape, question.device, question.settings
    tightest = memory.tightest
    result: dict[str, Any] = {
        "fits": True if memory.fits else None,
        "verdict": "fits" if memory.fits else "may not fit",
        "engine": memory.engine.label,
        "model": shape.name,
        "model_source": shape.source,
        "device": device.name,
        "device_source": device.source,
        "num_devices": settings.num_devices,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "dtype": memory.dtype,
        "weight_dtype": memory.weight_dtype.name,
        "kv_cache_dtype": memory.codec.name,
        "num_parameters": shape.num_parameters,
        "num_active_parameters": round(shape.num_active_parameters) + shape.output_parameters,
        "max_positions": shape.max_positions,
        "kv_bytes_per_token": memory.layout.bytes_per_token,
        "kv_bytes_per_token_beyond_windows": memory.layout.lasting_bytes_per_token,
        "kv_bytes_per_block": memory.layout.bytes_per_block,
        "state_bytes_per_sequence": memory.layout.state_bytes,
        "residual_bytes_per_sequence": memory.layout.residual_bytes,
        "formula": formula(memory.layout),
        "block_size": memory.layout.block_size,
        "device_memory_bytes": device.memory_bytes,
        "gpu_memory_utilization": None if device.is_cpu else memory.utilization,
        "weight_bytes": sum(each.capacity.weight_bytes for each in memory.devices) * settings.tensor_parallel_size,
        "weight_bytes_per_device": tightest.capacity.weight_bytes,
        "activation_bytes": tightest.activation_bytes,
        "memory": {
            entry.what: _span(entry.span) | {"formula": entry.formula} for entry in entries_of(memory, tightest, device)
        },
        "max_num_seqs": memory.max_num_seqs,
        "max_num_batched_tokens": memory.max_num_batched_tokens,
        "kv_budget_bytes": tightest.capacity.kv_budget_bytes,
        "num_blocks": tightest.capacity.num_blocks,
        "num_tokens": memory.num_tokens,
        "max_model_len": memory.max_model_len,
        "max_concurrency": memory.max_concurrency,
        "max_concurrency_ends": list(memory.concurrency_ends),
        "workload": {
            "name": load.workload.name,
            "mean_prompt_tokens": load.workload.mean_prompt,
            "mean_output_tokens": load.workload.mean_output,
            "num_too_long": load.num_too_long,
            "prefix_len": load.workload.prefix_len,
            "prefix_share": load.workload.prefix_share,
            "turns": load.workload.turns,
            "pause_s": load.workload.pause_s,
        },
        "workload_blocks_per_request": load.rounding.full_blocks,
        "workload_concurrency": load.reached.mean,
        "workload_concurrency_peak": load.reached.peak,
        "workload_concurrency_at_full_length": load.full,
        "workload_concurrency_with_sharing": load.reached_shared.mean,
        "workload_concurrency_with_sharing_at_full_length": load.full_shared,
        "preemptions_per_request": load.reached_shared.preemptions_per_request,
        "expected_waste": load.waste,
        "binds": timing.binds,
        "prefill_floor": _floor(timing.prefill),
        "decode_floor": _floor(timing.decode),
        "decode_floor_alone": _floor(timing.decode_alone),
        "requests_per_s_bound": timing.requests_per_s,
        "output_tokens_per_s_bound": timing.output_tokens_per_s,
        "break_even_bytes_per_s": plan.break_even,
        "devices": [_device_figures(each) for each in memory.devices],
        "techniques": [_technique_figures(each) for each in plan.techniques],
        "notes": notes(plan),
    }
    if plan.cost is not None:
        result["price_per_hour"] = question.price_per_hour
        result["monthly_cost"] = plan.cost.monthly
        result["cost_per_million_output_tokens"] = plan.cost.per_million_output_tokens
    return result


def _span(span: Span) -> dict[str, Any]:
    return {"low": span.low, "likely": span.likely, "high": span.high}


def _floor(floor: Floor) -> dict[str, Any]:
    return {
        "seconds": floor.seconds,
        "compute_s": floor.compute_s,
        "bandwidth_s": floor.bandwidth_s,
        "binds": floor.binds,
    }


def _device_figures(device: DeviceMemory) -> dict[str, Any]:
    shard = device.shard
    return {
        "stage": shard.stage,
        "layers": [shard.first_layer, shard.end_layer],
        "usable_bytes": device.usable_bytes,
        "weight_bytes": device.capacity.weight_bytes,
        "activation_bytes": device.activation_bytes,
        "kv_bytes_per_token": shard.layout.bytes_per_token,
        "kv_bytes_per_block": shard.layout.bytes_per_block,
        "outside_bytes": _span(device.reserve.outside),
        "graph_bytes": _span(device.reserve.graphs),
        "kv_budget_bytes": device.capacity.kv_budget_bytes,
        "kv_bytes": _span(device.kv),
        "num_blocks": device.capacity.num_blocks,
        "max_concurrency": device.capacity.max_concurrency,
    }


def _technique_figures(technique: Technique) -> dict[str, Any]:
    return {
        "name": technique.name,
        "gain": technique.gain,
        "gain_per_device": technique.gain_per_device,
        "throughput_gain_per_device": technique.throughput_gain,
        "ttft_gain_at_most": technique.ttft_gain,
        "quality_cost": technique.quality_cost,
        "latency_cost": technique.latency_cost,
        "flags": technique.flags,
        "note": technique.note,
        "monthly_saving": technique.monthly_saving,
    }


def notes(plan: Plan) -> list[str]:
    """Return what a reader should know beside the numbers."""
    shape, device, said = plan.question.shape, plan.question.device, []
    engine = plan.memory.engine
    if shape.not_served:
        whose = "an engine that does" if engine.is_ours else engine.label
        said.append(f"Pagefold's own server does not run {shape.not_served} yet: the figures are of {whose}.")
    elif not device.is_cpu:
        whose = "before it measures." if engine.is_ours else f"of {engine.label}; --engine pagefold plans our own."
        said.append(
            "Pagefold's own server runs on a CPU, or on one NVIDIA card, where nobody has measured it yet: the figures "
            f"are {whose}"
        )
    if shape.is_estimate and shape.exact_parameters is None:
        said.append(
            f"Parameters of {shape.model_type or 'this family'} are estimated; a folder with weights is counted."
        )
    if plan.memory.weight_dtype.is_quantized:
        said.append(_quantized_note(plan))
    if plan.load.num_too_long:
        said.append(f"{plan.load.num_too_long:,} requests of the workload are longer than max_model_len and left out.")
    if plan.load.is_likened:
        said.append(
            "How many requests a server reaches is estimated: layers of this model have a state, or blocks of several "
            "sizes, and what is simulated is a cache whose layers are all alike, in which as many requests fit."
        )
    if not plan.load.fills_memory:
        tokens = plan.memory.max_num_batched_tokens
        why = f"steps of {tokens:,} tokens (--max-num-batched-tokens) are full of prefill"
        if plan.memory.max_num_seqs is not None:
            why = f"--max-num-seqs {plan.memory.max_num_seqs} ends it, or {why}"
        said.append(f"The memory would hold more requests than run at once: {why}.")
    if device.is_cpu and plan.timing.prefill.seconds is None:
        said.append("For floors, give --device-bandwidth and --device-flops.")
    return said


def _quantized_note(plan: Plan) -> str:
    """Say which weights are counted in fewer bits."""
    shape, stored = plan.question.shape, plan.memory.weight_dtype
    if stored.name == AS_IN_FILE:
        return f"Quantized matrices lie as the GGUF file has them: {float(stored.bits):.2f} bits a weight, all counted."
    if plan.memory.keeps_all_alike:
        kept = shape.embedding_parameters + shape.head_parameters
        more = human_bytes(int(kept * (16 - stored.bits) / 8))
        return f"All weights are counted in {stored.name}; with embeddings in 16 bit they are {more} larger."
    what = "all but routed experts" if stored.is_of_experts else "embeddings, norms, and what the config names"
    return f"Weights are in {stored.name}; {what} in 16 bit."


def sections(plan: Plan) -> list[Section]:
    """Return the plan as tables of two columns."""
    return [_bytes_section(plan), _memory_section(plan), _load_section(plan), _time_section(plan)]


def _bytes_section(plan: Plan) -> Section:
    lines = (line.partition(" = ") for line in formula(plan.memory.layout))
    return Section("KV", tuple((what, how) if how else ("", what) for what, _, how in lines))


def _memory_section(plan: Plan) -> Section:
    question, memory = plan.question, plan.memory
    rows: list[tuple[str, str]] = [("engine", f"{memory.engine.label}; {VERDICTS[memory.fits]}")]
    for device in memory.devices:
        shard, capacity = device.shard, device.capacity
        prefix = ""
        if len(memory.devices) > 1:
            prefix = f"stage {shard.stage} (layers {shard.first_layer}-{shard.end_layer - 1}): "
        entries = entries_of(memory, device, question.device)
        rows += [(f"{prefix}{entry.what}", f"{entry.size}: {entry.formula}") for entry in entries]
        rows += [("", ledger_bar(entries)), ("", bar_legend(entries))]
        num_tokens = tokens_in(shard.layout, capacity.num_blocks)
        rows.append((f"{prefix}KV budget", f"{capacity.kv_budget_bytes / 1e9:,.2f} GB = {num_tokens:,} tokens"))
        if capacity.num_residuals:
            size = f"{capacity.residual_bytes / 1e9:,.2f} GB of it"
            rows.append((f"{prefix}unsealed blocks", f"{size}, in 16 bit, of {capacity.num_residuals} requests"))
        if question.settings.num_devices > 1:
            of_device = f"{shard.layout.bytes_per_token:,} B a token, {shard.layout.bytes_per_block:,} B a block"
            rows.append((f"{prefix}KV on each device", of_device))
    if len(memory.devices) > 1:
        rows.append(("the tightest binds", f"stage {memory.tightest.shard.stage}"))
    return Section("Memory of a device", tuple(rows))


def _load_section(plan: Plan) -> Section:
    load, memory = plan.load, plan.memory
    least, most = memory.concurrency_ends
    between = "" if most - least < _ALIKE else f" ({least:,.2f} to {most:,.2f})"
    rows = [
        ("at max_model_len", f"{memory.max_concurrency:,.2f} requests{between} of {memory.max_model_len:,} tokens"),
        ("workload", load.workload.name),
        ("each at its full length", f"{load.full:,.1f} requests of {load.rounding.full_blocks:,.1f} blocks"),
        ("as a server reaches it", f"{load.reached.mean:,.1f} on average, {load.reached.peak:,.0f} at most"),
    ]
    if load.workload.prefix_len:
        shared = f"{load.reached_shared.mean:,.1f} on average; {load.full_shared:,.1f} at full length"
        rows.append(("with the prefix held once", shared))
    rows.append(("waste", f"{load.waste:.2%} of what running requests hold"))
    return Section("Requests at once", tuple(rows))


def _time_section(plan: Plan) -> Section:
    timing = plan.timing
    rows = [
        ("prefill of a mean prompt", _time(timing.prefill)),
        (f"decode step of {timing.concurrency:,.0f}", _time(timing.decode)),
        ("decode step of one", _time(timing.decode_alone)),
    ]
    if timing.output_tokens_per_s is not None and timing.requests_per_s is not None:
        rate = f"{timing.requests_per_s:,.2f} requests/s, {timing.output_tokens_per_s:,.0f} output tokens/s"
        rows += [("throughput, at most", rate), ("what binds", str(timing.binds))]
    if plan.break_even is not None:
        rows.append(("loading beats computing from", f"{plan.break_even / 1e9:,.2f} GB/s"))
    if plan.cost is not None:
        price = plan.cost.per_million_output_tokens
        per_token = "" if price is None else f"; at least {price:,.2f} for a million output tokens"
        rows.append(("a month (30 days)", f"{plan.cost.monthly:,.0f}{per_token}"))
    return Section("Time and money", tuple(rows))


def _time(floor: Floor) -> str:
    if floor.seconds is None:
        return "not known without the device's peaks"
    assert floor.compute_s is not None
    assert floor.bandwidth_s is not None
    parts = f"operations {floor.compute_s * 1e3:,.2f}, memory {floor.bandwidth_s * 1e3:,.2f}"
    return f">= {floor.seconds * 1e3:,.2f} ms, {floor.binds} ({parts})"


def technique_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each technique: name, gain, flags, what it is worth a month, and its costs with a note."""
    rows: list[tuple[str, ...]] = []
    for technique in plan.techniques:
        gain = f"{technique.gain:.2f} x requests"
        if technique.gain_per_device != technique.gain:
            gain += f" ({technique.gain_per_device:.2f} x a device)"
        if technique.throughput_gain is not None and technique.gain != 1:
            gain += f", {technique.throughput_gain:.2f} x throughput" + (
                " a device" if technique.gain_per_device != technique.gain else ""
            )
        if technique.ttft_gain > 1:
            first = f"first token up to {technique.ttft_gain:.1f} x sooner"
            gain = first if technique.gain == 1 else f"{gain}, {first}"
        said = [
            f"{what}: {cost}"
            for what, cost in (("quality", technique.quality_cost), ("latency", technique.latency_cost))
            if cost != "none"
        ]
        worth = "" if technique.monthly_saving is None else f"{technique.monthly_saving:,.0f}"
        rows.append(
            (technique.name, gain, technique.flags, worth, "; ".join([*said, technique.note]).removesuffix("; "))
        )
    return rows


def refusal_figures(message: str, missing_bytes: int, remedies: list[Remedy]) -> dict[str, Any]:
    """Return a refusal by names, ready for JSON."""
    return {
        "fits": False,
        "verdict": "does not fit",
        "error": message,
        "missing_bytes": missing_bytes,
        "nearest_settings": [
            {
                "flags": remedy.flags,
                "max_model_len": remedy.max_model_len,
                "max_concurrency": remedy.max_concurrency,
                "num_devices": remedy.num_devices,
            }
            for remedy in remedies
        ],
    }


def remedy_lines(remedies: list[Remedy]) -> list[str]:
    """Return what to change, a line each."""
    if not remedies:
        return ["Nothing near it fits: take a smaller model, or devices with more memory."]
    lines = ["The nearest settings that fit:"]
    for remedy in remedies:
        what = f"{remedy.max_concurrency:,.2f} requests of {remedy.max_model_len:,} tokens"
        devices = f" on {remedy.num_devices} devices" if remedy.num_devices > 1 else ""
        lines.append(f"  {remedy.flags}   ({what}{devices})")
    return lines
