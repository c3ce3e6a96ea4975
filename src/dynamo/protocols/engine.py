"""Worker requests and outputs: PreprocessedRequest and EngineOutput."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

BYPASS_REMOTE_PREFILL = "x-bypass-remote-prefill"
"""The annotation that makes a decode worker compute the prompt itself, without a prefill worker."""

RESUMED = "resumed"
"""Key in `extra_args` of a `Resumed`, set when a migrated stream is continued."""

RESUMES_SAMPLING = "resumes_sampling"
"""Key in a worker's `runtime_data`: true if penalties and seeded sampling of a resumed request continue seamlessly."""


class Resumed(msgspec.Struct, frozen=True):
    """The part of a resumed request's prompt that was generated."""

    output_tokens: int = 0
    """Tokens at the end of the prompt that other workers generated."""
    thinking_tokens: int = 0
    """Thinking tokens among them, already subtracted from `max_thinking_tokens`."""


class GuidedDecoding(msgspec.Struct, omit_defaults=True):
    """One constraint of the output; exactly one of the first five fields is set."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    backend: str | None = None
    whitespace_pattern: str | None = None


class StopConditions(msgspec.Struct):
    """When generation ends. `max_tokens` None: up to the context length."""

    max_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class SamplingOptions(msgspec.Struct):
    """How the next token is chosen. None selects the engine's default."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedDecoding | None = None


class OutputOptions(msgspec.Struct):
    """Additional output. `logprobs` is the number of alternatives per token (0: the sampled token only)."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    no_stop_trim: bool | UnsetType = UNSET


class Routing(msgspec.Struct, omit_defaults=True):
    """Required and preferred workers and other routing inputs of the request."""

    backend_instance_id: int | None = None
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    expected_output_tokens: int | None = None
    priority: int | None = None
    priority_jump: float | None = None
    strict_priority: int | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    allowed_worker_ids: list[int] | None = None
    routing_constraints: dict[str, Any] | None = None


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """Prompt tokens that were read from the cache."""

    cached_tokens: int | None = None


class PrefillDetails(msgspec.Struct):
    """Prompt tokens that the prefill worker read from its cache."""

    audio_tokens: int | None = None
    cached_tokens: int | None = None


class PrefillResult(msgspec.Struct, omit_defaults=True):
    """The result of a remote prefill, for the decode worker."""

    disaggregated_params: Any
    """Engine-specific location of the KV blocks. Most engines send a mapping, released mockers a string."""
    prompt_tokens_details: PrefillDetails | None = None


class BootstrapInfo(msgspec.Struct):
    """Rendezvous of the prefill and decode requests that are sent concurrently; equal in both."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    """Random, below 2**63."""
    handoff_id: bytes | UnsetType = UNSET
    """Sixteen random bytes."""


class PreprocessedRequest(msgspec.Struct):
    """A tokenized request from the frontend to a worker, with upstream's key order."""

    model: str
    token_ids: list[int]
    """Token ids of the prompt; empty if the prompt is `prompt_embeds`."""
    stop_conditions: StopConditions = msgspec.field(default_factory=StopConditions)
    sampling_options: SamplingOptions = msgspec.field(default_factory=SamplingOptions)
    output_options: OutputOptions = msgspec.field(default_factory=OutputOptions)
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    mdc_sum: str | None = None
    annotations: list[str] = msgspec.field(default_factory=list)
    routing: Routing | None = None
    router_config_override: dict[str, Any] | None = None
    prefill_result: PrefillResult | UnsetType | None = UNSET
    """For a decode worker: the result of the remote prefill."""
    bootstrap_info: BootstrapInfo | UnsetType | None = UNSET
    """Set in concurrently sent prefill and decode requests."""
    extra_args: dict[str, Any] | UnsetType = UNSET
    """Engine-specific extras; `logit_bias` is sent here as `{"sampling_options": {"logit_bias": {"id": bias}}}`."""
    require_reasoning: bool | UnsetType = UNSET
    """True if guided decoding begins after the model's reasoning."""
    request_timestamp_ms: float | UnsetType = UNSET
    multi_modal_data: dict[str, list[dict[str, str]]] | UnsetType = UNSET
    """Images, videos and audio clips of the prompt, in order: `{"image_url": [{"Url": "https://…"}]}`."""
    mm_processor_kwargs: Any = UNSET
    media_io_kwargs: Any = UNSET
    prompt_embeds: str | UnsetType | None = UNSET
    """The prompt as embeddings: a saved PyTorch tensor in base64."""
    router: dict[str, Any] | UnsetType = UNSET
    """The service level objectives of the request."""
    agent_context: dict[str, Any] | UnsetType = UNSET
    """The agent's session that the request belongs to."""
    image_cache_scope: str | UnsetType = UNSET
    """Session whose requests may share cached images."""
    mm_routing_info: dict[str, Any] | UnsetType = UNSET
    """For routing only, if the prompt contains media: `{"routing_token_ids": […], "block_mm_infos": […]}`."""


def resumed_of(request: PreprocessedRequest) -> Resumed:
    """Return the `Resumed` of a request; an empty one for a new request or an invalid value."""
    extra = request.extra_args
    try:
        return msgspec.convert({} if extra is UNSET else extra.get(RESUMED) or {}, Resumed)
    except msgspec.ValidationError:
        return Resumed()


class TopLogprob(msgspec.Struct, omit_defaults=True):
    """One alternative for a token; `rank` counts from 1."""

    rank: int
    token_id: int
    token: str | None = None
    logprob: float = 0.0
    bytes: list[int] | None = None


class CompletionTokensDetails(msgspec.Struct):
    """Output tokens of the reasoning."""

    reasoning_tokens: int = 0


class CompletionUsage(msgspec.Struct, omit_defaults=True):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    """Set if reasoning tokens are counted separately."""

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens read from a cache; None if it is not reported."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class EngineOutput(msgspec.Struct, omit_defaults=True):
    """A piece of a response: the tokens generated since the previous piece. The last piece has a `finish_reason`."""

    token_ids: list[int]
    index: int | None = None
    """The choice; a worker may omit it for a single choice."""
    tokens: list[str] | None = None
    text: str | None = None
    cum_log_probs: float | None = None
    log_probs: list[float] | None = None
    top_logprobs: list[list[TopLogprob]] | None = None
    finish_reason: str | None = None
    """`stop`, `eos`, `length`, `cancelled`, `content_filter` or `error:<message>`."""
    stop_reason: int | str | None = None
    completion_usage: CompletionUsage | None = None
    disaggregated_params: Any = None
    engine_data: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    encoder_result: dict[str, Any] | None = None
    """Output of an encode worker for the next worker; its content is specific to the engines."""
