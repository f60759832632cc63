"""The bodies of requests and answers, as OpenAI has them.

A field that is not declared here is unknown and refused by name. A field that asks for something not built is
declared with the one value that asks for nothing (see `UNSUPPORTED`). What the values mean is `api.calls.prepare`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Copies = Annotated[int, Meta(ge=1, le=128)]
StopString = Annotated[str, Meta(min_length=1, max_length=512)]
StopList = Annotated[list[StopString], Meta(max_length=16)]
Nothing = Annotated[list[Any], Meta(max_length=0)]
"""A list that must be empty, where its content would ask for something not built."""

UNSUPPORTED = frozenset(
    {
        "audio",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "modalities",
        "moderation",
        "prediction",
        "response_format",
        "service_tier",
        "store",
        "suffix",
        "tool_calls",
        "tool_choice",
        "tools",
        "web_search_options",
    }
)
"""Fields known to clients whose values, beyond the default, ask for something that is not built."""

DEFAULTS: Mapping[str, object] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "echo": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "priority": 0,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "store": False,
    "use_beam_search": False,
}
"""Fields that may be given with this value, which asks for what is done anyway. Clients of vLLM send many of them."""

FREE_FIELDS = frozenset({"chat_template_kwargs", "logit_bias", "metadata", "prompt_cache_options"})
"""Fields whose own fields are the client's to name."""


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation; the fields that must be null are those clients echo from an answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    refusal: str | None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None


class GenerationRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Copies | None = None
    max_tokens: Count | None = None
    stop: StopString | StopList | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    numerics_profile: Literal["balanced", "b1-exact"] | None = None

    # Labels: whose a call is, where it is filed, how long a prompt is cached. They change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: str | None = None

    # Taken with their default only, see `DEFAULTS`.
    store: bool | None = None
    echo: bool | None = None
    include_stop_str_in_output: bool | None = None
    length_penalty: float | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None


class ChatRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    reasoning_effort: str | None = None
    """A variable of templates that know it, and a label elsewhere."""
    parse_control_tokens: bool | None = None
    """Control tokens written in messages count as such; they are text otherwise."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None


class CompletionRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """One prompt or several; a list of numbers is one prompt as token ids."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Copies | None = None
    suffix: Literal[""] | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: UsageDetails | UnsetType = UNSET
    mtplx: EngineUsage | UnsetType = UNSET


class UsageDetails(Struct, frozen=True):
    """Drafts of the model's own head: how many were kept, and how many were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class EngineUsage(Struct, frozen=True):
    """What the engine did for a call; absent where it drafts nothing."""

    cycles: int
    drafted: list[int]
    """Drafts at depth 1, 2, ..."""
    accepted: list[int]
    min_width: int
    """Fewest rows that shared a cycle with it, itself included."""
    max_width: int


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]
    bytes: list[list[int] | None]
    """Beyond OpenAI's: the bytes of each token, since one that ends within a character has no name."""


class AnswerMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class Chat(Struct, frozen=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(Struct, frozen=True):
    """One event of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Completion(Struct, frozen=True):
    """Answer of POST /v1/completions, whole or one event of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


class DefaultSampling(Struct, frozen=True):
    """What holds where a request leaves a field out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """None: up to the context."""


class Model(Struct, frozen=True):
    id: str
    created: int
    max_context_tokens: int
    profiles: list[str]
    identity: str
    default_sampling_params: DefaultSampling
    object: Literal["model"] = "model"
    owned_by: str = "mtplx"


class ModelList(Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail
