"""Reading recordings of the server. No line is trusted: what no server writes is named, with its line."""

from __future__ import annotations

import base64
import binascii
import json
import sys
from array import array
from typing import TYPE_CHECKING

from pagefold.errors import TraceError
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.policies import POLICIES
from pagefold.kv.tenant_blocks import KVQuota
from pagefold.request import MAX_WEIGHT, MIN_WEIGHT, HintPin, SessionRef, hints_within
from pagefold.scheduler import ADMISSION_RULES, SCHEDULING_POLICIES
from pagefold.scheduler.guardrails import NO_CAP
from pagefold.sim.size_limits import MAX_BLOCKS, MAX_TOKENS
from pagefold.sim.traces.fields import Fields
from pagefold.sim.traces.recording import (
    Recorded,
    RecordedAdd,
    RecordedCut,
    RecordedReset,
    RecordedSessionEnd,
    RecordedSettings,
    RecordedStep,
    RecordedUnpin,
    Recording,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["is_recording", "read_recording"]

_VERSION = 2
_MARK = "pagefold_recording"
_TOKEN_BYTES = 4
_MOST = 2**62
_FOREVER_S = 1e15
"""Longer ago than any clock began."""


def is_recording(path: Path) -> bool:
    """Whether a file begins as recordings do. False also for what cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MARK) + 2).startswith(f'{{"{_MARK}'.encode())
    except OSError:
        return False


def read_recording(path: Path) -> Recording:
    """Return a recording; of one that was cut off, what there is.

    Raises:
        TraceError: it cannot be read, is of another version, or a line is damaged; says which, and what is wrong.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.readlines()
    except OSError as error:
        msg = f"The recording {path} cannot be read: {error.strerror}."
        raise TraceError(msg, remedy="Name a file that can be read.") from None
    except UnicodeDecodeError:
        msg = f"The recording {path} is no text."
        raise TraceError(msg, remedy="Record it again.") from None
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the server was killed while it wrote it
    reader = _Reader(path)
    for number, line in enumerate(lines, start=1):
        try:
            reader.take(_parsed(line))
        except ValueError as error:
            msg = f"Line {number} of the recording {path} is damaged: {error}."
            raise TraceError(msg, remedy="Record it again.") from None
    if reader.recording is None:
        msg = f"{path} is no recording of a server."
        raise TraceError(msg, remedy="Make one with pagefold serve --record-trace.")
    return reader.recording


def _parsed(line: str) -> Fields:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not fields:
        msg = f"it is no JSON object that says anything: {line.strip()[:60]!r}"
        raise ValueError(msg)
    return Fields(fields)


class _Reader:
    """Takes in line after line. What lines say must agree with each other too: a replay relies on it."""

    def __init__(self, path: Path) -> None:
        self.recording: Recording | None = None
        self._path = path
        self._adds: dict[int, RecordedAdd] = {}  # by number of each sample
        self._now_s = -_FOREVER_S

    def take(self, line: Fields) -> None:
        """Take in a line.

        Raises:
            ValueError: it says what no server says.
            TraceError: it is of another version.
        """
        if self.recording is None:
            self.recording = self._begin(line)
            return
        recording = self.recording
        if recording.is_whole:
            msg = "it comes after the end"
            raise ValueError(msg)
        if line.first == "add":
            recording.happened.append(self._add(line, recording))
        elif line.first == "tokens":
            self._end(line, recording)
        elif line.first == "end":
            recording.is_whole = True
        else:
            recording.happened.append(self._event(line, recording.settings))

    def _event(self, line: Fields, settings: RecordedSettings) -> Recorded:
        match line.first:
            case "cut":
                return RecordedCut(self._known(line, "cut"), line.flag("in_step"))
            case "unpin":
                return RecordedUnpin(
                    self._known(line, "unpin"), line.whole("hint", 1, MAX_TOKENS) if "hint" in line else 0
                )
            case "end_session":
                return RecordedSessionEnd(_session([*line.items("end_session"), ""]))
            case "reset":
                return RecordedReset()
            case "step":
                return self._step(line, settings)
            case other:
                msg = f"nothing is known of {other[:40]!r}"
                raise ValueError(msg)

    def _begin(self, line: Fields) -> Recording:
        version = line.get(_MARK)
        if version != _VERSION:
            msg = f"The recording {self._path} is of version {version}; this Pagefold reads version {_VERSION}."
            raise TraceError(msg, remedy="Record it again.")
        max_num_seqs = line.whole("max_num_seqs", 1, MAX_BLOCKS)
        threshold = "long_prefill_token_threshold"
        settings = RecordedSettings(
            num_blocks=line.whole("num_blocks", 1, MAX_BLOCKS),
            num_host_blocks=line.whole("num_host_blocks", 0, MAX_BLOCKS),
            block_size=line.whole("block_size", 1, MAX_TOKENS),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=line.whole("max_num_batched_tokens", max_num_seqs, _MOST),
            enable_prefix_caching=line.flag("enable_prefix_caching"),
            eviction_policy=line.one_of("eviction_policy", POLICIES),
            scheduling_policy=line.one_of("scheduling_policy", SCHEDULING_POLICIES),
            priority_aging_s=line.number("priority_aging_s", 1e-9, _FOREVER_S),
            max_pinned_share=line.number("max_pinned_share", 0, 1),
            pin_half_life_s=line.number("pin_half_life_s", 1e-9, _FOREVER_S),
            allow_streaming="allow_streaming" in line and line.flag("allow_streaming"),
            seals_blocks="seals_blocks" in line and line.flag("seals_blocks"),
            rules=tuple(_rule(each) for each in line.items("keeps")) or (KEEP_ALL,),
            admission=line.one_of("admission", ADMISSION_RULES) if "admission" in line else "prompt",
            max_num_partial_prefills=_places(line, "max_num_partial_prefills"),
            max_long_partial_prefills=_places(line, "max_long_partial_prefills"),
            has_quotas="has_quotas" in line and line.flag("has_quotas"),
            long_prefill_token_threshold=line.whole(threshold, 0, MAX_TOKENS) if threshold in line else 0,
        )
        if settings.allow_streaming and not settings.num_host_blocks:
            msg = "it allows streaming, and has no host blocks"
            raise ValueError(msg)
        if settings.allow_streaming and settings.seals_blocks:
            msg = "it allows streaming, and seals blocks"
            raise ValueError(msg)
        if settings.allow_streaming and settings.rules != (KEEP_ALL,):
            msg = "it allows streaming, and keeps windows"
            raise ValueError(msg)
        if settings.has_quotas and (settings.allow_streaming or settings.rules != (KEEP_ALL,)):
            msg = "it has quotas, and allows streaming or keeps windows"
            raise ValueError(msg)
        return Recording(self._path.name, settings)

    def _add(self, line: Fields, recording: Recording) -> RecordedAdd:
        settings = recording.settings
        number = line.whole("add", len(self._adds), len(self._adds))
        num_prompt_tokens = line.whole("prompt", 1, MAX_TOKENS)
        keeps_all = any(not rule.trims for rule in settings.rules)
        most_fitting = settings.num_blocks * settings.block_size if keeps_all else MAX_TOKENS
        if settings.allow_streaming:
            most_fitting += settings.num_host_blocks * settings.block_size
        add = RecordedAdd(
            number=number,
            num_samples=line.whole("samples", 1, settings.max_num_seqs),
            num_prompt_tokens=num_prompt_tokens,
            most_tokens=line.whole("most", num_prompt_tokens, most_fitting),
            namespace=line.whole("namespace", 0, len(self._adds)),
            arrival_s=line.number("at", -_FOREVER_S, _FOREVER_S),
            deadline_s=line.number("deadline", -_FOREVER_S, _FOREVER_S) if "deadline" in line else None,
            priority=line.whole("priority", -_MOST, _MOST) if "priority" in line else 0,
            has_prompt_logprobs="prompt_logprobs" in line and line.flag("prompt_logprobs"),
            returns_in_s=_returns(line) if "returns" in line else None,
            session=_session(line.items("session")) if "session" in line else None,
            pin=_pin(line) if "pin" in line else None,
            message_ends=line.wholes("message_ends", 1, num_prompt_tokens),
            hint_pins=_hint_pins(line.items("hint_pins"), num_prompt_tokens),
            has_stop_strings="stops" in line and line.flag("stops"),
            has_beams="beams" in line and line.flag("beams"),
            tenant=line.whole("tenant", 0, len(self._adds)) if "tenant" in line else 0,
            weight=line.number("weight", MIN_WEIGHT, MAX_WEIGHT) if "weight" in line else 1.0,
            quota=_quota(line.items("quota"), settings) if "quota" in line else None,
        )
        prompt = _hashes(line)
        if len(prompt) != num_prompt_tokens:
            msg = f"it has {len(prompt)} hashes of a prompt of {num_prompt_tokens} tokens"
            raise ValueError(msg)
        for each in range(number, number + add.num_samples):
            self._adds[each] = add
            recording.tokens[each] = prompt[:]
            recording.ended[each] = ""
        return add

    def _step(self, line: Fields, settings: RecordedSettings) -> RecordedStep:
        self._now_s = now_s = line.number("at", self._now_s, _FOREVER_S)
        return RecordedStep(
            step_id=line.whole("step", 0, _MOST),
            now_s=now_s,
            num_rows=line.whole("rows", 0, settings.max_num_seqs),
            num_computed=line.whole("computed", 0, _MOST) if "computed" in line else 0,
            num_read=line.whole("read", 0, _MOST) if "read" in line else 0,
            took_s=line.number("took", 0, _FOREVER_S) if "took" in line else 0.0,
            has_failed="failed" in line and line.flag("failed"),
            hits=tuple(_hit(each, len(self._adds)) for each in line.items("hits")),
            evicted=line.wholes("evicted", 0, settings.num_blocks - 1),
            damaged=line.wholes("damaged", 0, settings.num_host_blocks - 1),
            corrupted=line.wholes("corrupted", 0, _MOST),
            drafts=tuple(_drafts(each, len(self._adds)) for each in line.items("drafts")),
            prefill_cap_tokens=line.whole("prefill_cap", 1, _MOST) if "prefill_cap" in line else NO_CAP,
        )

    def _end(self, line: Fields, recording: Recording) -> None:
        number = self._known(line, "tokens")
        output = _hashes(line)
        add = self._adds[number]
        if recording.ended[number] or len(recording.tokens[number]) > add.num_prompt_tokens:
            msg = f"request {number} has ended before"
            raise ValueError(msg)
        if add.num_prompt_tokens + len(output) > add.most_tokens:
            msg = f"request {number} has {len(output)} tokens of output, more than it may have"
            raise ValueError(msg)
        recording.tokens[number].extend(output)
        recording.ended[number] = line.text("ended")

    def _known(self, line: Fields, name: str) -> int:
        number = line.whole(name, 0, _MOST)
        if number not in self._adds:
            msg = f"its {name} is {number}, a request that never came"
            raise ValueError(msg)
        return number


def _rule(value: object) -> KeepRule:
    num_sinks: object = 0
    if isinstance(value, list) and len(value) == 4 and value[1] is True:  # noqa: PLR2004 - chunks that are seen whole
        msg = "its server kept a share of older tokens (kv_keep), and what was kept is not recorded"
        raise ValueError(msg)
    if isinstance(value, list) and len(value) == 3:  # noqa: PLR2004 - sinks are told of where there are any
        *value, num_sinks = value
    window, is_chunked = Fields.pair("keeps", value)
    if not isinstance(is_chunked, bool):
        msg = f"its keeps has {is_chunked!r}, not true or false"
        raise ValueError(msg)  # noqa: TRY004 - of JSON
    sinks = Fields.as_whole("keeps", num_sinks, 0, MAX_TOKENS)
    if sinks and (window is None or is_chunked):
        msg = f"its keeps has {sinks} sinks beside no window that slides"
        raise ValueError(msg)
    return KeepRule(None if window is None else Fields.as_whole("keeps", window, 1, MAX_TOKENS), is_chunked, sinks)


def _places(line: Fields, name: str) -> int | None:
    """Return how many prompts may be partly computed; None for any number."""
    return line.whole(name, 1, MAX_BLOCKS) if name in line and line.get(name) is not None else None


def _returns(line: Fields) -> float:
    return 0.0 if line.get("returns") is True else line.number("returns", 0, _FOREVER_S)  # as it was told before


def _session(digests: list[object]) -> SessionRef:
    if len(digests) != len(SessionRef._fields) or not all(isinstance(digest, str) for digest in digests):
        msg = "its session is no three digests"
        raise ValueError(msg)
    try:
        return SessionRef(*(bytes.fromhex(str(digest)) for digest in digests))
    except ValueError:
        msg = "a digest of its session is no number in hexadecimal"
        raise ValueError(msg) from None


def _pin(line: Fields) -> tuple[float | None, float]:
    ttl_s, priority = Fields.pair("pin", line.get("pin"))
    return (
        None if ttl_s is None else Fields.as_number("pin", ttl_s, 0, _FOREVER_S),
        Fields.as_number("pin", priority, -_FOREVER_S, _FOREVER_S),
    )


def _hint_pins(values: list[object], num_prompt_tokens: int) -> tuple[HintPin, ...]:
    hints: list[HintPin] = []
    for value in values:
        match value:
            case [int(num_tokens), (int() | float()) as ttl_s] if 1 <= num_tokens <= num_prompt_tokens:
                hints.append(HintPin(num_tokens, Fields.as_number("hint_pins", ttl_s, 0, _FOREVER_S)))
            case _:
                msg = "its hint_pins are no (tokens of the prompt, seconds)"
                raise ValueError(msg)
    return hints_within(hints, num_prompt_tokens)


def _quota(values: list[object], settings: RecordedSettings) -> KVQuota:
    match values:
        case [int(floor), None] if settings.has_quotas and 0 <= floor < settings.num_blocks:
            return KVQuota(floor)
        case [int(floor), int(cap)] if settings.has_quotas and 0 <= floor <= cap <= settings.num_blocks and cap:
            return KVQuota(floor, cap)
        case _:
            msg = "its quota is no (floor, cap) in blocks, or the server had none"
            raise ValueError(msg)


def _drafts(value: object, num_samples: int) -> tuple[int, int, int]:
    """Return (sample, drafts, right ones) of one entry of a step's drafts."""
    match value:
        case [int(number), int(num_drafts), int(num_right)] if 0 <= number < num_samples:
            if -1 <= num_right <= num_drafts <= MAX_TOKENS:
                return number, num_drafts, num_right
    msg = "its drafts are no (request, number, right ones)"
    raise ValueError(msg)


def _hit(value: object, num_samples: int) -> tuple[int, int]:
    number, num_found = Fields.pair("hits", value)
    return (Fields.as_whole("hits", number, 0, num_samples - 1), Fields.as_whole("hits", num_found, 0, MAX_TOKENS))


def _hashes(line: Fields) -> array[int]:
    try:
        packed = base64.b64decode(line.text("hashes"), validate=True)
    except binascii.Error:
        packed = b"?"
    if len(packed) % _TOKEN_BYTES:
        msg = "its hashes are no numbers of 32 bits in base64"
        raise ValueError(msg)
    tokens = array("i")
    assert tokens.itemsize == _TOKEN_BYTES
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    if tokens and min(tokens) < 0:
        msg = "a hash is negative"
        raise ValueError(msg)
    return tokens
