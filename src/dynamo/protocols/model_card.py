"""ModelDeploymentCard: the description of a model that its workers publish."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class FileReference(msgspec.Struct):
    """One asset of a model: a local path or a URL, and the hash of its content (`blake3:<hex>`)."""

    path: str
    checksum: str
    size: int | None = None


class ChatTemplateFile(msgspec.Struct):
    """A chat template outside the tokenizer's configuration; custom when it was set by a flag of the worker."""

    file: FileReference
    is_custom: bool = False


class DisaggregatedEndpoint(msgspec.Struct):
    """The address at which a decode worker connects to this prefill worker."""

    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


class RuntimeConfig(msgspec.Struct, kw_only=True):
    """Capacities and features that the engine reports; zero or None if it does not report them."""

    context_length: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tokenizer_backend: str | UnsetType | None = UNSET
    tool_call_arguments_format: str = "json_string"
    structural_tag: dict[str, Any] | UnsetType | None = UNSET
    """When output is constrained to the model's tool call format; the three fields below are the older form."""
    structural_tag_mode: str = "off"
    structural_tag_scope: str = "auto"
    structural_tag_schema: str = "auto"
    exclude_tools_when_tool_choice_none: bool = True
    data_parallel_start_rank: int = 0
    data_parallel_size: int = 1
    enable_local_indexer: bool = False
    kv_event_publishing_enabled: bool | None = None
    kv_event_source_mode: str | UnsetType | None = UNSET
    kv_state_endpoint: Any = UNSET
    taints: list[str] | UnsetType | None = UNSET
    stable_routing_id: str | UnsetType | None = UNSET
    topology_domains: dict[str, str] | UnsetType | None = UNSET
    kv_transfer_domain: str | UnsetType | None = UNSET
    kv_transfer_enforcement: str | UnsetType | None = UNSET
    kv_transfer_preferred_weight: float | UnsetType | None = UNSET
    runtime_data: dict[str, Any] = msgspec.field(default_factory=dict)
    disaggregated_endpoint: DisaggregatedEndpoint | UnsetType | None = UNSET
    enable_eagle: bool = False
    max_gpu_lora_count: int | UnsetType | None = UNSET


class ModelDeploymentCard(msgspec.Struct, kw_only=True):
    """One model of one worker. Assets are keyed by their format, e.g. `hf_tokenizer_json`."""

    display_name: str
    slug: str
    source_path: str | UnsetType | None = UNSET
    model_info: dict[str, FileReference] | None = None
    tokenizer: dict[str, FileReference] | None = None
    prompt_formatter: dict[str, FileReference] | UnsetType | None = UNSET
    chat_template_file: dict[str, ChatTemplateFile] | UnsetType | None = UNSET
    gen_config: dict[str, FileReference] | UnsetType | None = UNSET
    architectural_max_context_length: int | UnsetType | None = UNSET
    context_length: int = 0
    """Maximum of prompt and output tokens; 0 if the worker publishes no limit of its own."""
    kv_cache_block_size: int = 0
    migration_limit: int = 0
    model_type: str = "Chat | Completions"
    model_input: Literal["Tokens", "Text", "Tensor"] = "Tokens"
    worker_type: str = "aggregated"
    needs: list[list[str]] = msgspec.field(default_factory=list)
    lora: dict[str, Any] | UnsetType | None = UNSET
    user_data: Any = UNSET
    router_config: dict[str, Any] | UnsetType | None = UNSET
    model_aliases: list[str] | UnsetType | None = msgspec.field(default=UNSET, name="aliases")
    runtime_config: RuntimeConfig = msgspec.field(default_factory=RuntimeConfig)
    tensor_model_config: dict[str, Any] | UnsetType | None = UNSET
    """Inputs and outputs of a tensor model."""
    media_decoder: Any = None
    media_fetcher: Any = None


class ModelRecord(msgspec.Struct, kw_only=True):
    """The discovery record that carries a card."""

    type: Literal["Model"] = "Model"
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: ModelDeploymentCard
    model_suffix: str | UnsetType = UNSET
    """The suffix of the key of a LoRA adapter's card; upstream rejects such a card without it."""
