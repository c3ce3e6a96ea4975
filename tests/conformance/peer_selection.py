"""Registrations with a selection service from Python, whose results are printed as JSON lines.

Runs under our Python and under a released peer's.
"""

import asyncio
import json

from dynamo.llm import SelectionService

EVENTS = {0: "tcp://127.0.0.1:5998", 1: "tcp://127.0.0.1:5997"}
WORKER = {
    "worker_id": 1,
    "model_name": "m",
    "endpoint": "dyn://a.b.c",
    "block_size": 16,
    "kv_events_endpoint": "tcp://127.0.0.1:5999",
    "max_num_batched_tokens": 1000,
    "total_kv_blocks": 100,
}
REGISTRATIONS = [
    {},
    {"endpoint": None},
    {"endpoint": ""},
    {"block_size": None},
    {"block_size": 0},
    {"kv_events_endpoint": None},
    {"kv_events_endpoint": ""},
    {"kv_events_endpoint": "nonsense"},
    {"replay_endpoint": "nonsense"},
    {"max_num_batched_tokens": None},
    {"total_kv_blocks": None},
    {"data_parallel_start_rank": 3},
    {"data_parallel_size": 0},
    {"data_parallel_size": 2},
    {"data_parallel_size": 2, "kv_events_endpoints": EVENTS},
    {"data_parallel_size": 2, "kv_events_endpoints": {0: EVENTS[0]}},
    {"data_parallel_size": 2, "kv_events_endpoints": {0: EVENTS[0], 1: ""}},
    {"data_parallel_size": 2, "kv_events_endpoints": {0: EVENTS[0], 1: "nonsense"}},
    {"data_parallel_size": 2, "kv_events_endpoints": EVENTS, "replay_endpoint": "tcp://127.0.0.1:5996"},
    {"endpoint": None, "block_size": None, "kv_events_endpoint": None, "data_parallel_size": 0},
    {"taints": ["a", "a"], "topology_domains": {"rack": "2", "host": "1"}, "stable_routing_id": "s"},
    {"kv_transfer_domain": "rack", "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 2.0},
    {"kv_transfer_enforcement": "x"},
    {"router_hint_worker_type": "prefill", "router_hint_source_control_endpoints": {0: "tcp://127.0.0.1:1"}},
    {"kv_event_source_mode": "x"},
    {"unknown": 1},
    {"data_parallel_size": -1},
]
PROMPT = {"model_name": "m", "token_ids": list(range(32))}


async def result(call):
    """Return what a call returns; for a `ValueError` its class, and for another error its text too."""
    try:
        value = call()
        return await value if hasattr(value, "__await__") else value
    except ValueError:
        return "ValueError"
    except Exception as error:
        return [type(error).__name__, str(error)]


async def registrations():
    """Yield the record of each registration with a service of its own."""
    for change in REGISTRATIONS:
        service = SelectionService()
        body = {name: value for name, value in {**WORKER, **change}.items() if value is not None}
        yield await result(lambda: service.upsert_worker(body))  # noqa: B023


async def lifecycle():
    """Yield the results of calls on one service whose workers become schedulable and cease to be."""
    service = SelectionService()
    other = {**PROMPT, "model_name": "o"}
    calls = [
        service.ready,
        lambda: service.select(PROMPT),
        lambda: service.overlap_scores(PROMPT),
        lambda: service.upsert_worker({**WORKER, "endpoint": ""}),
        service.ready,
        lambda: service.select(PROMPT),
        lambda: service.upsert_worker({**WORKER, "worker_id": 2, "model_name": "o"}),
        lambda: service.select(PROMPT),
        lambda: service.patch_worker(1, {"endpoint": "dyn://x.y.z"}),
        service.ready,
        lambda: service.patch_worker(1, {"endpoint": None, "taints": ["a"], "unknown": 1, "worker_id": 9}),
        lambda: service.patch_worker(1, {"block_size": 0}),
        lambda: service.select(PROMPT),
        lambda: service.patch_worker(1, {"block_size": 16}),
        lambda: service.patch_worker(1, {"kv_events_endpoint": "nonsense"}),
        lambda: service.patch_worker(1, {"kv_events_endpoint": WORKER["kv_events_endpoint"]}),
        lambda: service.delete_worker(1),
        lambda: service.select(PROMPT),
        lambda: service.delete_worker(2),
        lambda: service.select(other),
        lambda: service.patch_worker(1, {}),
        service.list_workers,
    ]
    for call in calls:
        yield await result(call)


async def main():
    for generator in (registrations, lifecycle):
        async for one in generator():
            print(json.dumps(one, sort_keys=True), flush=True)


asyncio.run(main())
