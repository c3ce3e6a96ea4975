"""Every module has a test file at the mirrored path of tests/unit or tests/integration, or is listed with the test that covers it."""

from pathlib import Path

import pytest
from tests.house.test_house import MODULES, ROOT, SOURCE, relative

COVERED_BY = {
    "api/batches/records.py": "unit/api/batches/test_runner.py",
    "api/chat_parts.py": "unit/api/anthropic/test_convert.py",
    "api/native_forms.py": "unit/http/routes/test_native.py",
    "backend/controls.py": "unit/vllm/test_controls.py",
    "backend/engine.py": "unit/backend/test_worker.py",
    "backend/listeners.py": "unit/vllm/test_events.py",
    "backend/media.py": "unit/vllm/test_engine.py",
    "backend/metrics.py": "unit/backend/test_worker.py",
    "cli/replay.py": "unit/cli/test___main__.py",
    "core/child_pool.py": "integration/test_child_pool.py",
    "core/child_process.py": "integration/test_child_pool.py",
    "core/errors.py": "unit/llm/test_exceptions.py",
    "core/http_server.py": "unit/runtime/test_system.py",
    "core/otel.py": "unit/core/test_tracing.py",
    "core/parent.py": "integration/test_session.py",
    "core/supervisor.py": "integration/test_session.py",
    "cpu/adapter.py": "unit/cpu/test_lora.py",
    "cpu/adapters.py": "unit/cpu/test_controls.py",
    "cpu/grammar_child.py": "integration/test_grammar_child.py",
    "cpu/kv_fetcher.py": "integration/cpu/test_kv_exporter.py",
    "cpu/layout.py": "integration/cpu/test_disagg.py",
    "cpu/orders.py": "unit/cpu/test_engine.py",
    "cpu/trace.py": "unit/cpu/test_controls.py",
    "frontend/main.py": "integration/test_frontend.py",
    "grpc/calls.py": "unit/grpc/test_service.py",
    "http/body_child.py": "unit/serving/test_bodies.py",
    "http/openapi/docs_page.py": "unit/http/routes/test_system.py",
    "http/realtime.py": "unit/http/routes/test_realtime.py",
    "http/routes/api_options.py": "unit/http/routes/test_responses.py",
    "http/routes/openai.py": "unit/serving/test_endpoints.py",
    "kv_events/snapshots.py": "integration/test_durable_events.py",
    "kv_router/config.py": "unit/kv_router/test_cost.py",
    "kv_router/decision.py": "unit/kv_router/test_router.py",
    "kv_router/events.py": "unit/kv_router/test_router.py",
    "kv_router/explain.py": "unit/kv_router/test_router.py",
    "kv_router/index_dump.py": "unit/kv_router/test_index.py",
    "kv_router/prompts.py": "unit/kv_router/test_predicted.py",
    "kv_router/ranks.py": "unit/kv_router/test_index.py",
    "kv_router/run_tree.py": "unit/kv_router/test_index.py",
    "kv_router/runs.py": "unit/kv_router/test_index.py",
    "kvbm/logical/blocks.py": "unit/kvbm/logical/test_book.py",
    "kvbm/logical/eviction.py": "unit/kvbm/logical/test_book.py",
    "kvbm/logical/policies.py": "unit/kvbm/logical/test_book.py",
    "kvbm/orders.py": "unit/kvbm/test_manager.py",
    "kvbm/physical/host.py": "unit/kvbm/physical/test_disk.py",
    "kvbm/physical/layout.py": "unit/kvbm/physical/test_disk.py",
    "kvbm/tiers.py": "unit/kvbm/test_manager.py",
    "kvbm/transfer/local.py": "contract/test_kv_transfer.py",
    "kvbm/transfer/nixl.py": "contract/test_kv_transfer.py",
    "kvbm/transfer/puller.py": "contract/test_kv_transfer.py",
    "kvbm/transfer/sessions.py": "integration/cpu/test_kv_exporter.py",
    "kvbm/transfer/shared.py": "contract/test_kv_transfer.py",
    "kvbm/transfer/source.py": "contract/test_kv_transfer.py",
    "kvbm/transfer/tcp.py": "contract/test_kv_transfer.py",
    "kvbm/vllm_connector.py": "engines/test_vllm_kv_tiers.py",
    "llm/kserve_service.py": "integration/test_kserve.py",
    "mocker/advertised.py": "unit/mocker/test_config.py",
    "mocker/handoff_wire.py": "integration/mocker/test_handoff.py",
    "mocker/simulation/batching.py": "unit/mocker/simulation/test_engines.py",
    "mocker/simulation/eviction.py": "unit/mocker/simulation/test_blocks.py",
    "mocker/simulation/host.py": "unit/mocker/simulation/test_scheduler.py",
    "mocker/simulation/rank_state.py": "unit/mocker/simulation/test_scheduler.py",
    "mocker/simulation/rules.py": "unit/mocker/simulation/test_engines.py",
    "mocker/simulation/sglang.py": "unit/mocker/simulation/test_engines.py",
    "mocker/simulation/step.py": "unit/mocker/simulation/test_engines.py",
    "openai_proxy/text_engine.py": "integration/openai_proxy/test_engine.py",
    "openai_proxy/token_engine.py": "integration/openai_proxy/test_engine.py",
    "openai_proxy/tokens.py": "unit/openai_proxy/test_completions.py",
    "parsers/base.py": "contract/test_parsers.py",
    "parsers/registry.py": "contract/test_parsers.py",
    "protocols/active_sequences.py": "unit/slot_tracker/test_tracker.py",
    "protocols/embeddings.py": "unit/protocols/test_field_effects.py",
    "protocols/engine.py": "contract/test_request_plane.py",
    "protocols/kv_events.py": "unit/kv_events/test_subscriber.py",
    "protocols/load.py": "unit/routing/test_busy.py",
    "protocols/media.py": "unit/http/routes/test_media.py",
    "protocols/native.py": "unit/protocols/test_field_effects.py",
    "protocols/openai_ranges.py": "unit/protocols/test_bounds.py",
    "protocols/planner.py": "unit/replay/test_planning.py",
    "replay/agentic_trace.py": "unit/replay/test_agentic.py",
    "replay/comparison.py": "unit/replay/test_report.py",
    "replay/config.py": "unit/replay/test_main.py",
    "replay/fleet.py": "unit/replay/test_cluster.py",
    "replay/frontend.py": "unit/replay/test_online.py",
    "replay/lifecycle.py": "unit/replay/test_cluster.py",
    "replay/load.py": "unit/replay/test_cluster.py",
    "replay/modes.py": "unit/replay/test_placement.py",
    "replay/outcome.py": "unit/replay/test_online.py",
    "replay/page.py": "unit/replay/test_report.py",
    "replay/scenario.py": "unit/replay/test_cluster.py",
    "replay/timeline.py": "unit/replay/test_report.py",
    "replay/worker.py": "unit/replay/test_sweep_processes.py",
    "routing/endpoint_router.py": "unit/router/test_main.py",
    "routing/metrics.py": "unit/routing/test_kv_push_router.py",
    "runtime/discovery/memory.py": "contract/test_discovery.py",
    "runtime/event_plane/memory.py": "contract/test_event_plane.py",
    "runtime/event_plane/zmq_sockets.py": "integration/runtime/event_plane/test_zmq_broker.py",
    "runtime/request_plane/base.py": "contract/test_request_plane.py",
    "runtime/request_plane/memory.py": "contract/test_request_plane.py",
    "runtime/request_plane/tcp/upstream_wire.py": "unit/runtime/request_plane/tcp/test_upstream_caller.py",
    "runtime/single_response.py": "unit/kv_events/test_subscriber.py",
    "serving/choice.py": "unit/serving/test_generation.py",
    "serving/completion_choices.py": "unit/serving/test_pipeline.py",
    "serving/embeddings.py": "unit/http/routes/test_embeddings.py",
    "serving/media_forms.py": "unit/http/routes/test_media.py",
    "serving/request_trace/rows.py": "unit/serving/request_trace/test_trace.py",
    "serving/response_stream.py": "unit/serving/test_open_requests.py",
    "serving/served_model.py": "unit/serving/test_relay.py",
    "sglang/handshake.py": "unit/sglang/test_engine.py",
    "sglang/hicache.py": "unit/sglang/test_engine.py",
    "sglang/library.py": "engines/test_sglang_signatures.py",
    "text/chat_template/child.py": "unit/text/chat_template/test_template.py",
    "trtllm/convert.py": "unit/trtllm/test_engine.py",
    "trtllm/library.py": "unit/trtllm/test_engine.py",
    "trtllm/metrics.py": "unit/trtllm/test_engine.py",
    "vllm/library.py": "engines/test_vllm_signatures.py",
    "vllm/metrics.py": "unit/vllm/test_engine.py",
    "vllm/scheduler.py": "engines/test_vllm_aggregated.py",
    "vllm/steps.py": "unit/vllm/test_events.py",
}
"""Modules without a unit test of their own, with the test that covers them: that of their only user, that of a contract
that several implementations share, or one with real processes or engines."""


def has_own_test(path: Path) -> bool:
    place = path.relative_to(SOURCE)
    return any(
        (ROOT / "tests" / kind / place.parent / f"test_{place.name}").exists() for kind in ("unit", "integration")
    )


@pytest.mark.parametrize("path", [path for path in MODULES if not path.name.startswith("__")], ids=relative)
def test_module_has_its_own_unit_test_or_is_listed(path: Path) -> None:
    is_listed = path.relative_to(SOURCE).as_posix() in COVERED_BY
    assert has_own_test(path) != is_listed, "write its unit test, or list the test that covers it; never both"


@pytest.mark.parametrize(("module", "test"), COVERED_BY.items())
def test_listed_modules_and_their_tests_exist(module: str, test: str) -> None:
    assert (SOURCE / module).exists(), "remove it from the list"
    assert (ROOT / "tests" / test).exists(), "list the test that covers it now"
