"""Methods of upstream's SelectionService that have no route of the selection service."""

import pytest

from dynamo.core.errors import HttpError, SelectionServiceError
from dynamo.llm import SelectionService

WORKER = {"worker_id": 1, "endpoint": "http://a", "model_name": "m"}


async def test_patch_changes_fields_of_a_worker() -> None:
    service = SelectionService()
    with pytest.raises(SelectionServiceError, match="worker 1 not found"):
        await service.patch_worker(1, {"taints": ["a"]})
    await service.upsert_worker(WORKER)
    assert (await service.patch_worker(1, {"taints": ["a"]}))["taints"] == ["a"]
    await service.shutdown_async()
    await service.shutdown_async()


async def test_replica_peers_require_replica_sync() -> None:
    service = SelectionService()
    assert service.list_replica_peers() == []
    for method in (service.register_replica_peer, service.deregister_replica_peer):
        with pytest.raises(HttpError, match="replica sync is disabled"):
            await method("tcp://127.0.0.1:3999")
    await service.shutdown_async()


async def test_recovery_without_a_valid_peer_reports_false() -> None:
    service = SelectionService()
    assert await service.indexer_snapshot() == {}
    assert not await service.recover_indexer_from_peers([])
    assert not await service.recover_indexer_from_peers(["x"])
    await service.shutdown_async()


async def test_malformed_arguments_are_value_errors() -> None:
    service = SelectionService()
    for wrong in ({"model_name": "m"}, {"worker_id": "x"}, [1]):
        with pytest.raises(ValueError, match=r"worker_id|object"):
            await service.upsert_worker(wrong)
    await service.upsert_worker(WORKER)
    with pytest.raises(ValueError, match="must be an object"):
        await service.patch_worker(1, [1])
    await service.shutdown_async()


async def test_cached_blocks_are_predicted_from_reservations_without_kv_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_USE_KV_EVENTS", "false")
    service = SelectionService()
    for worker_id in (1, 2):
        record = await service.upsert_worker({**WORKER, "worker_id": worker_id, "block_size": 4})
        assert record["lifecycle"] == "schedulable"
    prompt = {"model_name": "m", "token_ids": list(range(16))}
    first = await service.select_and_reserve({**prompt, "selection_id": "a"})
    assert first["effective_prefill_tokens"] == 16
    await service.free_reservation("a")
    second = await service.select(prompt)
    assert second["worker_id"] == first["worker_id"]
    assert second["overlap"]["longest_matched"] == 16
    removed = await service.delete_worker(1)
    assert removed["lifecycle"] == "unschedulable"
    await service.shutdown_async()


async def test_worker_with_a_failed_registration_is_admitted_after_correction() -> None:
    service = SelectionService()
    endpoints = {0: "tcp://127.0.0.1:5998", 1: "nonsense"}
    body = {**WORKER, "block_size": 4, "data_parallel_size": 2, "kv_events_endpoints": endpoints}
    record = await service.upsert_worker(body)
    assert record["not_schedulable_reasons"][0].startswith("reconciliation failed: invalid kv_events endpoint")
    with pytest.raises(SelectionServiceError, match="no schedulable workers are available"):
        await service.select({"model_name": "m", "token_ids": [1, 2, 3, 4]})
    changed = await service.patch_worker(1, {"kv_events_endpoints": {**endpoints, 1: "tcp://127.0.0.1:5997"}})
    assert changed["lifecycle"] == "schedulable"
    assert (await service.patch_worker(1, {"endpoint": None}))["endpoint"] == "http://a"
    await service.shutdown_async()
