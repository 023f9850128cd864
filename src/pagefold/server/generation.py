"""Generation: the sequences of one HTTP request, run together. Who stops reading ends them all."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagefold.engine.outputs import best
from pagefold.engine.together import Together
from pagefold.errors import EngineStoppedError, InvalidRequestError, RequestTimeoutError, StepFailedError
from pagefold.server.context_length import check_prompt
from pagefold.server.disconnect import while_connected
from pagefold.server.logprobs import ToldToken, told_tokens
from pagefold.server.reasoning.counter import NOTHING_COUNTED, TokenCounter
from pagefold.server.reasoning.thinking import NO_THINKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.types import Receive

    from pagefold.engine.client import EngineClient
    from pagefold.engine.logprobs import PromptLogprobs
    from pagefold.engine.outputs import OutputDelta
    from pagefold.engine.token_stream import TokenStream
    from pagefold.request import Caller, FinishReason, RequestTimes
    from pagefold.sampling import SamplingParams
    from pagefold.server.reasoning.thinking import Thinking
    from pagefold.structured.grammar import Grammar

__all__ = ["Generation", "Output", "PromptUse"]


@dataclass(frozen=True, slots=True)
class PromptUse:
    """What the cache had to do with the prompts of a request, in tokens.

    Attributes:
        num_tokens: of the prompts.
        num_read: those that were found in the cache.
        num_written: those that were computed and filled blocks that later requests can find.
    """

    num_tokens: int
    num_read: int
    num_written: int


@dataclass(slots=True)
class Output:
    """What became of one sample of a prompt so far.

    Attributes:
        text: pieces of it.
        num_tokens: sampled, a stop token included.
        num_cached_tokens: how much of the prompt was a prefix hit.
        num_loaded_tokens: how much of that came from tiers behind the device, by tier.
        finish_reason: why it ended.
        stop_reason: the stop string that ended it, if one did.
        told: its tokens with their logprobs, if asked for.
        times: when things happened to it, once it has got a token.
        cumulative_logprob: the sum of its tokens' logprobs, where they are known.
        prompt_token_ids: what it follows.
        prompt_logprobs: logprobs of the prompt's tokens, if asked for, once they are known.
        token_ids: what was sampled, if that is told.
        thinking: counts the tokens of its thinking.
        num_draft_tokens: how many drafts were computed for it.
        num_accepted_tokens: how many of those became tokens of it.
        kept_share: what share of the memory of its older tokens was kept, once it has ended; None where all is.
    """

    text: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    told: list[ToldToken] = field(default_factory=list)
    times: RequestTimes | None = None
    cumulative_logprob: float | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    thinking: TokenCounter = NOTHING_COUNTED
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    kept_share: float | None = None


class Generation:
    """Prompts with one way of sampling, and what becomes of them. Must be closed, also when it was never read.

    Args:
        client: the engine.
        request_id: OpenAI's id of the response.
        prompts: tokens of each; the choices of one come one after another.
        sampling: for all of them.
        caller: who asks.
        param: the request field that holds the prompts.
        grammar: of ``sampling.structured_outputs``; each output gets a matcher of its own.
        keeps_token_ids: whether outputs have their ``token_ids``.
        thinking: how thinking stands behind each prompt.

    Raises:
        InvalidRequestError: one of them can never be served.
        EngineStoppedError: the engine takes no requests.
        QueueFullError: they do not all fit into the queue.
        RateLimitError: the caller's tenant has used up the tokens that it may for now.
    """

    def __init__(  # noqa: PLR0913 - a request, by name
        self,
        client: EngineClient,
        *,
        request_id: str,
        prompts: list[list[int]],
        sampling: SamplingParams,
        caller: Caller,
        param: str,
        grammar: Grammar | None = None,
        keeps_token_ids: bool = False,
        thinking: Thinking = NO_THINKING,
    ) -> None:
        self.request_ids = [f"{request_id}-{index}" for index in range(len(prompts))]
        for prompt in prompts:
            check_prompt(len(prompt), sampling.max_tokens, client.context, param)
        self.request_id = request_id
        self._tenant = caller.tenant
        self._client = client
        self._keeps_token_ids = keeps_token_ids
        self._prompts = prompts
        self._sampling = sampling
        self._streams: list[TokenStream] = []
        together = Together(sum(map(len, prompts)))
        try:
            for one_id, prompt in zip(self.request_ids, prompts, strict=True):
                stream = client.submit(one_id, prompt, sampling, caller, grammar, together=together)
                self._streams.append(stream)
        except BaseException:
            self.close()
            together.charge.give_all_back()
            raise
        self._thinking = thinking
        # As many as may be here.
        self.outputs = [Output(prompt_token_ids=prompt) for prompt in prompts for _ in range(sampling.num_samples)]
        for output in self.outputs if thinking.is_known else ():
            output.thinking = thinking.counter(client.tokenizer, output.prompt_token_ids)

    def close(self) -> None:
        """End all sequences that have not ended."""
        for stream in self._streams:
            stream.close()

    async def begin(self, receive: Receive) -> None:
        """Return when the engine has taken all of it: from then on a response may begin. Else it is closed.

        Args:
            receive: of the request, whose client may go away meanwhile.

        Raises:
            LoadShedError, EngineStoppedError, InvalidRequestError: the engine has not taken it.
            ClientGoneError: the client went away.
        """
        waiting = [stream for stream in self._streams if not stream.is_taken]
        if not waiting:
            return
        try:
            await while_connected(receive, _all_taken(waiting))
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yield (output, what a step added to it), and keep ``outputs`` up to date.

        Raises:
            EngineStoppedError: the engine stopped before the end.
            StepFailedError: a step failed again and again.
            RequestTimeoutError: the time was up before the end.
        """
        streams = self._streams
        async with aclosing(_merged(streams) if len(streams) > 1 else _numbered(0, streams[0])) as merged:
            async for prompt, delta in merged:
                index = prompt * self._sampling.num_samples + delta.index
                output = self.outputs[index]
                output.text.append(delta.text)
                output.num_tokens += len(delta.token_ids)
                if self._keeps_token_ids:
                    output.token_ids.extend(delta.token_ids)
                if delta.prompt_logprobs is not None:
                    for sample in self.outputs[index : index + self._sampling.num_samples]:
                        sample.prompt_logprobs = delta.prompt_logprobs
                output.thinking.push(delta.token_ids)
                output.num_draft_tokens = delta.num_draft_tokens
                output.num_accepted_tokens = delta.num_accepted_tokens
                output.num_cached_tokens = delta.num_cached_tokens
                output.num_loaded_tokens = delta.num_loaded_tokens
                output.kept_share = delta.kept_share
                output.finish_reason = delta.finish_reason
                output.stop_reason = delta.stop_reason
                output.told += told_tokens(delta)
                output.times = delta.times
                if delta.cumulative_logprob is not None:
                    output.cumulative_logprob = delta.cumulative_logprob
                if delta.finish_reason == "abort":
                    raise EngineStoppedError(delta.error or "The request was ended by the server.")
                if delta.finish_reason == "error" and delta.param is not None:
                    raise InvalidRequestError(delta.error or "The request failed.", param=delta.param)
                if delta.finish_reason == "error":
                    raise StepFailedError(delta.error or "The request failed.")
                if delta.finish_reason == "timeout":
                    raise RequestTimeoutError(delta.error or "The time was up.", remedy="Ask for less, or again later.")
                yield index, delta

    async def run(self) -> None:
        """Run to the end; ``outputs`` holds the results."""
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    @property
    def tells_prompts(self) -> bool:
        """Whether logprobs of prompts were asked for."""
        return self._sampling.prompt_logprobs is not None

    def choices(self) -> list[Output]:
        """Return the outputs that were asked for, at the end: all of them, or of each prompt the best."""
        if not self._sampling.ranks_samples:
            return self.outputs
        chosen: list[Output] = []
        num_samples = self._sampling.num_samples
        for first in range(0, len(self.outputs), num_samples):
            samples = self.outputs[first : first + num_samples]
            scores = [(output.cumulative_logprob, output.num_tokens) for output in samples]
            chosen += (samples[at] for at in best(self._sampling, scores))
        return chosen

    def usage_of(self, index: int) -> dict[str, Any]:
        """Return the tokens of one output so far, and of its prompt."""
        output = self.outputs[index]
        num_prompt_tokens = len(output.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": output.num_tokens,
            "total_tokens": num_prompt_tokens + output.num_tokens,
        }

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far, in OpenAI's form: each prompt once, and all that was sampled after it.

        Where cached tokens came from tiers behind the device, the details say how many from which; where the model's
        thinking is known, how many tokens of the outputs it is; where tokens were drafted, how many of them were right.
        Where a share of older tokens is kept, what share of their memory that was, the mean of outputs that have any.
        """
        num_prompt_tokens = sum(len(prompt) for prompt in self._prompts)
        num_output_tokens = sum(output.num_tokens for output in self.outputs)
        firsts = self.outputs[:: self._sampling.num_samples]
        by_tier: Counter[str] = Counter()
        for output in firsts:
            by_tier.update(output.num_loaded_tokens)
        details: dict[str, Any] = {"cached_tokens": sum(output.num_cached_tokens for output in firsts)}
        if by_tier:
            details["cached_tokens_by_tier"] = {"device": details["cached_tokens"] - by_tier.total(), **by_tier}
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": details,
        }
        of_output: dict[str, int] = {}
        if self._thinking.is_known:
            of_output["reasoning_tokens"] = sum(output.thinking.num_tokens for output in self.outputs)
        num_drafts = sum(output.num_draft_tokens for output in self.outputs)
        if num_drafts:
            num_accepted = sum(output.num_accepted_tokens for output in self.outputs)
            of_output["accepted_prediction_tokens"] = num_accepted
            of_output["rejected_prediction_tokens"] = num_drafts - num_accepted
        if of_output:
            usage["completion_tokens_details"] = of_output
        shares = [output.kept_share for output in self.outputs if output.kept_share is not None]
        if shares:
            usage["kv_kept_share"] = round(sum(shares) / len(shares), 4)
        return usage

    def prompt_use(self) -> PromptUse:
        """Return what the cache had to do with the prompts; known once each of them has got a token."""
        firsts = self.outputs[:: self._sampling.num_samples]
        num_read = [output.num_cached_tokens for output in firsts]
        num_written = [
            self.num_in_blocks(len(prompt)) - read for prompt, read in zip(self._prompts, num_read, strict=True)
        ]
        return PromptUse(sum(map(len, self._prompts)), sum(num_read), sum(max(0, written) for written in num_written))

    def num_in_blocks(self, num_tokens: int) -> int:
        """Return how many of so many tokens lie in blocks that a prompt fills, and that are cached for others."""
        size = self._client.cached_block_size
        return 0 if size is None else num_tokens // size * size

    def summary(self) -> dict[str, Any]:
        """Return what the log tells of it: numbers, ids and reasons; seconds are of the output that came first."""
        usage = self.usage()
        reasons = {output.finish_reason or "abort" for output in self.outputs}
        times = [output.times for output in self.outputs if output.times is not None]
        return {
            "response_id": self.request_id,
            "tenant": self._tenant or None,
            "finish_reason": ",".join(sorted(reasons)),
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "output_tokens": usage["completion_tokens"],
            "queue_s": _least([one.queue_s for one in times]),
            "ttft_s": _least([one.ttft_s for one in times]),
        }


async def _all_taken(streams: list[TokenStream]) -> None:
    for stream in streams:
        await stream.taken()


def _least(seconds: list[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return round(min(known), 6) if known else None


async def _numbered(index: int, stream: TokenStream) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    async for delta in stream:
        yield index, delta


async def _merged(streams: list[TokenStream]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Yield from all ``streams`` as they come, with the index of each; the first that fails fails all."""
    # As many places as streams: what a slow reader does not take waits in the streams, which merge it.
    arrived: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: TokenStream) -> None:
        try:
            async for item in _numbered(index, stream):
                await arrived.put(item)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads
            await arrived.put(error)
        else:
            await arrived.put(None)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
