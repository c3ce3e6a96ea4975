"""NvExt: the `nvext` object of a request, with the options that are not part of OpenAI's API."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
I32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
WorkerNumber = Annotated[int, Meta(ge=0)]
"""An unsigned 64-bit number; JSON decoding rejects larger values."""


class AgentHints(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Hints of an agent framework about a call."""

    priority: I32 | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None
    """The expected output length in tokens."""
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


class RequestRoutingConstraints(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Required and preferred workers of a request."""

    required_taints: list[str] = msgspec.field(default_factory=list)
    preferred_taints: dict[str, float] = msgspec.field(default_factory=dict)
    """Weights by taint."""


class NvExt(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The `nvext` object of a request. An unknown key is an error that lists the known keys."""

    annotations: list[str] | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    backend_instance_id: WorkerNumber | None = None
    token_data: list[U32] | None = None
    max_thinking_tokens: U32 | None = None
    cache_salt: str | None = None
    extra_fields: list[str] | None = None
    metadata_upload: dict[str, Any] | None = None
    prefill_worker_id: WorkerNumber | None = None
    decode_worker_id: WorkerNumber | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    agent_hints: AgentHints | None = None
    request_timestamp_ms: float | None = None
    routing_constraints: RequestRoutingConstraints | None = None
    router: dict[str, Any] | None = None
