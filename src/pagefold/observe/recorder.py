"""TraceRecorder: a subscriber that writes what a server did into a file, so that the simulator can do it again.

What it writes is all that timing and the model decided: which requests came, were cancelled and were sampled how long,
before which step and when; and what each step found and evicted, to compare with. Of tokens only hashes: token ``i`` is
31 bits of BLAKE2b of all tokens up to it, under a random key that is made for the recording and kept out of the file.
So equal prefixes are equal, down to the token, and nothing else can be read from them. Prompts are written when they
come and outputs when they end: of a server that is killed, what is there can be replayed.

Hashing and writing are the business of a thread of its own; an event costs the engine what it takes to queue it.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import secrets
import sys
import threading
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import ConfigError
from pagefold.events import (
    BlockEvicted,
    CacheReset,
    DraftsVerified,
    HostTransfer,
    PinDropped,
    PrefixLookup,
    RequestAdded,
    RequestCorrupted,
    RequestCut,
    RequestFinished,
    SessionClosed,
    StepAbandoned,
    StepApplied,
    StepPlanned,
)
from pagefold.files.private import open_private
from pagefold.kv.codec import CODECS, KV_CACHE_DTYPES
from pagefold.kv.keep import KEEP_ALL
from pagefold.kv.pins import hint_id
from pagefold.kv.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pagefold.config import EngineConfig
    from pagefold.events import Event
    from pagefold.kv.keep import KeepRule

__all__ = ["TraceRecorder"]

_log = logging.getLogger(__name__)

_VERSION = 2
_SETTINGS = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "eviction_policy",
    "scheduling_policy",
    "priority_aging_s",
    "admission",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
    "max_pinned_share",
    "allow_streaming",
    "pin_half_life_s",
)
_KEY_BYTES = 32
_STATE_BYTES = 16
_PATIENCE_S = 30.0

_DIGEST_BYTES = 16
_MAX_NAMESPACES = 2**18
_MAX_WAITING_TOKENS, _MAX_WAITING_LINES = 2**25, 2**18
"""What is kept while it is recorded: some 100 bytes a namespace, 4 a token and 500 a line."""


class TraceRecorder:
    """Writes a recording, as JSON lines, for its owner alone; events come from one thread.

    Args:
        file: to write; what is there is replaced when the recording begins.
        clock: seconds, of what a step took.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, file: Path, clock: Callable[[], float]) -> None:
        try:
            # To append: a server that does not start leaves what is there.
            fd = open_private(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._out = os.fdopen(fd, "a", encoding="utf-8")
        except OSError as error:
            msg = f"Cannot write {file}: {error.strerror}."
            raise ConfigError(msg, remedy="Name a file in a folder that can be written.") from None
        self._file = file
        self._clock = clock
        self._numbers: dict[str, int] = {}  # sample id -> its number, of those that have not ended
        self._tokens: dict[int, tuple[array[int], int]] = {}  # of the same, by number; and how many are the prompt
        self._pins: dict[str, tuple[int, int]] = {}  # id -> request that it is named after, tokens of a hint or 0
        self._num_samples = 0
        self._namespaces: dict[bytes, int] = {}  # digest -> number
        self._tenants: dict[str, int] = {}  # likewise: a few, whom a key file names
        self._num_put = self._num_written = 0  # tokens: each counted by one thread only
        self._step = _Step()
        self._is_broken = False
        self._lines: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="trace-recorder", daemon=True)
        self._writer.start()

    def begin(
        self, config: EngineConfig, num_blocks: int, num_host_blocks: int, rules: Iterable[KeepRule] = (KEEP_ALL,)
    ) -> None:
        """Write what the engine was started with, and how many blocks it has: before its first event.

        Args:
            config: of the engine.
            num_blocks: of the device.
            num_host_blocks: of the host.
            rules: what each cache group keeps.
        """
        settings = {name: getattr(config, name) for name in _SETTINGS}
        if config.eviction_policy == "default":  # which may be another one day
            settings["eviction_policy"] = DEFAULT_POLICY
        self._out.truncate(0)
        codec = CODECS.get(KV_CACHE_DTYPES.get(config.kv_cache_dtype, ""))
        settings["seals_blocks"] = codec is not None and codec.channel_tokens > 0
        settings["keeps"] = [_kept(rule) for rule in rules]
        if config.kv_quotas:
            settings["has_quotas"] = True
        sizes = {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks}
        self._put({"pagefold_recording": _VERSION, **sizes, **settings})

    def __call__(self, event: Event) -> None:
        """Note ``event``."""
        match event:
            case StepPlanned():
                self._step.plan = event
                self._step.began_s = self._clock()
                self._step.drafts = {self._numbers[name]: (num, 0) for name, num in event.drafts}
                if not event.num_rows:
                    self._end_step(has_failed=False)
            case StepApplied() | StepAbandoned():
                self._end_step(has_failed=isinstance(event, StepAbandoned))
            case PrefixLookup():
                self._step.hits.append((self._numbers[event.request_id], event.num_hit_tokens))
            case BlockEvicted():
                self._step.evicted.append(event.block_id)
            case DraftsVerified():
                self._step.drafts = {
                    self._numbers[name]: (num, -1 if right is None else right) for name, num, right in event.counts
                }
            case RequestCorrupted():
                self._step.corrupted.append(self._numbers[event.request_id])
            case HostTransfer():
                self._step.damaged += event.damaged_ids
            case RequestFinished():
                self._end(event)
            case _:
                self._note_from_outside(event)

    def close(self) -> None:
        """Write what requests that have not ended have so far, and end the recording."""
        for number in list(self._numbers.values()):
            self._put_tokens(number, "")
        self._put({"end": True})
        self._lines.put(None)
        self._writer.join(_PATIENCE_S)

    # Events.

    def _note_from_outside(self, event: Event) -> None:
        match event:
            case RequestAdded():
                self._add(event)
            case RequestCut() if event.reason != "timeout":  # which follows from deadlines
                self._put({"cut": self._numbers[event.request_id], "in_step": event.is_in_step})
            case PinDropped():
                number, num_tokens = self._pins.pop(event.pin_id)
                if event.cause in ("removed", "expired"):  # else it follows from what a step does
                    self._put({"unpin": number, "hint": num_tokens} if num_tokens else {"unpin": number})
            case SessionClosed():
                self._put({"end_session": [event.tenant.hex(), event.session.hex()]})
            case CacheReset():
                self._put({"reset": True})
            case _:
                pass

    def _add(self, event: RequestAdded) -> None:
        first = self._num_samples
        for sample_id, token_ids in zip(event.sample_ids, event.token_ids, strict=True):
            self._numbers[sample_id] = self._num_samples
            self._tokens[self._num_samples] = (token_ids, event.num_prompt_tokens)
            self._num_samples += 1
        line: dict[str, Any] = {
            "add": first,
            "samples": len(event.sample_ids),
            "prompt": event.num_prompt_tokens,
            "most": event.max_total_tokens,
            "namespace": self._number_of(event.namespace),
            "at": event.arrival_s,
        }
        if event.has_stop_strings:
            line["stops"] = True
        if event.has_beams:
            line["beams"] = True
        if event.deadline_s is not None:
            line["deadline"] = event.deadline_s
        if event.priority:
            line["priority"] = event.priority
        line |= self._share_of(event)
        if event.quota is not None:
            line["quota"] = list(event.quota)
        if event.has_prompt_logprobs:
            line["prompt_logprobs"] = True
        line |= _of_session(event)
        if tuple(event.message_ends) != (event.num_prompt_tokens,):
            line["message_ends"] = list(event.message_ends)
        line |= self._pins_of(event, first)
        prompt = event.token_ids[0][: event.num_prompt_tokens]  # now: it grows, and hashing is for later
        self._put(line, _Tokens(range(first, self._num_samples), prompt))

    def _pins_of(self, event: RequestAdded, number: int) -> dict[str, Any]:
        """Return which pins a request makes at its end, and know them by its number until they are gone."""
        fields: dict[str, Any] = {}
        if event.pin is not None:
            fields["pin"] = event.pin
            self._pins[event.sample_ids[0]] = (number, 0)
        if event.hint_pins:
            fields["hint_pins"] = [list(hint) for hint in event.hint_pins]
            for num_tokens, _ in event.hint_pins:
                self._pins[hint_id(event.sample_ids[0], num_tokens)] = (number, num_tokens)
        return fields

    def _share_of(self, event: RequestAdded) -> dict[str, Any]:
        """Return the number and the weight of a request's tenant, where they are not what is taken for granted."""
        tenant = self._tenants.setdefault(event.tenant, len(self._tenants))
        fields = {"tenant": tenant, "weight": event.weight}
        return {name: value for name, value in fields.items() if value != {"tenant": 0, "weight": 1}[name]}

    def _end(self, event: RequestFinished) -> None:
        number = self._numbers.pop(event.request_id)
        if event.finish_reason not in ("stop", "length"):
            self._pins.pop(event.request_id, None)
        if self._step.plan is None:
            self._put_tokens(number, event.finish_reason)
        else:
            self._step.ended.append((number, event.finish_reason))

    def _end_step(self, *, has_failed: bool) -> None:
        step, self._step = self._step, _Step()
        plan = step.plan
        assert plan is not None, "a step is planned before it ends"
        line: dict[str, Any] = {"step": plan.step_id, "at": plan.now_s, "rows": plan.num_rows}
        if plan.num_rows:
            line |= {"computed": plan.num_tokens, "read": plan.num_read, "took": self._clock() - step.began_s}
        if plan.prefill_cap_tokens is not None:
            line["prefill_cap"] = plan.prefill_cap_tokens
        if has_failed:
            line["failed"] = True
        if step.hits:
            line["hits"] = step.hits
        if step.evicted:
            line["evicted"] = step.evicted
        if step.damaged:
            line["damaged"] = step.damaged
        if step.corrupted:
            line["corrupted"] = step.corrupted
        if step.drafts:
            line["drafts"] = [(number, *counts) for number, counts in step.drafts.items()]
        self._put(line)
        for number, reason in step.ended:
            is_failed = has_failed or number in step.corrupted
            self._put_tokens(number, "failed" if is_failed and reason == "error" else reason)

    # The file.

    def _number_of(self, namespace: bytes) -> int:
        """Return the number of a namespace: the same whenever it comes, as long as not too many came."""
        digest = blake2b(namespace, digest_size=_DIGEST_BYTES).digest()
        if digest not in self._namespaces and len(self._namespaces) >= _MAX_NAMESPACES:
            self._give_up(f"{_MAX_NAMESPACES} namespaces came")
        return self._namespaces.setdefault(digest, len(self._namespaces)) if not self._is_broken else 0

    def _put(self, fields: dict[str, Any], tokens: _Tokens | None = None) -> None:
        if self._is_broken:
            return
        self._num_put += 0 if tokens is None else len(tokens.token_ids)
        if self._num_put - self._num_written > _MAX_WAITING_TOKENS or self._lines.qsize() > _MAX_WAITING_LINES:
            self._give_up("the disk is too slow")
            return
        self._lines.put(_Line(fields, tokens))

    def _give_up(self, why: str) -> None:
        """End the recording where it is: what was noted before is written yet, and nothing more is kept."""
        if not self._is_broken:
            self._is_broken = True
            _log.error("the recording %s ends here: %s", self._file, why)

    def _put_tokens(self, number: int, reason: str) -> None:
        token_ids, num_prompt_tokens = self._tokens.pop(number)
        output = _Tokens(range(number, number + 1), token_ids[num_prompt_tokens:])
        self._put({"tokens": number, "ended": reason}, output)

    def _write(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._give_up(error.strerror or "it cannot be written")
            while self._lines.get() is not None:
                pass

    def _write_all(self) -> None:
        hashing = _Hashing(secrets.token_bytes(_KEY_BYTES))
        with self._out as out:
            while (line := self._lines.get()) is not None:
                fields = line.fields
                if line.tokens is not None:
                    self._num_written += len(line.tokens.token_ids)
                    fields["hashes"] = base64.b64encode(_little(hashing.go_on(line.tokens)).tobytes()).decode()
                out.write(json.dumps(fields, separators=(",", ":")) + "\n")
                if self._lines.empty():
                    out.flush()


class _Tokens(NamedTuple):
    """What goes on behind all that was written of these samples, in all of them the same."""

    numbers: range
    token_ids: array[int]


class _Line(NamedTuple):
    """A line to write, with hashes of these tokens if there are any."""

    fields: dict[str, Any]
    tokens: _Tokens | None


class _Step:
    """What has happened since the last step ended."""

    __slots__ = ("began_s", "corrupted", "damaged", "drafts", "ended", "evicted", "hits", "plan")

    def __init__(self) -> None:
        self.plan: StepPlanned | None = None
        self.began_s = 0.0
        self.hits: list[tuple[int, int]] = []
        self.evicted: list[int] = []
        self.corrupted: list[int] = []
        self.damaged: list[int] = []
        self.ended: list[tuple[int, str]] = []
        self.drafts: dict[int, tuple[int, int]] = {}  # by sample: how many, and how many of them were right


class _Hashing:
    """Makes for each token 31 bits that depend on it, on all before it, and on the key.

    Knows of each sample how far it came, from its prompt until its end.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._states: dict[int, bytes] = {}

    def go_on(self, tokens: _Tokens) -> array[int]:
        """Return the hashes of what follows in these samples. They have a prompt, then an output, then nothing."""
        first = tokens.numbers[0]
        is_prompt = first not in self._states
        state = self._states.pop(first, b"")
        hashes = array("i")
        packed = tokens.token_ids.tobytes()
        size = tokens.token_ids.itemsize
        for start in range(0, len(packed), size):
            state = blake2b(state + packed[start : start + size], digest_size=_STATE_BYTES, key=self._key).digest()
            hashes.append(int.from_bytes(state[:4], "little") & 0x7FFFFFFF)
        if is_prompt:
            self._states |= dict.fromkeys(tokens.numbers, state)
        return hashes


def _little(numbers: array[int]) -> array[int]:
    """Return the numbers so that their bytes are in the order of the file, which is the same on every machine."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _kept(rule: KeepRule) -> list[Any]:
    """Return what a rule says, its sinks only where there are any: so others read it who know of none."""
    if rule.packs:  # which the simulator does not know yet, and says so
        return [rule.window, rule.is_chunked, rule.num_sinks, rule.num_before]
    return [rule.window, rule.is_chunked, *([rule.num_sinks] if rule.num_sinks else [])]


def _of_session(event: RequestAdded) -> dict[str, Any]:
    """Return what a line tells of the session of a request, and of when it goes on."""
    told: dict[str, Any] = {}
    if event.returns_in_s is not None:
        told["returns"] = event.returns_in_s
    if event.session is not None:
        told["session"] = [digest.hex() for digest in event.session]
    return told
