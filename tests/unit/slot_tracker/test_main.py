"""The slot tracker over HTTP."""

import json
from typing import Any

import pytest
from tests.asgi import request_json

from dynamo.core.clock import ManualClock
from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.routing.sync.replica_peers import ReplicaPeers
from dynamo.slot_tracker.main import SlotRoutes, SlotTrackerOptions
from dynamo.slot_tracker.tracker import SlotTracker

M = {"model_name": "m"}
WORKER = {"worker_id": 1, "block_size": 4, "dp_start": 0, "dp_size": 1, **M}
ADD = {"request_id": "a", "worker_id": 1, "dp_rank": 0, "sequence_hashes": [1, -2], "new_isl_tokens": 8, **M}


class RecordedCalls(ReplicaPeers):
    """Peers that only record every message."""

    def __init__(self, tracker: SlotTracker) -> None:
        super().__init__(tracker)
        self.reported: list[tuple[Any, ...]] = []

    def _publish(self, request_id: str, rank: tuple[int, int], place: tuple[str, str], data: Any) -> None:
        self.reported.append((request_id, rank, place, data if isinstance(data, str) else data.added.token_sequence))


class TrackerHarness:
    """The routes of one tracker."""

    def __init__(self) -> None:
        tracker = SlotTracker(ManualClock())
        self.peers = RecordedCalls(tracker)
        self.routes = SlotRoutes(tracker, self.peers).routes

    async def send_request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        text = b"" if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return await request_json(self.routes.application(), method, path, text, headers)


async def test_http_api_tracks_a_request_from_registration_to_its_end() -> None:
    harness = TrackerHarness()
    for status, method, path, body in (
        (200, "GET", "/health", None),
        (201, "POST", "/register", WORKER),
        (201, "POST", "/add", ADD),
        (200, "POST", "/prefill_complete", {"request_id": "a", **M}),
        (200, "POST", "/free", {"request_id": "a", **M}),
        (200, "POST", "/free", {"request_id": "a", **M}),
    ):
        assert (await harness.send_request(method, path, body))[0] == status, path
    place = ("m", "default")
    assert harness.peers.reported == [
        ("a", (1, 0), place, [1, (1 << 64) - 2]),
        ("a", (1, 0), place, "MarkPrefillCompleted"),
        ("a", (1, 0), place, "Free"),
    ]
    assert [one.worker_id for one in (await harness.send_request("GET", "/workers"))[1]] == [1]
    assert (await harness.send_request("GET", "/loads"))[1][0].active_decode_blocks == 0
    status, potential = await harness.send_request("POST", "/potential_loads", {"sequence_hashes": [1], **M})
    assert (status, potential[0].potential_decode_blocks) == (200, 1)
    assert (await harness.send_request("POST", "/unregister", {"worker_id": 1, **M}))[0] == 200


async def test_invalid_http_requests_are_refused() -> None:
    harness = TrackerHarness()
    await harness.send_request("POST", "/register", WORKER)
    for status, path, body in (
        (409, "/register", WORKER),
        (422, "/register", {"worker_id": 1}),
        (404, "/add", {**ADD, "worker_id": 9}),
        (422, "/add", {"request_id": "a"}),
        (404, "/prefill_complete", {"request_id": "zz", **M}),
        (404, "/free", {"request_id": "zz", "model_name": "n"}),
        (404, "/unregister", {"worker_id": 9, **M}),
    ):
        found, value = await harness.send_request("POST", path, body)
        assert (found, set(value)) == (status, {"error"}), path
    assert harness.peers.reported == []


def test_slot_tracker_options_are_validated() -> None:
    assert load(SlotTrackerOptions, [], {}).port == 8091
    with pytest.raises(ConfigError, match="--replica-sync-port"):
        load(SlotTrackerOptions, ["--replica-sync-peers", "tcp://a:1"], {})
