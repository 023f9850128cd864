"""A server under random load: whether each computed token has its cause, and what one tenant learns of another.

Parts of ``benchmarks/observe.py``, with a small random model behind HTTP.

* load: clients of eight threads send prompts that go on from each other, with salts, samples, logprobs of prompts and
  pins; some go away; the cache is reset now and then; the device is small, behind it are the host's memory and a disk
  of which a thread damages and deletes files. Of each answer it is asked why its tokens were computed.
* tenants: two tenants send prompts, some of them the same, ask for explanations, advice, comparisons and the dashboard,
  of their own requests and of the other's. Every answer, with its headers, is searched for ids of the other's requests,
  for digests of his prompts' paths, for his texts, and for numbers of tokens that only he has: his prompts are 700 to
  799 tokens long, the others' no more than 300.
"""

from __future__ import annotations

import json
import tempfile
import threading
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
from plan_concurrency import Server, tiny_model
from report import Row
from rich.progress import Progress

from pagefold.config import Account, EngineConfig, ServerConfig
from pagefold.kv import TOKEN_BYTES
from pagefold.kv.names import path_digest, root_digest
from pagefold.observe.misses import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["measure_load", "measure_tenants"]

_VOCABULARY = 40_000
_PATIENCE_S = 600.0
_NUM_THREADS = 8
_SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 256, "threads": 1}
_LONG = (700, 799)
"""Tokens of a prompt of the second tenant."""
_SHORT = (16, 300)
_ANSWERED = ("/v1/completions", "/v1/messages", "/v1/responses")


def _fresh(random: Random, num: int) -> list[int]:
    return [random.randrange(10, _VOCABULARY) for _ in range(num)]


def _together(num: int, what: str, work: Callable[[int], None]) -> None:
    """Do ``work`` for each number, on several threads."""
    with Progress() as progress, ThreadPoolExecutor(_NUM_THREADS) as pool:
        task = progress.add_task(what, total=num)
        for _ in pool.map(work, range(num)):
            progress.advance(task)


# Every computed token has a cause.


class _Tally:
    """What was asked and answered.

    Attributes:
        num_tokens, num_told: computed tokens of prompts, and those of them that have one cause.
        causes: how many by cause.
        num_statuses: answers by HTTP status; 0 for those that a client did not wait for.
        wrong: the first explanations that do not add up.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_told = 0
        self.causes: Counter[str] = Counter()
        self.num_statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def status(self, status: int) -> None:
        with self._lock:
            self.num_statuses[status] += 1

    def check(self, explained: dict[str, Any]) -> None:
        """Count the tokens of an explanation, and check that each has one cause."""
        with self._lock:
            for request in explained["requests"]:
                if not request["was_let_in"]:
                    continue
                at, num_told = request["cached_tokens"], 0
                for miss in request["misses"]:
                    Cause(miss["cause"])
                    num_told += miss["tokens"] if miss["start"] == at else 0
                    at = miss["end"]
                    self.causes[miss["cause"]] += miss["tokens"]
                num_computed = request["prompt_tokens"] - request["cached_tokens"]
                self.num_tokens += num_computed
                self.num_told += num_told
                if num_told != num_computed:
                    self.wrong.append(json.dumps(request))


class _Damage:
    """A thread that spoils files of a disk tier, until it is told to stop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self.num_spoilt = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        random = Random(1)
        while not self._stop.wait(0.05):
            files = [path for path in self._folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]
            if not files:
                continue
            path = random.choice(files)
            try:
                if random.random() < 0.5:
                    path.unlink()
                else:
                    with path.open("r+b") as file:
                        file.seek(random.randrange(1024, 4096))
                        file.write(random.randbytes(64))
            except OSError:  # the server was sooner
                continue
            self.num_spoilt += 1


def measure_load(num_requests: int) -> list[Row]:
    """Return how many computed tokens have one cause, on a server with tiers whose disk is damaged."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = EngineConfig(
            model=str(tiny_model(folder / "model")), **_SETTINGS, kv_cache_memory_bytes=2**20 * 2, max_num_seqs=8,
            max_model_len=1024, kv_offloading_size=2 / 1024, kv_disk_path=str(folder / "disk"), kv_disk_size=0.25,
        )  # fmt: skip
        server = Server(config, ServerConfig(admin_api_key="admin"))
        damage, tally = _Damage(folder / "disk"), _Tally()
        heads = [_fresh(Random(number), 96) for number in range(12)]
        past: list[list[int]] = []
        try:
            with httpx.Client(base_url=server.url, timeout=_PATIENCE_S) as http:
                _together(num_requests, "random load", lambda number: _ask_one(http, number, heads, past, tally))
        finally:
            damage.close()
            server.close()
        assert not server.ledger.has_failed, "the ledger has failed"
        answered = ", ".join(f"{num:,} x {status or 'gone'}" for status, num in sorted(tally.num_statuses.items()))
        causes = dict(tally.causes.most_common())
    return [
        Row(
            f"computed tokens with one cause, of {num_requests:,} requests with {damage.num_spoilt:,} files spoilt",
            "all",
            f"{tally.num_told:,} of {tally.num_tokens:,}",
            tally.num_told == tally.num_tokens > 0,
            {"causes": causes, "wrong": tally.wrong[:5]},
        ),
        Row("answers", "", answered, values={"statuses": {str(k): v for k, v in tally.num_statuses.items()}}),
        Row("causes under load", "", ", ".join(f"{cause} {num:,}" for cause, num in causes.items())),
    ]


def _ask_one(http: httpx.Client, number: int, heads: list[list[int]], past: list[list[int]], tally: _Tally) -> None:
    """Send one request of a random kind, and ask why its tokens were computed."""
    random = Random(number)
    if random.random() < 0.005:
        http.post("/reset_prefix_cache", headers={"Authorization": "Bearer admin"})
    if random.random() < 0.02:
        pinned = {"prompt": random.choice(heads), "pin": True, "ttl_s": random.uniform(0.1, 3.0)}
        http.post("/v1/cache/warm", json=pinned, headers={"Authorization": "Bearer admin"})
    begins = random.choice(past) if past and random.random() < 0.5 else random.choice(heads)
    prompt = [*begins[: random.randrange(1, len(begins) + 1) if random.random() < 0.2 else None]]
    prompt += _fresh(random, random.randrange(1, 80))
    prompt = prompt[:900]
    fields: dict[str, Any] = {"max_tokens": random.randrange(1, 24), "temperature": 0.7, "seed": number}
    if random.random() < 0.2:
        fields["n"] = random.randrange(2, 4)
    if random.random() < 0.1:
        fields["cache_salt"] = f"salt {random.randrange(3)}"
    if random.random() < 0.03:
        fields["prompt_logprobs"] = 0
    body = {"prompt": prompt, "ignore_eos": True, **fields}
    request_id = f"load-{number}"
    headers = {"X-Request-Id": request_id}
    patience_s = random.uniform(0.001, 0.1) if random.random() < 0.08 else _PATIENCE_S
    try:
        answer = http.post("/v1/completions", json=body, headers=headers, timeout=patience_s)
    except httpx.TimeoutException:
        tally.status(0)
        return
    tally.status(answer.status_code)
    if answer.status_code == httpx.codes.OK:
        past.append(prompt)
        tally.check(http.get(f"/v1/explain/{request_id}").raise_for_status().json())


# What one tenant learns of another.


class _Tenant:
    """A tenant's key, his prompts, and what an answer to somebody else must not hold.

    Args:
        name: of the tenant.
        lengths: of his prompts, the least and the most, in tokens.
        marker: a word that his chats alone hold.
    """

    def __init__(self, name: str, lengths: tuple[int, int], marker: str) -> None:
        self.name, self.lengths, self.marker = name, lengths, marker
        self.headers = {"Authorization": f"Bearer sk-{name}"}
        self.ids: list[str] = []
        self.secrets: set[str] = {marker}
        self.past: list[list[int]] = []


def measure_tenants(num_requests: int) -> list[Row]:
    """Return how many answers tell a tenant anything of another."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = EngineConfig(
            model=str(tiny_model(folder / "model")), **_SETTINGS, kv_cache_memory_bytes=2**20 * 24, max_num_seqs=8,
            max_model_len=1024,
        )  # fmt: skip
        accounts = tuple(Account(key=f"sk-{name}", tenant=name) for name in ("near", "far"))
        server = Server(config, ServerConfig(accounts=accounts, admin_api_key="admin", open_metrics=True))
        one, other = _Tenant("near", _SHORT, "quokkaberry"), _Tenant("far", _LONG, "zebrafinch")
        shared = [_fresh(Random(-number), 64) for number in range(1, 9)]
        search = _Search()
        try:
            with httpx.Client(base_url=server.url, timeout=_PATIENCE_S) as http:

                def ask(number: int) -> None:
                    random = Random(number)
                    mine, his = (one, other) if random.random() < 0.5 else (other, one)
                    answer = _question(http, random, mine, his, shared)
                    if answer.request.url.path in _ANSWERED and answer.status_code == httpx.codes.OK:
                        _keep(server, answer, mine)
                    search.look(answer, mine, his)

                _together(num_requests, "two tenants", ask)
                told = server.ledger.all_records()
        finally:
            server.close()
    tenants = Counter(record.tenant for record in told)
    return [
        Row(
            f"answers that tell a tenant of another, of {search.num_answers:,} to {num_requests:,} random requests",
            "0",
            str(len(search.found)),
            not search.found and len(tenants) > 1 and search.num_compared > 0,
            {
                "found": search.found[:5],
                "compared": search.num_compared,
                "remembered": dict(tenants),
                "statuses": dict(search.statuses),
            },
        )
    ]


class _Search:
    """Searches answers."""

    def __init__(self) -> None:
        self.num_answers = self.num_compared = 0
        self.found: list[str] = []
        self.statuses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def look(self, answer: httpx.Response, mine: _Tenant, his: _Tenant) -> None:
        """Look whether an answer to the one holds anything of the other's."""
        asked = answer.request.url.path.partition("/v1/")[2].split("/")[0]
        sent = (answer.request.content.decode() + str(answer.request.url)).lower()
        text = (answer.text + str(answer.headers)).lower()
        secrets = {secret for secret in his.secrets.copy() if secret in text and secret not in sent}
        tells_lengths = asked in ("completions", "explain", "messages", "responses")  # others add up
        if mine.lengths == _SHORT and tells_lengths and answer.status_code == httpx.codes.OK:
            told = answer.json()
            if told.get("object") == "explanation.foretold":  # of a prompt that he sends along, however he came by it
                told = {"cached_tokens": 0 if told["cached_tokens"] <= _SHORT[1] else _LONG[0]}
            secrets |= {str(one) for one in _integers(told) if _LONG[0] <= one <= _LONG[1]}
        compared = asked in ("messages", "responses") and "_changed" in answer.text
        with self._lock:
            self.num_answers += 1
            self.num_compared += compared
            self.statuses[f"{asked} {answer.status_code}"] += 1
            if secrets:
                self.found.append(
                    f"{answer.request.method} {answer.request.url}: {sorted(secrets)[:3]} in {text[:400]}"
                )


def _integers(told: object) -> Iterator[int]:
    """Yield the whole numbers of an answer, but for times, and for tokens' ids, which are the model's."""
    if isinstance(told, dict):
        for name, value in told.items():
            if name not in ("created", "created_at", "completed_at", "token_ids"):
                yield from _integers(value)
    elif isinstance(told, list):
        for value in told:
            yield from _integers(value)
    elif isinstance(told, int) and not isinstance(told, bool):
        yield told


def _question(  # noqa: PLR0911 - one return a kind of question
    http: httpx.Client, random: Random, mine: _Tenant, his: _Tenant, shared: list[list[int]]
) -> httpx.Response:
    """Return the answer to one random request of a tenant: a prompt, or what he asks of one, his or not."""
    kind = random.random()
    if kind < 0.55 or not mine.ids:
        return _generate(http, random, mine, shared)
    pool = his.ids if random.random() < 0.4 and his.ids else mine.ids
    name = random.choice(pool)
    if kind < 0.75:
        return http.get(f"/v1/explain/{name}", headers=mine.headers)
    if kind < 0.82:
        what = random.choice(("last", "worst"))
        return http.get(f"/v1/explain?{what}={random.randrange(1, 20)}", headers=mine.headers)
    if kind < 0.88:
        body: dict[str, Any] = {"prompt": random.choice(random.choice((mine, his)).past or shared)}
        return http.post("/v1/explain", json=body, headers=mine.headers)
    if kind < 0.94:
        path = random.choice(("/v1/advice", "/v1/advice", "/v1/cache/whatif", "/v1/dashboard"))
        return http.get(path, headers=mine.headers)
    if kind < 0.97:
        body = {**_chat(random, mine), "max_tokens": 1, "diagnostics": {"previous_message_id": name}}
        return http.post("/v1/messages", json=body, headers=mine.headers)
    text = _chat(random, mine)["messages"][0]["content"]
    body = {"input": text, "prompt_cache_options": {"comparison_response_id": name}, "store": False}
    return http.post("/v1/responses", json={**body, "max_output_tokens": 1}, headers=mine.headers)


def _chat(random: Random, mine: _Tenant) -> dict[str, Any]:
    num_words = 3 if mine.lengths == _SHORT else 170
    text = f"{mine.marker} " * num_words + str(random.randrange(5))
    return {"messages": [{"role": "user", "content": text}]}


def _generate(http: httpx.Client, random: Random, mine: _Tenant, shared: list[list[int]]) -> httpx.Response:
    """Send a prompt: a new one, one that both tenants send, or one that goes on from such."""
    begins = random.choice(shared)[: mine.lengths[0]] if random.random() < 0.6 else []
    if mine.past and random.random() < 0.3:
        begins = random.choice(mine.past)[: random.randrange(1, mine.lengths[1])]
    length = random.randint(max(mine.lengths[0], min(len(begins) + 1, mine.lengths[1])), mine.lengths[1])
    prompt = [*begins, *_fresh(random, length)][:length]
    headers = {**mine.headers, "X-Request-Id": f"{mine.name}-{random.getrandbits(64):016x}"}
    return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0}, headers=headers)


def _keep(server: Server, answer: httpx.Response, mine: _Tenant) -> None:
    """Note what of a tenant's request nobody else may see."""
    names = [answer.json()["id"], answer.headers["x-request-id"]]
    mine.ids += names
    mine.secrets.update(name.lower() for name in names)
    prompt = json.loads(answer.request.content).get("prompt")
    if prompt is None:
        return
    mine.past.append(prompt)
    for record in server.ledger.records(names[0]):
        mine.secrets |= _digests(record.namespace, prompt)


def _digests(namespace: bytes, prompt: list[int]) -> set[str]:
    """Return digests of the paths of a prompt's first blocks, as they might be written."""
    digest, packed = root_digest(namespace), array("i", prompt).tobytes()
    stride = 16 * TOKEN_BYTES
    made = set()
    for at in range(0, min(len(packed), 4 * stride) // stride * stride, stride):
        digest = path_digest(digest, packed[at : at + stride])
        made |= {digest[:8].hex(), *(str(int.from_bytes(digest[:8], order)) for order in ("little", "big"))}
    return made
