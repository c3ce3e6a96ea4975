"""Field effects: the request fields that are not simply honoured, and how each is handled.

A field that is not listed here is read by the code that serves the request; a test walks the request types and fails
for one that is neither listed nor read. The tables of docs/request-fields.md and the descriptions in the OpenAPI
document are generated from this list.
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from dynamo.protocols import anthropic, embeddings, media, native, nvext, openai, response_items, response_requests


class Effect(enum.Enum):
    """Handling of a field; the value completes "the field is …"."""

    HONOURED = "honoured"
    CARRIED = "passed to the worker"
    ECHOED = "repeated in the response"
    REFUSED = "refused"
    IGNORED = "accepted for compatibility; has no effect"


class FieldEffect(NamedTuple):
    """The handling of one field, and details."""

    effect: Effect
    note: str = ""


HONOURED = FieldEffect(Effect.HONOURED)
CARRIED = FieldEffect(Effect.CARRIED)
ECHOED = FieldEffect(Effect.ECHOED)
IGNORED = FieldEffect(Effect.IGNORED)


def _carried(note: str) -> FieldEffect:
    return FieldEffect(Effect.CARRIED, note)


def _echoed(note: str) -> FieldEffect:
    return FieldEffect(Effect.ECHOED, note)


def _refused(note: str = "") -> FieldEffect:
    return FieldEffect(Effect.REFUSED, note)


def _ignored(note: str) -> FieldEffect:
    return FieldEffect(Effect.IGNORED, note)


KV_CACHE = _ignored("the KV cache detects shared prefixes automatically")
KEPT = _ignored("kept with the item in a stored response")
TO_TEXT_WORKERS = _ignored("forwarded to workers that take text")
BY_ROUTERS = FieldEffect(Effect.HONOURED, "by KV routers")
WITH_MEDIA = _carried("in `extra_args.messages`, for conversations with media")

EFFECTS: Mapping[type[msgspec.Struct], Mapping[str, FieldEffect]] = {
    openai.CommonRequest: {
        "user": TO_TEXT_WORKERS,
        "metadata": TO_TEXT_WORKERS,
        "store": _ignored("chats and completions are not stored; forwarded to workers that take text"),
        "safety_identifier": TO_TEXT_WORKERS,
        "prompt_cache_retention": TO_TEXT_WORKERS,
        "service_tier": _echoed("the response contains `default`, the only tier"),
        "guided_decoding_backend": _carried("the engines of this release use the backend they were started with"),
        "detokenize": _carried("engines always return tokens"),
    },
    openai.ChatCompletionRequest: {
        "function_call": _refused("with 501: `tool_choice` replaces it"),
        "functions": _refused("with 501: `tools` replaces it"),
        "audio": _refused(),
        "modalities": _refused("for values other than `text`"),
        "web_search_options": _refused(),
        "prediction": TO_TEXT_WORKERS,
        "media_io_kwargs": _carried("with media: vLLM honours it; other engines reject it or take no media"),
        "mm_processor_kwargs": _carried("with media: vLLM honours it; other engines reject it or take no media"),
    },
    openai.CompletionRequest: {
        "service_tier": TO_TEXT_WORKERS,
        "prompt_embeds": _carried("vLLM reads it with `--enable-prompt-embeds`; other engines reject it by name"),
    },
    openai.ChatMessage: {"function_call": _refused("`tool_calls` replaces it")},
    openai.MediaUrl: {"detail": WITH_MEDIA, "uuid": WITH_MEDIA},
    nvext.NvExt: {
        "metadata_upload": _carried("in `extra_args.nvext`"),
        "request_timestamp_ms": CARRIED,
        "router": CARRIED,
    },
    nvext.AgentHints: {"latency_sensitivity": IGNORED},
    nvext.RequestRoutingConstraints: {"required_taints": BY_ROUTERS, "preferred_taints": BY_ROUTERS},
    response_requests.ResponsesPromptFields: {
        "conversation": _refused("use `previous_response_id`"),
        "personality": _refused("use `instructions`"),
    },
    response_requests.ResponseRequest: {
        "metadata": ECHOED,
        "user": ECHOED,
        "safety_identifier": ECHOED,
        "service_tier": ECHOED,
        "prompt_cache_retention": ECHOED,
        "prompt_cache_options": IGNORED,
        "background": _refused("for `true`"),
        "max_tool_calls": _refused("there are no built-in tools"),
        "prompt": _refused("there are no stored prompts"),
        "context_management": _refused("for values other than an empty list"),
        "moderation": _refused(),
        "image": _refused(),
        "access_programs": _refused(),
    },
    response_requests.FunctionTool: {
        "defer_loading": _refused("for `true`"),
        "allowed_callers": _refused("without `direct`"),
        "output_schema": _refused(),
        "is_async": _refused("for `true`"),
    },
    response_requests.ReasoningOptions: {
        "summary": _echoed("reasoning is always sent whole"),
        "generate_summary": ECHOED,
        "context": _refused("for values other than `auto`"),
        "mode": _refused("for values other than `standard`"),
    },
    response_requests.ResponseStreamOptions: {"include_obfuscation": _ignored("events are never padded")},
    response_items.InputText: {"prompt_cache_breakpoint": KV_CACHE},
    response_items.InputImage: {"prompt_cache_breakpoint": KV_CACHE, "file_id": _refused("use `image_url`")},
    response_items.OutputText: {"annotations": KEPT, "logprobs": KEPT},
    response_items.Logprob: dict.fromkeys(response_items.Logprob.__struct_fields__, KEPT),
    response_items.ResponseTopLogprob: dict.fromkeys(response_items.ResponseTopLogprob.__struct_fields__, KEPT),
    response_items.MessageItem: {"id": KEPT, "status": KEPT, "phase": KEPT},
    response_items.FunctionCallItem: {"id": KEPT, "status": KEPT, "namespace": KEPT, "caller": KEPT, "is_async": KEPT},
    response_items.FunctionOutputItem: {"id": KEPT, "status": KEPT, "name": KEPT, "namespace": KEPT, "caller": KEPT},
    response_items.ReasoningItem: {"id": KEPT, "status": KEPT, "encrypted_content": KEPT},
    anthropic.AnthropicPromptFields: {
        "mcp_servers": _refused(),
        "context_management": _refused("for edits other than `clear_thinking_…`, which the chat template decides"),
        "cache_control": KV_CACHE,
        "speed": IGNORED,
        "user_profile_id": IGNORED,
        "workspace_id": IGNORED,
    },
    anthropic.MessagesRequest: {
        "container": _refused(),
        "diagnostics": _refused(),
        "inference_geo": _refused(),
        "service_tier": IGNORED,
        "metadata": IGNORED,
    },
    anthropic.Metadata: {"user_id": IGNORED},
    anthropic.CacheControl: {"type": KV_CACHE, "ttl": KV_CACHE, "scope": KV_CACHE},
    anthropic.TextBlock: {"cache_control": KV_CACHE, "citations": IGNORED},
    anthropic.ImageBlock: {"cache_control": KV_CACHE},
    anthropic.TextSource: {"media_type": IGNORED},
    anthropic.DocumentBlock: {"cache_control": KV_CACHE, "citations": _refused("where they are enabled")},
    anthropic.RedactedThinkingBlock: {"data": _ignored("encrypted reasoning of another provider's model")},
    anthropic.ToolUseBlock: {"cache_control": KV_CACHE, "caller": IGNORED, "toolset_name": IGNORED},
    anthropic.ToolResultBlock: {
        "cache_control": KV_CACHE,
        "is_error": _ignored("chat templates have no marker for it: state the error in the text of the result"),
        "toolset_name": IGNORED,
    },
    anthropic.CustomTool: {
        "cache_control": KV_CACHE,
        "eager_input_streaming": _ignored("arguments are always streamed as they are generated"),
        "defer_loading": _refused("for `true`"),
        "allowed_callers": _refused("without `direct`"),
    },
    anthropic.ThinkingEnabled: {
        "budget_tokens": _ignored("checked to be 1024 or more and below `max_tokens`; use `nvext.max_thinking_tokens`"),
    },
    embeddings.EmbeddingRequest: {
        "user": TO_TEXT_WORKERS,
        "nvext": _carried("`annotations` only; workers that take text receive the whole object"),
    },
    embeddings.RerankRequest: {"user": IGNORED},
    embeddings.PoolingRequest: {"dimensions": _refused()},
    media.ImageRequest: {"stream": _refused("for `true`")},
}
"""Effects by type and field. Entries of a type hold for its subclasses unless these override them."""

SENT_WHOLE: frozenset[type[msgspec.Struct]] = frozenset(
    {
        embeddings.ClassifyRequest,
        embeddings.PoolingRequest,
        embeddings.RerankRequest,
        media.ImageRequest,
        media.SpeechRequest,
        media.VideoRequest,
    }
)
"""Types that are forwarded to the worker unchanged: the worker reads every field that is not listed."""

ENDPOINTS: Mapping[str, type[msgspec.Struct]] = {
    "POST /v1/chat/completions": openai.ChatCompletionRequest,
    "POST /v1/completions": openai.CompletionRequest,
    "POST /v1/responses": response_requests.ResponseRequest,
    "POST /v1/responses/input_tokens": response_requests.TokenCountRequest,
    "POST /v1/messages": anthropic.MessagesRequest,
    "POST /v1/messages/count_tokens": anthropic.MessageCountRequest,
    "POST /v1/embeddings": embeddings.EmbeddingRequest,
    "POST /v1/classify": embeddings.ClassifyRequest,
    "POST /v1/pooling": embeddings.PoolingRequest,
    "POST /v1/rerank": embeddings.RerankRequest,
    "POST /v1/images/generations": media.ImageRequest,
    "POST /v1/audio/speech": media.SpeechRequest,
    "POST /v1/videos": media.VideoRequest,
    "POST /inference/v1/generate": native.VllmRequest,
    "POST /generate": native.SglangRequest,
}
"""The request type of each route that calls a model."""

ITEMS: Mapping[type[msgspec.Struct], Any] = {response_requests.ResponsesPromptFields: response_items.InputItem}
"""Types that are decoded later than the request that contains them."""


def effect_of(kind: type[msgspec.Struct], field: str) -> FieldEffect:
    """Return the effect of a field, by its name in Python."""
    for base in kind.__mro__:
        found = EFFECTS.get(base, {}).get(field)
        if found is not None:
            return found
    return CARRIED if kind in SENT_WHOLE else HONOURED


def types_within(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the request types inside an annotation, each once, outer types first."""
    waiting, seen = [kind], set()
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            if one in seen:
                continue
            seen.add(one)
            yield one
            waiting += [field.type for field in msgspec.structs.fields(one)]
            waiting += [items for base, items in ITEMS.items() if issubclass(one, base)]
        else:
            waiting += get_args(one)
