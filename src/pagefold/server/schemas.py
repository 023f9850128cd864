"""What clients send: OpenAI's request forms, with vLLM's additions.

Types are strict: ``"5"`` and ``true`` are no numbers. null is the same as leaving a field out. Unknown fields are
ignored and told (``ignored.py`` does both), but for those of ``unsupported``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from pagefold.beams import EarlyStopping
from pagefold.config import MAX_PRIORITY, Account
from pagefold.errors import InvalidRequestError
from pagefold.request import MAX_RETURNS_IN_S, MAX_SESSION_ID, Caller
from pagefold.sampling import MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams
from pagefold.server.ignored import Body
from pagefold.server.speculative_fields import SpeculativeConfig  # noqa: TC001 - pydantic reads it
from pagefold.server.structured_fields import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    Structured,
    StructuredOutputs,
    the_one_of,
)
from pagefold.server.told_prompt import refuse_too_much
from pagefold.server.unsupported import refuse_unsupported

__all__ = [
    "MAX_PARTS",
    "MAX_SALT_CHARACTERS",
    "MAX_TOKEN_ID",
    "SERVICE_TIERS",
    "CachedRequest",
    "GenerationRequest",
    "OneText",
    "RequestBody",
    "StreamOptions",
    "Text",
    "TieredRequest",
    "few_parts",
    "stated",
    "whole_text",
]

_MAX_STOP_IDS = 4096
_MAX_ALLOWED_IDS = 2**18
MAX_PARTS = 2048
"""Messages of a request, and parts of all of them: each is an object to check while everybody else waits."""

MAX_SALT_CHARACTERS = 256
"""Length of a ``cache_salt``, at most: it is kept as long as any block that was computed with it."""

MAX_KIND_CHARACTERS = 64
"""Length of the name of a kind of blocks, at most."""

_MAX_INT64 = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
_MAX_ID_DIGITS = 18

_TIMES_TOO_LONG = 8

ServiceTier: TypeAlias = Literal["auto", "default", "flex", "scale", "priority"]

SERVICE_TIERS: dict[ServiceTier, int] = {"auto": 0, "default": 0, "scale": 0, "priority": -10, "flex": 10}
"""What each tier adds to the priority that the key's customer class says."""

OneText: TypeAlias = Annotated[str, Field(min_length=1)]
_Stop: TypeAlias = OneText | Annotated[list[OneText], Field(max_length=16)]
_Bias: TypeAlias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"additionalProperties": False}),
]


def stated(**bounds: float) -> Any:  # noqa: ANN401 - as Field
    """Return bounds for the API's description of itself; ``SamplingParams`` holds them, in better words."""
    return Field(json_schema_extra=dict(bounds))


def _as_list(value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    msg = "it must be a text or a list of texts"
    raise ValueError(msg)


def few_parts(messages: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
    """Check how many parts messages have together, before any is looked at."""
    contents = (
        [message.get("content") for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_PARTS:
        msg = f"at most {MAX_PARTS} parts go into one request"
        raise ValueError(msg)
    return messages


def whole_text(text: str) -> str:
    """Check that a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = "it holds half of a surrogate pair, which is no text"
        raise ValueError(msg) from None
    return text


Text: TypeAlias = Annotated[StrictStr, AfterValidator(whole_text)]


def _as_bias(value: object) -> dict[int, float]:
    """Check by hand: keys are token ids written as texts, since JSON has no other keys."""
    if not isinstance(value, dict):
        msg = "it must be an object of token ids and numbers"
        raise ValueError(msg)  # noqa: TRY004 - as above
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= _MAX_ID_DIGITS):
            msg = "its keys must be token ids"
            raise ValueError(msg)
        if type(bias) not in (int, float):
            msg = "its values must be numbers"
            raise ValueError(msg)
    return {int(token_id): bias for token_id, bias in value.items()}


def _as_early_stopping(value: object) -> EarlyStopping:
    if value is True or value is False or value == "never":
        return value
    msg = 'it must be true, false or "never"'
    raise ValueError(msg)


class StreamOptions(Body):
    """How to stream.

    Attributes:
        include_usage: whether a last chunk tells the token counts.
        continuous_usage_stats: with it, whether every chunk tells those of its choice so far.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class RequestBody(Body):
    """What every body has.

    Attributes:
        model: may be left out: there is one.
    """

    model: Text | None = None


class CachedRequest(RequestBody):
    """What every body has whose prompt is cached for others of the same caller.

    Attributes:
        cache_salt: requests share cached prefixes only with those that bring the same salt.
        priority: the smaller, the sooner it is served; only where the server schedules by priority. That of the key's
            customer class, else 0, if it is not there.
        returns_in_s: so many seconds after its end the client expects to go on from it. Its blocks are worth keeping,
            and what only slow tiers have of them by then is brought before.
        session_id: the client's name for the row of requests that this one goes on with: an agent's session.
        parent_session_id: that of the session whose agent has called this one's.
        kv_keep: which share of its older tokens is kept, of those that the server was started with; 1 for all.
        kv_quality: the same by name: ``exact``, or another kind of blocks that the server offers.
    """

    cache_salt: Annotated[Text | None, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] = None
    priority: Annotated[StrictInt | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    returns_in_s: Annotated[StrictFloat | None, stated(minimum=0, maximum=MAX_RETURNS_IN_S)] = None
    session_id: Annotated[Text | None, Field(min_length=1, max_length=MAX_SESSION_ID)] = None
    parent_session_id: Annotated[Text | None, Field(min_length=1, max_length=MAX_SESSION_ID)] = None
    kv_keep: Annotated[StrictFloat | None, stated(exclusiveMinimum=0, maximum=1)] = None
    kv_quality: Annotated[Text | None, Field(min_length=1, max_length=MAX_KIND_CHARACTERS)] = None

    def caller(self, account: Account) -> Caller:
        """Return who asks, and on what terms: the tenant is the account's, whatever the body says."""
        priority = account.priority if self.priority is None else self.priority
        asks = self.kv_keep is not None or self.kv_quality is not None
        return Caller(
            tenant=account.tenant,
            weight=1.0 if account.weight is None else account.weight,
            cache_salt=self.cache_salt or "",
            priority=priority,
            returns_in_s=self.returns_in_s,
            session_id=self.session_id or "",
            parent_session_id=self.parent_session_id or "",
            kv_keep=self.kv_keep if asks else account.kv_keep,
            kv_quality=self.kv_quality or "",
        )


class TieredRequest(CachedRequest):
    """What every body has in OpenAI's APIs.

    Attributes:
        service_tier: OpenAI's word for a ``priority``, which counts instead if it is there too. Of what the key's
            customer class says, ``priority`` takes 10 and ``flex`` adds 10; ``default``, ``auto`` and ``scale`` leave
            it. It is told back, ``auto`` as ``default``. Where the server does not schedule by priority it changes
            nothing.
    """

    service_tier: ServiceTier | None = None

    def caller(self, account: Account) -> Caller:
        """Return who asks, and on what terms; see :meth:`CachedRequest.caller`."""
        caller = super().caller(account)
        if self.service_tier is None or self.priority is not None:
            return caller
        return replace(caller, tier_offset=SERVICE_TIERS[self.service_tier])

    def told_back(self) -> dict[str, str]:
        """Return what an answer tells of the request."""
        if self.service_tier is None:
            return {}
        return {"service_tier": "default" if self.service_tier == "auto" else self.service_tier}


class GenerationRequest(TieredRequest):
    """What completions and chats have in common; :class:`~pagefold.sampling.SamplingParams` says what the fields mean.

    Attributes:
        stream: whether the answer comes in events, as it is made.
        stream_options: how, if it does.
        stop: one text or several.
        max_completion_tokens: OpenAI's newer name of ``max_tokens``; it counts when both are there.
        user: accepted and ignored.
        response_format: what the output must look like: text, any JSON object, or JSON of a schema.
        structured_outputs: the same in vLLM's form: ``json``, ``regex``, ``choice``, ``grammar`` or ``json_object``.
        temperature: 1 where it is left out, and 0 with ``use_beam_search``.
        speculative_config: who drafts for the request, where the server drafts: ``method``, ``num_speculative_tokens``
            (0 for nobody) and others of vLLM's. It changes nothing of the answer.
        return_token_ids: whether ``token_ids`` tell what was sampled, and ``prompt_token_ids`` what it follows.
        guided_json: vLLM's older form of ``structured_outputs.json``.
        guided_regex: of its ``regex``.
        guided_choice: of its ``choice``.
        guided_grammar: of its ``grammar``.
    """

    default_max_tokens: ClassVar[int | None] = None
    has_many_prompts: ClassVar[bool] = False

    n: Annotated[StrictInt, stated(minimum=1)] = 1
    best_of: Annotated[StrictInt | None, stated(minimum=1)] = None
    max_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    temperature: Annotated[StrictFloat, stated(minimum=0, maximum=2)] = 1.0
    top_p: Annotated[StrictFloat, stated(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[StrictInt, Field(le=_MAX_INT64), stated(minimum=-1)] = 0
    min_p: Annotated[StrictFloat, stated(minimum=0, maximum=1)] = 0.0
    presence_penalty: Annotated[StrictFloat, stated(minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[StrictFloat, stated(minimum=-2, maximum=2)] = 0.0
    repetition_penalty: Annotated[StrictFloat, stated(exclusiveMinimum=0)] = 1.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_as_bias, json_schema_input_type=_Bias)] = {}  # noqa: RUF012 - pydantic copies defaults
    min_tokens: Annotated[StrictInt, stated(minimum=0)] = 0
    seed: Annotated[StrictInt | None, Field(ge=-_MAX_INT64, le=_MAX_INT64)] = None
    stop: Annotated[list[Text], FailFast(), BeforeValidator(_as_list, json_schema_input_type=_Stop)] = []  # noqa: RUF012 - as above
    include_stop_str_in_output: StrictBool = False
    stop_token_ids: Annotated[
        list[Annotated[StrictInt, stated(minimum=0)]], Field(max_length=_MAX_STOP_IDS), FailFast()
    ] = []  # noqa: RUF012 - as above
    ignore_eos: StrictBool = False
    allowed_token_ids: Annotated[
        list[Annotated[StrictInt, stated(minimum=0)]] | None, Field(max_length=_MAX_ALLOWED_IDS), FailFast()
    ] = None
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS), FailFast()] = []  # noqa: RUF012 - as above
    truncate_prompt_tokens: Annotated[StrictInt | None, Field(le=_MAX_INT64), stated(minimum=-1)] = None
    prompt_logprobs: Annotated[StrictInt | None, stated(minimum=0, maximum=MAX_LOGPROBS)] = None
    skip_special_tokens: StrictBool = True
    return_token_ids: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    use_beam_search: StrictBool = False
    length_penalty: Annotated[StrictFloat, stated(minimum=-10, maximum=10)] = 1.0
    early_stopping: Annotated[
        EarlyStopping, PlainValidator(_as_early_stopping, json_schema_input_type=EarlyStopping)
    ] = False
    speculative_config: SpeculativeConfig = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict):
            refuse_unsupported(fields, cls.unsupported)
            if fields.get("stream_options") is not None and fields.get("stream") is not True:
                msg = "stream_options is there, but stream is not true."
                raise InvalidRequestError(msg, param="stream_options", remedy="Leave it out, or stream.")
        return fields

    def caller(self, account: Account) -> Caller:
        """Return who asks, and on what terms; see :meth:`CachedRequest.caller`."""
        return replace(super().caller(account), speculation=self.speculative_config)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, structured: Structured | None = None) -> SamplingParams:
        """Return how to sample, and what the output must look like.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        asked = (self.max_completion_tokens, self.max_tokens, self.default_max_tokens)
        max_tokens = next((number for number in asked if number is not None), None)
        is_given = "temperature" in self.model_fields_set
        how = SamplingParams(
            n=self.n,
            best_of=self.best_of,
            temperature=0.0 if not is_given and self.use_beam_search else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.num_prompt_logprobs(),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=None if structured is None else structured.params,
            use_beam_search=self.use_beam_search,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
        if self.use_beam_search and self.stream:
            msg = "use_beam_search is true, and stream too: what beams find is known at the end."
            raise InvalidRequestError(msg, param="stream", remedy="Leave one of them out.")
        if how.ranks_samples and self.stream:
            msg = (
                f"best_of is {self.best_of} and n is {self.n}: which are the best is known at the end, not in a stream."
            )
            raise InvalidRequestError(msg, param="best_of", remedy="Leave it out, or do not stream.")
        if self.prompt_logprobs is not None and self.stream:
            msg = "prompt_logprobs are told in a whole answer, and stream is true."
            raise InvalidRequestError(msg, param="prompt_logprobs", remedy="Leave it out, or do not stream.")
        return how

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream tells the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def times_too_long(self) -> int:
        """How many contexts a text may have: one that is truncated is tokenized first."""
        return 1 if self.truncate_prompt_tokens is None else _TIMES_TOO_LONG

    def structured(self) -> Structured | None:
        """Return what the output must look like, if that is said.

        Raises:
            InvalidRequestError: two fields say it.
        """
        return the_one_of(
            {
                "response_format": self.response_format,
                "structured_outputs": self.structured_outputs,
                "guided_json": self.guided_json,
                "guided_regex": self.guided_regex,
                "guided_choice": self.guided_choice,
                "guided_grammar": self.guided_grammar,
            }
        )

    def num_logprobs(self) -> int | None:
        """Return of how many alternatives to each token logprobs are asked for; None for none, not even the token's."""
        return None

    def num_prompt_logprobs(self) -> int | None:
        """Return the same of the prompt's tokens."""
        return self.prompt_logprobs

    def fitted(self, prompts: list[list[int]], sampling: SamplingParams, max_model_len: int) -> list[list[int]]:
        """Return these prompts, truncated if that is asked for.

        Raises:
            InvalidRequestError: the answer would repeat too much of them.
        """
        prompts = [sampling.truncated(prompt, max_model_len) for prompt in prompts]
        told = self.num_told_of_prompts()
        num_choices = self.n if self.has_many_prompts else 1
        param = max(told, key=told.__getitem__)
        refuse_too_much(prompts, num_choices * sum(told.values()), is_streamed=self.stream, param=param)
        return prompts

    def num_told_of_prompts(self) -> dict[str, int]:
        """Return how many things are told of each token of a prompt, by the field that asks for them."""
        num_logprobs = 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs
        return {"return_token_ids": int(self.return_token_ids), "prompt_logprobs": num_logprobs}
