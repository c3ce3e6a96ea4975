"""A worker's card is as upstream writes it, in every role."""

from typing import Any

from dynamo.backend.card import canary_payload, make_card
from dynamo.backend.config import DisaggregatedOptions
from dynamo.backend.engine import EngineConfig
from dynamo.core.config import load
from dynamo.protocols.engine import BYPASS_REMOTE_PREFILL


def role_options(*argv: str) -> DisaggregatedOptions:
    return load(DisaggregatedOptions, argv, {})


def engine_config(model_dir: str, **more: Any) -> EngineConfig:
    return EngineConfig(
        model_path=model_dir,
        served_model_name="m",
        context_length=64,
        kv_cache_block_size=16,
        total_kv_blocks=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        **more,
    )


def test_prefill_worker_card_equals_that_of_upstream(model_dir: str) -> None:
    made = make_card(
        role_options("--disaggregation-mode=prefill"), engine_config(model_dir, bootstrap_host="h", bootstrap_port=7)
    )
    assert (made.worker_type, made.needs, made.model_type) == ("prefill", [["decode"]], "")
    endpoint = made.runtime_config.disaggregated_endpoint
    assert endpoint
    assert (endpoint.bootstrap_host, endpoint.bootstrap_port) == ("h", 7)
    assert made.runtime_config.enable_local_indexer


def test_decode_worker_card_equals_that_of_upstream(model_dir: str) -> None:
    made = make_card(role_options("--is-decode-worker"), engine_config(model_dir))
    assert (made.worker_type, made.needs, made.model_type) == ("decode", [["prefill"]], "Chat | Completions")
    assert not made.runtime_config.enable_local_indexer
    assert made.runtime_config.kv_event_publishing_enabled is False
    assert not made.runtime_config.disaggregated_endpoint


def test_canary_payload_of_a_decode_worker_bypasses_remote_prefill(model_dir: str) -> None:
    role = role_options("--is-decode-worker").role
    assert canary_payload(engine_config(model_dir), role)["annotations"] == [BYPASS_REMOTE_PREFILL]
    assert canary_payload(engine_config(model_dir))["annotations"] == []
