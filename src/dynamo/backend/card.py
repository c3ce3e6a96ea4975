"""Card: the description of a worker's model, and the health check's request."""

from typing import Any

import msgspec
from msgspec import UNSET

from dynamo.backend.config import WorkerOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.backend.engine import EngineConfig
from dynamo.llm.register import bare_card
from dynamo.model_card.card import DEFAULT_MODE_KEY, build_card
from dynamo.protocols.engine import BYPASS_REMOTE_PREFILL, PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.protocols.model_card import DisaggregatedEndpoint, ModelDeploymentCard, RuntimeConfig


def canary_payload(config: EngineConfig, role: DisaggregationMode = DisaggregationMode.AGGREGATED) -> dict[str, Any]:
    """Return the smallest request: one output token, greedily, after one token that every vocabulary has."""
    request = PreprocessedRequest(
        config.served_model_name,
        [1],
        StopConditions(max_tokens=1, ignore_eos=True),
        SamplingOptions(temperature=0.0),
        annotations=[BYPASS_REMOTE_PREFILL] if role is DisaggregationMode.DECODE else [],
    )
    payload: dict[str, Any] = msgspec.to_builtins(request)
    return payload


def make_card(options: WorkerOptions, config: EngineConfig) -> ModelDeploymentCard:
    """Return the model's card. Raise `ConfigError` for a model without the files that a frontend needs."""
    role = options.role
    runtime_config = make_runtime_config(options, config)
    needs = role.needs if config.needs is None else [list(group) for group in config.needs]
    if not config.model_path:
        common = {
            "model_type": config.model_type or options.model_type(),
            "model_input": config.model_input,
            "worker_type": role.worker_type,
            "needs": needs,
            "model_aliases": list(config.model_aliases),
            "router_config": config.router_config,
        }
        return bare_card(config.served_model_name, config.served_model_name, runtime_config, common, None, None)
    return build_card(
        config.model_path,
        config.served_model_name,
        context_length=config.context_length,
        kv_cache_block_size=config.kv_cache_block_size,
        runtime_config=runtime_config,
        model_type=(config.model_type or options.model_type()) if role.answers_clients else "",
        worker_type=role.worker_type,
        needs=needs,
        model_input=config.model_input,
        custom_template=options.custom_jinja_template,
        model_aliases=config.model_aliases,
        router_config=config.router_config,
    )


def make_runtime_config(options: WorkerOptions, config: EngineConfig) -> RuntimeConfig:
    """Return the capacities and features of the engine for the model's card."""
    publishes_cache = config.total_kv_blocks > 0 and options.role.publishes_cache and config.publishes_kv_events
    runtime_config = RuntimeConfig(
        context_length=config.context_length,
        total_kv_blocks=config.total_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        exclude_tools_when_tool_choice_none=options.exclude_tools_when_tool_choice_none,
        data_parallel_size=config.data_parallel_size,
        data_parallel_start_rank=config.data_parallel_start_rank,
        enable_local_indexer=publishes_cache,
        kv_event_publishing_enabled=publishes_cache,
        runtime_data=dict(config.runtime_data),
        enable_eagle=config.enable_eagle,
        max_gpu_lora_count=UNSET if config.max_gpu_lora_count is None else config.max_gpu_lora_count,
    )
    if options.default_thinking_mode is not None:
        runtime_config.runtime_data[DEFAULT_MODE_KEY] = options.default_thinking_mode
    policy = options.tag_policy()
    if policy is not None:
        policy.put_on(runtime_config)
    if config.bootstrap_port is not None:
        runtime_config.disaggregated_endpoint = DisaggregatedEndpoint(config.bootstrap_host, config.bootstrap_port)
    return runtime_config
