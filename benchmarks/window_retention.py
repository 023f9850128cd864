"""A model with sliding windows: how much of its KV is held, and prefix hits of 24 conversations in a full pool.

The real scheduler and cache, with a runner that computes nothing: whether a prefix is found depends on neither. The
model is Gemma 3 270M: 18 layers, of which 3 see all and 15 the last 512 tokens, a KV head of 256 numbers in bfloat16,
blocks of 16 tokens. Beside it stands the same model with all layers full, in a pool of as many bytes; and one with a
pool that never fills, which finds all that can be found.

24 conversations with one system prompt of 700 tokens. Each has 6 turns of 60 to 400 tokens of a user and 100 to 700 of
an answer, and begins with 1,500 tokens of its own. They return one after another, turn by turn, each time in another
order; prompts are computed 2,048 tokens at a time. Ends of messages are told to the scheduler, as the server does.

* go on: a prompt is all that was said, word by word.
* without thinking: of each answer the first two thirds are thinking, which the next prompt leaves out. So a prompt
  parts from what is cached where the one before it ended, not where its answer did.
* answered twice: the last answer of each turn is asked for once more, with another seed.

What is held is blocks of one request of 8,192 tokens, its last 64 of output: at most while its prompt is computed, and
while it decodes, of what all layers full would hold.

    python benchmarks/window_retention.py [--json FILE]

What is asked: hit tokens at least those of the model with all layers full in the same bytes; and .95 of what the
endless pool finds, where the bytes allow it: where they hold what each conversation needs when it returns.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

from pagefold.events import PrefixLookup
from pagefold.kv import KEEP_ALL, KeepRule, KVCore, KVGeometry, make_policy
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim.null_runner import NullRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_LAYERS, WINDOW, HEAD_DIM, ELEMENT_BYTES, BLOCK_SIZE = 18, 512, 256, 2, 16
CHUNK, LONG = 2048, 8192
NUM_CHATS, NUM_TURNS = 24, 6
SYSTEM_TOKENS, FIRST_TOKENS = 700, 1500
USER_TOKENS, ANSWER_TOKENS = (60, 400), (100, 700)
SHARES = (0.4, 0.6, 1.0, 1.5)
"""Of the bytes that all conversations need when they return, as the windowed model has them."""
MODES = ("go on", "without thinking", "answered twice")
SAMPLING = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)


def geometry(*, has_windows: bool) -> KVGeometry:
    """Return the model's KV."""
    keeps = [KEEP_ALL if layer % 6 == 5 else KeepRule(WINDOW) for layer in range(NUM_LAYERS)]
    return KVGeometry(NUM_LAYERS, 1, HEAD_DIM, ELEMENT_BYTES, BLOCK_SIZE, keeps=tuple(keeps) if has_windows else ())


class Chat:
    """What was said in one conversation, and where its messages end."""

    def __init__(self, system: Sequence[int], random: Random) -> None:
        self.random = random
        self.said = array("i", system)
        self.ends = [len(self.said)]
        self.said.extend(random.randrange(10_000, 50_000) for _ in range(FIRST_TOKENS))

    def ask(self) -> None:
        """Say what a user says."""
        self.said.extend(self.random.randrange(10_000, 50_000) for _ in range(self.random.randint(*USER_TOKENS)))
        self.ends.append(len(self.said))

    def hear(self, answer: Sequence[int], *, without_thinking: bool) -> None:
        """Take in an answer."""
        self.said.extend(answer[2 * len(answer) // 3 :] if without_thinking else answer)
        self.ends.append(len(self.said))


class House:
    """A scheduler over a pool, one request at a time."""

    def __init__(self, shape: KVGeometry, num_blocks: int) -> None:
        self.num_hit = self.num_asked = 0
        self.core = KVCore(
            num_blocks,
            block_size=BLOCK_SIZE,
            rules=[group.keeps for group in shape.groups],
            policy=make_policy("default"),
        )
        self.scheduler = Scheduler(self.core, SchedulerLimits(1, CHUNK), emit=self._note)
        self.runner = NullRunner()
        self.now_s = 0.0
        self.num_requests = 0

    def answer(self, chat: Chat, num_tokens: int, seed: int) -> list[int]:
        """Let the model answer."""
        stop = StopRule(frozenset(), len(chat.said) + num_tokens)
        name = f"r{self.num_requests}"
        self.num_requests += 1
        request = Request(name, chat.said, SAMPLING, stop=stop, seed=seed, message_ends=tuple(chat.ends))
        self.scheduler.add(request)
        while self.scheduler.has_work:
            self.now_s += 0.01
            self.scheduler.apply(self.runner.run(self.scheduler.schedule(self.now_s)))
        return request.output_token_ids

    def _note(self, event: object) -> None:
        if isinstance(event, PrefixLookup):
            self.num_hit += event.num_hit_tokens
            self.num_asked += event.num_tokens


def hit_tokens(shape: KVGeometry, num_blocks: int, mode: str) -> int:
    """Return the tokens that were found in all turns but the first."""
    house, random = House(shape, num_blocks), Random(1)
    system = [random.randrange(10_000) for _ in range(SYSTEM_TOKENS)]
    chats = [Chat(system, Random(100 + number)) for number in range(NUM_CHATS)]
    for turn in range(NUM_TURNS):
        if turn == 1:
            house.num_hit = 0
        random.shuffle(chats)
        for chat in chats:
            chat.ask()
            num_tokens = chat.random.randint(*ANSWER_TOKENS)
            answer = house.answer(chat, num_tokens, seed=chat.random.getrandbits(30))
            if mode == "answered twice":
                answer = house.answer(chat, num_tokens, seed=chat.random.getrandbits(30))
            chat.hear(answer, without_thinking=mode == "without thinking")
    return house.num_hit


def held_blocks(shape: KVGeometry) -> tuple[int, int]:
    """Return the most blocks that a long request holds: while its prompt is computed, and while it decodes."""
    house = House(shape, 10**5)
    request = Request("long", range(LONG - 64), SAMPLING, stop=StopRule(frozenset(), LONG))
    house.scheduler.add(request)
    most = {True: 0, False: 0}
    while house.scheduler.has_work:
        plan = house.scheduler.schedule(0.0)
        is_prompt = plan.num_tokens[0] > 1
        held = house.core.num_active
        house.scheduler.apply(house.runner.run(plan))
        most[is_prompt] = max(most[is_prompt], held)
    return most[True], most[False]


def needed_blocks(shape: KVGeometry, mode: str) -> int:
    """Return the blocks of all that conversations need when they return for the last time, and a running one."""
    house, random = House(shape, 10**6), Random(1)
    system = [random.randrange(10_000) for _ in range(SYSTEM_TOKENS)]
    chats = [Chat(system, Random(100 + number)) for number in range(NUM_CHATS)]
    for _ in range(NUM_TURNS):
        random.shuffle(chats)
        for chat in chats:
            chat.ask()
            chat.hear([0] * chat.random.randint(*ANSWER_TOKENS), without_thinking=mode == "without thinking")
    held = sum(house.core.rules.num_blocks_for(len(chat.said), 1) for chat in chats)
    return held + house.core.rules.num_blocks_for(max(len(chat.said) for chat in chats), CHUNK)


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__).parse_args()
    windows, full = geometry(has_windows=True), geometry(has_windows=False)
    rows: list[Row] = []
    whens = ("decoding", "at most while its prompt is computed")
    for when, asked, held, beside in zip(
        whens, (0.25, 0.45), reversed(held_blocks(windows)), reversed(held_blocks(full)), strict=True
    ):
        ratio = held * windows.bytes_per_block / (beside * full.bytes_per_block)
        rows.append(Row(f"KV held at 8k over all layers full, {when}", f"<= {asked}", f"{ratio:.3f}", ratio <= asked))
    for mode in MODES:
        needed = needed_blocks(windows, mode) * windows.bytes_per_block
        endless = hit_tokens(full, 10**6, mode)
        for share in SHARES:
            num_bytes = int(share * needed)
            found = hit_tokens(windows, windows.num_blocks(num_bytes), mode)
            beside = hit_tokens(full, full.num_blocks(num_bytes), mode)
            for peer, tokens, least in (("all layers full", beside, 1.0), ("an endless pool", endless, 0.95)):
                ratio = found / max(1, tokens)
                is_asked = share >= 1 or least == 1.0
                rows.append(
                    Row(
                        f"{mode}, {share:.1f} of the bytes needed: hit tokens over {peer}",
                        f">= {least}" if is_asked else "",
                        f"{ratio:.3f}",
                        ratio >= least if is_asked else None,
                        {"found": found, "peer": tokens, "bytes": num_bytes},
                    )
                )
    print_report("window_retention", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
