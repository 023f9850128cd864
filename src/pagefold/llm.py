"""LLM: the offline face. vLLM's names and meaning."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefold.adapters import LoRARequest
from pagefold.beams.offline import BeamSearchOutput
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.outputs import CompletionOutput, RequestOutput
from pagefold.engine.planning import plan_engine
from pagefold.engine.status import EngineStatus
from pagefold.errors import AdapterError, ConfigError, InvalidRequestError
from pagefold.events import ignore
from pagefold.request import Caller
from pagefold.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from prometheus_client.metrics_core import Metric

    from pagefold.beams.offline import BeamSearchParams
    from pagefold.observe.metrics import Metrics
    from pagefold.structured.grammar import Grammar

    Prompt: TypeAlias = str | Mapping[str, Any]
    Adapters: TypeAlias = str | LoRARequest | Sequence[str | LoRARequest | None] | None

__all__ = ["LLM"]


class LLM:
    """A model with a paged, shared KV cache, in this process.

    Args:
        model: a built-in name such as ``smollm2-135m``, a local folder, a GGUF file, or a hub id.
        disable_log_stats: False counts what happens, for :meth:`get_metrics`; as in vLLM, nothing is counted if not
            asked for.
        settings: fields of :class:`~pagefold.config.engine_config.EngineConfig`: ``dtype``, ``block_size``,
            ``kv_cache_memory_bytes``, ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``,
            ``enable_prefix_caching``, ``seed``, ... Of ``kv_keep`` one share may be given without a tuple.

    Raises:
        ConfigError: an unknown setting, or one that cannot work; before weights are loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        disable_log_stats: bool = True,
        **settings: Any,  # noqa: ANN401 - checked by EngineConfig
    ) -> None:
        known = sorted(EngineConfig.__dataclass_fields__)
        unknown = sorted(set(settings) - set(known))
        if unknown:
            msg = f"LLM() has no setting {', '.join(unknown)}."
            raise ConfigError(msg, remedy=f"It has {', '.join(known)}, disable_log_stats.")
        if type(settings.get("kv_keep")) in (int, float):  # one share, as the command line takes it
            settings["kv_keep"] = (settings["kv_keep"],)
        self.config = EngineConfig(model=str(model), **settings)
        self._metrics = None if disable_log_stats else _metrics(self.config.model)
        self.engine = build_engine(plan_engine(self.config), emit=self._metrics.emit if self._metrics else ignore)
        if self._metrics is not None:
            self._metrics.watch(self._status)
        self._num_requests = 0
        self._busy = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        kv_keep: float | None = None,
        lora_request: Adapters = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete ``prompts`` together; results are in their order. Threads take turns.

        Ctrl-C ends it between two steps: every block is given back, and the next call works.

        Args:
            prompts: a text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``, or several of them.
            sampling_params: for all, or one for each prompt.
            kv_keep: which share of older tokens is kept, of those that the engine offers; None for the first of them.
            lora_request: the adapter of all prompts, by name or as a :class:`~pagefold.adapters.LoRARequest`, which
                may bring its folder: it is loaded then, if it is not yet. Or one for each prompt, None for none.
            use_tqdm: whether to show a progress bar on stderr.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing has been started then.
            AdapterError: an adapter is not there, or does not go with the model; likewise.
        """
        many: list[Prompt] = [prompts] if not isinstance(prompts, (list, tuple)) else list(prompts)  # type: ignore[list-item]
        params = self._params(sampling_params, len(many))
        with self._busy:
            names = self._adapters(lora_request, len(many))
            callers = [Caller(kv_keep=kv_keep, adapter=name) for name in names]
            grammars = [self._grammar(how) for how in params]
            results = [self._result(prompt, how) for prompt, how in zip(many, params, strict=True)]
            for result, how, caller in zip(results, params, callers, strict=True):
                self.engine.check(result.prompt_token_ids, how, caller)
            by_id = {result.request_id: result for result in results}
            with _interrupts_held_back() as raise_if_interrupted:
                try:
                    for result, how, caller, grammar in zip(results, params, callers, grammars, strict=True):
                        self.engine.add(result.request_id, result.prompt_token_ids, how, caller, grammar)
                    self._run(by_id, raise_if_interrupted, use_tqdm=use_tqdm)
                except BaseException:
                    for request_id in by_id:
                        self.engine.abort(request_id)
                    raise
        for result, how in zip(results, params, strict=True):
            if how.ranks_samples:
                result.keep_best(how)
        return results

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        kv_keep: float | None = None,
        lora_request: Adapters = None,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest outputs of each prompt; results are in the prompts' order, the best output first.

        The beams of a prompt share its blocks, and those of all that they have in common.

        Args:
            prompts: see :meth:`generate`.
            params: for all of them.
            kv_keep: see :meth:`generate`; beams keep all, so it is 1 where that is not the engine's first.
            lora_request: see :meth:`generate`.
            use_tqdm: whether to show a progress bar on stderr.

        Raises:
            InvalidRequestError: a value is out of range, or a prompt can never be served; nothing is started then.
        """
        results = self.generate(
            prompts, params.sampling(), kv_keep=kv_keep, lora_request=lora_request, use_tqdm=use_tqdm
        )
        return [BeamSearchOutput.of(result) for result in results]

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter; from then on requests may name it.

        Args:
            name: what they call it.
            path: its folder, as ``peft`` has written it.

        Raises:
            AdapterError: it does not go with the model, is damaged, or there is no room for it.
        """
        with self._busy:
            self.engine.load_adapter(name, str(path))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter: nothing is left of it.

        Raises:
            AdapterNotFoundError: there is none of that name.
        """
        with self._busy:
            self.engine.begin_unload(name)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is cached to the disk or the remote pool, if there are any, and let go of them.

        Args:
            timeout_s: seconds that it may take; what is not written by then is lost.
        """
        end = time.monotonic() + timeout_s
        self.engine.close(lambda: end - time.monotonic())

    def get_metrics(self) -> list[Metric]:
        """Return what was counted so far: the families that a server shows at ``/metrics``, of this LLM alone.

        Raises:
            ConfigError: nothing is counted.
        """
        if self._metrics is None:
            msg = "This LLM counts nothing."
            raise ConfigError(msg, remedy="Make it with disable_log_stats=False.")
        return self._metrics.read()

    def _adapters(self, asked: Adapters, num_prompts: int) -> list[str]:
        """Return the adapter of each prompt, by name, empty for none; load those that bring a folder."""
        each = [asked] * num_prompts if asked is None or isinstance(asked, (str, LoRARequest)) else list(asked)
        if len(each) != num_prompts:
            msg = f"{len(each)} lora_requests for {num_prompts} prompts."
            raise InvalidRequestError(msg, param="lora_request", remedy="Give one, or one for each prompt.")
        for one in dict.fromkeys(each):
            if isinstance(one, LoRARequest) and one.lora_path:
                self._load(one.lora_name, one.lora_path)
        return ["" if one is None else one if isinstance(one, str) else one.lora_name for one in each]

    def _load(self, name: str, path: str) -> None:
        """Load an adapter, if it is not."""
        loaded = next((one for one in self.engine.adapters.loaded if one.name == name), None)
        if loaded is None:
            self.engine.load_adapter(name, path)
        elif Path(loaded.path) != Path(path):
            msg = f"The lora adapter {name!r} is that of {loaded.path}, and {path} is another folder."
            raise AdapterError(msg, remedy="Name it otherwise, or make another LLM.")

    def _status(self) -> EngineStatus:
        engine = self.engine
        adapters = engine.adapters.status(engine.scheduler)
        return EngineStatus.of(
            engine.scheduler, caches=engine.cache_sizes(), kinds=engine.limits.kinds, adapters=adapters
        )

    def _run(
        self, by_id: dict[str, RequestOutput], raise_if_interrupted: Callable[[], None], *, use_tqdm: bool
    ) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        with Progress(*columns, console=Console(stderr=True), disable=not use_tqdm, transient=True) as bar:
            task = bar.add_task("generating", total=len(by_id), speed="")
            num_tokens = 0
            while self.engine.has_requests:
                raise_if_interrupted()
                if not self.engine.has_work:
                    self.engine.wait()
                for delta in self.engine.step():
                    by_id[delta.request_id].add(delta)
                    num_tokens += len(delta.token_ids)
                    if delta.is_last:
                        bar.advance(task)
                elapsed = bar.tasks[0].elapsed or 0.0
                bar.update(task, speed=f"{num_tokens / elapsed:.0f} tokens/s" if elapsed else "")

    def _params(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [SamplingParams()] * num_prompts
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * num_prompts
        if not isinstance(sampling_params, (list, tuple)) or not all(
            isinstance(how, SamplingParams) for how in sampling_params
        ):
            msg = f"sampling_params is {sampling_params!r}."
            raise InvalidRequestError(
                msg, param="sampling_params", remedy="Give one SamplingParams, or one for each prompt."
            )
        if len(sampling_params) != num_prompts:
            msg = f"{len(sampling_params)} sampling_params for {num_prompts} prompts."
            raise InvalidRequestError(msg, param="sampling_params", remedy="Give one, or one for each prompt.")
        return list(sampling_params)

    def _grammar(self, how: SamplingParams) -> Grammar | None:
        return None if how.structured_outputs is None else self.engine.compile_grammar(how.structured_outputs)

    def _result(self, prompt: Prompt, how: SamplingParams) -> RequestOutput:
        """Tokenize one prompt into a result that waits for its outputs."""
        text: object = prompt
        token_ids: object = None
        if not isinstance(prompt, str):
            if not hasattr(prompt, "get"):
                msg = f"A prompt is a {type(prompt).__name__}."
                raise InvalidRequestError(msg, param="prompt", remedy="Give a text or {'prompt_token_ids': [...]}.")
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None:
            if not isinstance(text, str):
                msg = "A prompt has neither text nor prompt_token_ids."
                raise InvalidRequestError(msg, param="prompt", remedy="Give a text or {'prompt_token_ids': [...]}.")
            if self.engine.tokenizer is None:
                msg = "This model's folder has no tokenizer."
                raise InvalidRequestError(msg, param="prompt", remedy="Give {'prompt_token_ids': [...]}.")
            try:
                text.encode()
            except UnicodeEncodeError:
                msg = "A prompt holds half of a surrogate pair, which is no text."
                raise InvalidRequestError(msg, param="prompt", remedy="Send whole characters.") from None
            token_ids = self.engine.tokenizer.encode(text)
        if not isinstance(token_ids, (list, tuple)) or any(type(token_id) is not int for token_id in token_ids):
            msg = "prompt_token_ids is not a list of ints."
            raise InvalidRequestError(msg, param="prompt_token_ids", remedy="Give the token ids as ints.")
        self._num_requests += 1
        return RequestOutput(
            request_id=f"llm-{self._num_requests}",
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=how.truncated(list(token_ids), self.engine.capacity.max_model_len),
            outputs=[CompletionOutput(index=index) for index in range(how.num_samples)],
        )


def _metrics(model_name: str) -> Metrics:
    from pagefold.observe.metrics import Metrics  # noqa: PLC0415 - only those who count need prometheus_client

    return Metrics(model_name)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the function that this yields is called, or until the end: it never cuts a step in two.

    Python raises KeyboardInterrupt on the main thread only, so elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield lambda: None
        return
    is_interrupted = False

    def note(_number: int, _frame: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    def raise_if_interrupted() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, before)
    if is_interrupted:  # too late to end anything, but not to be heard
        signal.raise_signal(signal.SIGINT)
