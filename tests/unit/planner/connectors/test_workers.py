"""Worker directory: live workers by role, and the capacity that their model cards publish."""

import msgspec

from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.workers import LiveWorkers, WorkerDirectory, capabilities_of
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.protocols.discovery import INSTANCES, MODEL_CARDS, EndpointId
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord, RuntimeConfig
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore


def record(number: int, worker_type: str = "decode", name: str = "Org/Model", **card: object) -> ModelRecord:
    described = ModelDeploymentCard(display_name=name, slug="org--model", worker_type=worker_type, **card)  # type: ignore[arg-type]
    return ModelRecord(
        namespace="ns", component=worker_type, endpoint="generate", instance_id=number, card_json=described
    )


async def register(discovery: MemoryDiscovery, one: ModelRecord, suffix: str = "", namespace: str = "ns") -> None:
    key = f"{namespace}/{one.component}/{one.endpoint}/{one.instance_id:x}"
    await discovery.put(INSTANCES, key, b"{}")
    await discovery.put(MODEL_CARDS, key + suffix, msgspec.json.encode(one))


async def test_workers_are_divided_by_the_worker_type_of_their_card() -> None:
    discovery = MemoryDiscovery(MemoryStore())
    for number, worker_type in enumerate(("prefill", "decode", "aggregated"), 1):
        await register(discovery, record(number, worker_type))
    live = await WorkerDirectory(discovery, "ns").live()
    assert (set(live.prefill), set(live.decode)) == ({1}, {2, 3})
    assert live.endpoints(PREFILL) == {EndpointId("ns", "prefill", "generate")}


async def test_encode_workers_are_not_counted_and_namespaces_are_apart() -> None:
    discovery = MemoryDiscovery(MemoryStore())
    await register(discovery, record(1))
    await register(discovery, record(2, "encode"))
    await register(discovery, msgspec.structs.replace(record(3, "prefill"), namespace="other"), namespace="other")
    found = await WorkerDirectory(discovery).by_namespace()
    assert {name: (set(one.prefill), set(one.decode)) for name, one in found.items()} == {
        "ns": (set(), {1}),
        "other": ({3}, set()),
    }


async def test_adapter_cards_other_namespaces_and_draining_workers_are_not_counted() -> None:
    discovery = MemoryDiscovery(MemoryStore())
    await register(discovery, record(1), suffix="/adapter")
    await register(discovery, record(2), namespace="ns-other")
    await register(discovery, record(3))
    await discovery.delete(INSTANCES, "ns/decode/generate/3")
    live = await WorkerDirectory(discovery, "ns").live()
    assert not live.prefill and not live.decode


async def test_malformed_card_leaves_the_other_workers_listed() -> None:
    discovery = MemoryDiscovery(MemoryStore())
    await register(discovery, record(1))
    await discovery.put(INSTANCES, "ns/decode/generate/2", b"{}")
    await discovery.put(MODEL_CARDS, "ns/decode/generate/2", b"{")
    assert set((await WorkerDirectory(discovery, "ns").live()).decode) == {1}


async def test_model_name_selects_workers_by_name_or_slug_in_any_case() -> None:
    discovery = MemoryDiscovery(MemoryStore())
    await register(discovery, record(1))
    for name, found in (("org/model", {1}), ("ORG--MODEL", {1}), ("other", set())):
        assert set((await WorkerDirectory(discovery, "ns", name).live()).decode) == found


def test_model_of_most_workers_names_the_deployment() -> None:
    assert LiveWorkers({}, {}).model_name is None
    assert LiveWorkers({1: record(1, name="a")}, {2: record(2, name="b"), 3: record(3, name="b")}).model_name == "b"
    assert LiveWorkers({1: record(1, name="b")}, {2: record(2, name="a")}).model_name == "a"


def test_capabilities_are_the_limits_of_the_card_and_the_gpus_of_the_settings() -> None:
    limits = RuntimeConfig(total_kv_blocks=10, max_num_seqs=4, max_num_batched_tokens=0, context_length=128)
    workers = LiveWorkers({}, {7: record(7, kv_cache_block_size=16, runtime_config=limits)})
    found = capabilities_of(workers, parse({"decode_engine_num_gpu": 2}))
    assert found.decode is not None and found.prefill is not None
    assert (found.decode.num_gpu, found.decode.max_kv_tokens, found.decode.max_num_seqs) == (2, 160, 4)
    assert (found.decode.max_num_batched_tokens, found.decode.context_length) == (None, 128)
    assert (found.prefill.max_kv_tokens, found.prefill.context_length) == (None, None)


def test_capabilities_of_a_role_that_is_not_scaled_are_unknown() -> None:
    found = capabilities_of(LiveWorkers({}, {1: record(1)}), parse({"mode": "agg"}))
    assert found.prefill is None and found.decode is not None
    assert set(LiveWorkers({}, {1: record(1)}).of(DECODE)) == {1}
