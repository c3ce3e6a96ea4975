"""The fields of a response's `nvext`."""

import random
import time
from types import SimpleNamespace
from typing import Any, cast

from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import ScriptedStackPool

from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.router import Router, RouteRequest, WorkerFacts
from dynamo.protocols.nvext import NvExt
from dynamo.serving.extras import extras_of, routing_of

EXTRAS = ["worker_id", "timing", "completion_token_ids", "stop_reason", "engine_data", "prompt_logprobs", "unknown"]


def test_nvext_contains_the_requested_extra_fields(stacks: ScriptedStackPool) -> None:
    script = Script(["Hi you"], stop_reason=77, engine_data={"prompt_logprobs": [None], "mine": 1})
    reported = stacks.run(stacks.parsed.chat(script, nvext={"extra_fields": EXTRAS})).json["nvext"]
    assert set(reported) == {name for name in EXTRAS if name != "unknown"}
    assert reported["worker_id"]["prefill_worker_id"] == reported["worker_id"]["decode_worker_id"] > 0
    assert (reported["stop_reason"], reported["prompt_logprobs"], reported["engine_data"]["mine"]) == (77, [None], 1)
    tokenizer = stacks.parsed.models.find("m", "Chat").preprocessor.tokenizer
    assert tokenizer.decode(reported["completion_token_ids"]) == "Hi you"
    assert 0 <= reported["timing"]["ttft_ms"] <= reported["timing"]["total_time_ms"]


def test_every_chunk_contains_the_worker_id_and_its_token_ids(stacks: ScriptedStackPool) -> None:
    fields = {"extra_fields": ["worker_id", "timing", "completion_token_ids"]}
    script = Script(["Hi you there"])
    events = stacks.run(stacks.plain.chat(script, stream=True, nvext=fields)).events
    ids = [token_id for event in events for token_id in event["nvext"]["completion_token_ids"]]
    tokenizer = stacks.plain.models.find("m", "Chat").preprocessor.tokenizer
    assert tokenizer.decode(ids) == "Hi you there"
    assert len({event["nvext"]["worker_id"]["decode_worker_id"] for event in events}) == 1
    assert ["timing" in event["nvext"] for event in events] == [False] * (len(events) - 1) + [True]


def test_routing_decision_is_returned_in_body_and_header(stacks: ScriptedStackPool) -> None:
    answer = stacks.run(
        stacks.parsed.chat(Script(["Hi"]), nvext={"extra_fields": ["routing"]}, headers={"x-dynamo-explain": "1"})
    )
    worker = answer.json["nvext"]["routing"]["worker_id"]
    assert answer.headers["x-dynamo-routing"] == f"worker={worker}"
    silent = stacks.run(stacks.parsed.chat(Script(["Hi"])))
    assert "x-dynamo-routing" not in silent.headers


def test_routing_decision_counts_blocks_by_tier() -> None:
    router = Router(RoutingConfig(block_size=4), random.Random(0))
    router.set_worker(WorkerFacts(7))
    decision = router.place(RouteRequest("a", b"\1" * 16, 11), 0.0)
    assert decision is not None
    decision.device_blocks, decision.host_blocks = 1, 1
    reported = routing_of(7, decision)
    assert reported == {
        "worker_id": 7, "dp_rank": 0, "device_blocks": 1, "host_blocks": 1, "disk_blocks": 0, "prompt_blocks": 2,
        "cost": decision.cost,
    }  # fmt: skip
    assert decision.hit_rate == 2 / 3, "the third block is not full"


def test_worker_id_has_the_rank_of_both_phases_and_timing_the_queue_depth_of_a_kv_router() -> None:
    router = Router(RoutingConfig(block_size=4), random.Random(0))
    router.set_worker(WorkerFacts(7, dp_start=3))
    decision = router.place(RouteRequest("a", b"\1" * 16, 11), 0.0)
    assert decision is not None
    dispatch = SimpleNamespace(decision=decision, prefill=None)
    generation = SimpleNamespace(
        worker_id=7, dispatch=dispatch, request=SimpleNamespace(routing=None), engine_data=None
    )
    state = SimpleNamespace(started_s=time.perf_counter(), sent_s=0.0, first_s=0.0)
    extras = extras_of(NvExt(extra_fields=["worker_id", "timing"]), cast(Any, state))
    assert extras is not None
    found = extras.of_whole([cast(Any, generation)], [])
    assert found["worker_id"] == {
        "prefill_worker_id": 7, "decode_worker_id": 7, "prefill_dp_rank": 3, "decode_dp_rank": 3,
    }  # fmt: skip
    assert found["timing"]["router_queue_depth"] == 0
