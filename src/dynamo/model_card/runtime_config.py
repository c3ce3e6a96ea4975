"""ModelRuntimeConfig: properties of a worker's engine, published with the model's card."""

import json
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from dynamo.core.errors import InvalidArgument
from dynamo.model_card.tool_call_tags import TagPolicy
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.model_card import DisaggregatedEndpoint, RuntimeConfig

ENFORCEMENTS = ("required", "preferred")

TOPOLOGY_TAINTS = "dynamo.topology/"
"""Prefix of taints that are derived from `topology_domains` and cannot be set directly."""

TOKENIZER_BACKENDS = ("default", "fastokens", "basetenkenizer")
CHOICES = {"kv_transfer_enforcement": ENFORCEMENTS, "tokenizer_backend": TOKENIZER_BACKENDS}
BITS = {
    "context_length": 32,
    "data_parallel_size": 32,
    "data_parallel_start_rank": 32,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 64,
    "total_kv_blocks": 64,
}
"""Width of each unsigned integer on the card."""
TYPES: dict[str, type[Any]] = {
    **dict.fromkeys(BITS, int),
    **dict.fromkeys(
        ("enable_eagle", "enable_local_indexer", "exclude_tools_when_tool_choice_none", "kv_event_publishing_enabled"),
        bool,
    ),
    **dict.fromkeys(
        (
            *CHOICES,
            "kv_event_source_mode",
            "kv_state_endpoint",
            "kv_transfer_domain",
            "reasoning_parser",
            "stable_routing_id",
            "tool_call_parser",
        ),
        str,
    ),
    "kv_transfer_preferred_weight": float,
    "taints": set,
    "topology_domains": dict,
}
REQUIRED = frozenset({
    "data_parallel_size", "data_parallel_start_rank", "enable_eagle", "enable_local_indexer",
    "exclude_tools_when_tool_choice_none", "taints", "topology_domains",
})  # fmt: skip
"""Attributes that cannot be None."""


class ModelRuntimeConfig:
    """Properties that are set attribute by attribute; unknown attributes cannot be set."""

    __slots__ = (
        "_tag_policy",
        "bootstrap_host",
        "bootstrap_port",
        "context_length",
        "data_parallel_size",
        "data_parallel_start_rank",
        "enable_eagle",
        "enable_local_indexer",
        "exclude_tools_when_tool_choice_none",
        "kv_event_publishing_enabled",
        "kv_event_source_mode",
        "kv_state_endpoint",
        "kv_transfer_domain",
        "kv_transfer_enforcement",
        "kv_transfer_preferred_weight",
        "max_num_batched_tokens",
        "max_num_seqs",
        "reasoning_parser",
        "runtime_data",
        "stable_routing_id",
        "taints",
        "tokenizer_backend",
        "tool_call_parser",
        "topology_domains",
        "total_kv_blocks",
    )

    def __init__(self) -> None:
        self.context_length: int | None = None
        self.total_kv_blocks: int | None = None
        self.max_num_seqs: int | None = None
        self.max_num_batched_tokens: int | None = None
        self.tool_call_parser: str | None = None
        self.reasoning_parser: str | None = None
        self.tokenizer_backend: str | None = None
        self.exclude_tools_when_tool_choice_none = True
        self.data_parallel_start_rank = 0
        self.data_parallel_size = 1
        self.enable_local_indexer = True
        self.kv_event_publishing_enabled: bool | None = None
        self.kv_event_source_mode: str | None = None
        self.kv_state_endpoint: str | None = None
        self.enable_eagle = False
        self.taints: set[str] = set()
        self.stable_routing_id: str | None = None
        self.runtime_data: dict[str, Any] = {}
        self.topology_domains: dict[str, str] = {}
        self.kv_transfer_domain: str | None = None
        self.kv_transfer_enforcement: str | None = None
        self.kv_transfer_preferred_weight: float | None = None
        self.bootstrap_host: str | None = None
        self.bootstrap_port: int | None = None
        self._tag_policy: TagPolicy | None = None

    if not TYPE_CHECKING:  # Type checkers would accept every attribute.

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute. Raise `TypeError`, `OverflowError` or `InvalidArgument` for a wrong value."""
            object.__setattr__(self, name, checked(name, value))

    @property
    def structural_tag(self) -> dict[str, Any] | None:
        """Policy that constrains responses to the model's own format of tool calls; None: no constraint."""
        if self._tag_policy is None:
            return None
        config = RuntimeConfig()
        self._tag_policy.put_on(config)
        return config.structural_tag or None

    def set_structural_tag(self, structural_tag: dict[str, Any] | None = None) -> None:
        """Set the policy, or remove it with None. Raise `InvalidArgument` for an unsupported option."""
        self._tag_policy = None if structural_tag is None else TagPolicy.of(structural_tag)

    def set_engine_specific(self, key: str, value: Any) -> None:
        """Publish an engine-specific value; text is parsed as JSON, as in upstream."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise InvalidArgument(f"engine-specific {key}={value!r}: expected JSON ({error})") from None
        self.runtime_data[key] = value

    def get_engine_specific(self, key: str) -> Any | None:
        """Return the value of a key, None if it is not set."""
        return self.runtime_data.get(key)

    def set_disaggregated_endpoint(self, bootstrap_host: str | None = None, bootstrap_port: int | None = None) -> None:
        """Set the address at which decode workers connect to this prefill worker."""
        self.bootstrap_host = bootstrap_host
        self.bootstrap_port = bootstrap_port

    def on_card(self) -> RuntimeConfig:
        """Return the configuration in the model card's form. Raise `InvalidArgument` for an invalid value."""
        config = RuntimeConfig(
            context_length=self.context_length,
            total_kv_blocks=self.total_kv_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            tokenizer_backend=self.tokenizer_backend or UNSET,
            exclude_tools_when_tool_choice_none=self.exclude_tools_when_tool_choice_none,
            data_parallel_start_rank=self.data_parallel_start_rank,
            data_parallel_size=self.data_parallel_size,
            enable_local_indexer=self.enable_local_indexer,
            kv_event_publishing_enabled=self.kv_event_publishing_enabled,
            kv_event_source_mode=self.kv_event_source_mode or UNSET,
            kv_state_endpoint=EndpointId.parse(self.kv_state_endpoint) if self.kv_state_endpoint else UNSET,
            enable_eagle=self.enable_eagle,
            taints=check_taints(self.taints) or UNSET,
            stable_routing_id=self.stable_routing_id or UNSET,
            topology_domains=dict(self.topology_domains) or UNSET,
            kv_transfer_domain=self.kv_transfer_domain or UNSET,
            kv_transfer_enforcement=self.kv_transfer_enforcement or UNSET,
            kv_transfer_preferred_weight=UNSET
            if self.kv_transfer_preferred_weight is None
            else self.kv_transfer_preferred_weight,
            runtime_data=dict(self.runtime_data),
            disaggregated_endpoint=DisaggregatedEndpoint(self.bootstrap_host, self.bootstrap_port)
            if self.bootstrap_host or self.bootstrap_port
            else UNSET,
        )
        if self._tag_policy is not None:
            self._tag_policy.put_on(config)
        return config


def checked(name: str, value: Any) -> Any:
    """Return the value to store in an attribute. Raise `TypeError`, `OverflowError` or `InvalidArgument`."""
    kind = TYPES.get(name)
    if kind is None or (value is None and name not in REQUIRED):
        return value
    accepted: Any = (int, float) if kind is float else kind
    if not isinstance(value, accepted):
        raise TypeError(f"{name} {value!r}: expected {kind.__name__}, got {type(value).__name__}")
    if kind is dict and not all(isinstance(part, str) for item in value.items() for part in item):
        raise TypeError(f"{name} {value!r}: expected texts as keys and values")
    if name in BITS and not 0 <= value < 1 << BITS[name]:
        raise OverflowError(f"{name} {value}: expected 0 to {(1 << BITS[name]) - 1}")
    if name in CHOICES and value not in CHOICES[name]:
        raise InvalidArgument(f"{name} {value!r}: expected {' or '.join(CHOICES[name])}")
    if name in BITS or kind is float:
        return kind(value)  # A bool is an int, and an int is a float.
    return value


def check_taints(taints: set[str]) -> list[str]:
    """Return the taints in order. Raise `InvalidArgument` for a reserved one."""
    reserved = sorted(taint for taint in taints if taint.startswith(TOPOLOGY_TAINTS))
    if reserved:
        raise InvalidArgument(f"taint {reserved[0]!r}: {TOPOLOGY_TAINTS} is reserved for topology_domains")
    return sorted(taints)
