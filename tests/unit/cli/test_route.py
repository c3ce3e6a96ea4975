"""`dynamo route` prints why a worker was chosen, or one line with the reason why it cannot."""

import json
from typing import Any

import pytest

from dynamo.cli import route as module
from dynamo.core.errors import CannotConnect, ConfigError
from dynamo.http.client import ChatClient

DECISION = {
    "request_id": "r1", "at": 1.0, "worker_id": 0xAB, "dp_rank": 1, "prompt_tokens": 40, "prompt_blocks": 10, "policy": "dynamo",
    "weights": {},
    "candidates": [
        {"worker_id": 0xAB, "dp_rank": 1, "cost": 15.0, "filtered": None, "device": 5, "host": 0, "disk": 0,
         "active_prefill_tokens": 0, "active_blocks": 0, "active_requests": 0, "prefill": 10.0, "saved": 5.0, "decode": 10.0},
        {"worker_id": 0xCD, "dp_rank": 0, "cost": None, "filtered": "above a busy threshold", "device": 0, "host": 2, "disk": 1,
         "active_prefill_tokens": 12, "active_blocks": 3.5, "active_requests": 2, "prefill": 13.0, "saved": 1.75, "decode": 13.5},
    ],
}  # fmt: skip


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    queries: list[dict[str, Any]] = []

    def decisions(self: ChatClient, **query: Any) -> list[dict[str, Any]]:
        queries.append(query)
        return [{"model": "m", "decisions": [json.loads(json.dumps(DECISION))]}]

    monkeypatch.setattr(ChatClient, "decisions", decisions)
    return queries


def test_routing_decision_is_a_table_of_its_candidates(
    requested: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.route(["explain", "r1", "--last", "3"]) == 0
    assert requested == [{"request_id": "r1", "model": None, "limit": 3}]
    head, columns, first, second = capsys.readouterr().out.splitlines()
    assert head == "m: request r1, 40 tokens, 10 complete blocks, policy dynamo"
    assert columns.split()[:2] == ["worker", "cached"]
    assert first.split() == ["→", "ab.1", "5+0+0", "0", "0", "0", "10.00", "5.00", "10.00", "15"]
    assert second.split()[:2] == ["cd", "0+2+1"]
    assert second.endswith("above a busy threshold")


def test_worker_states_are_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rank = {"worker_id": 10, "dp_rank": 0, "active_prefill_tokens": 7.0, "active_blocks": 2.5, "active_requests": 1}
    router = {"model": "m", "policy": "dynamo", "waiting_requests": 3, "index_blocks": 9, "is_guessing": True}
    monkeypatch.setattr(ChatClient, "router_state", lambda self: [{**router, "ranks": [{**rank, "held_blocks": 9}]}])
    assert module.route(["state"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "m: policy dynamo, 9 blocks in the index, 3 waiting, cached blocks predicted from routed requests"
    assert row.split() == ["a", "1", "7", "2.5", "9"]


def test_route_reports_an_empty_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ChatClient, "decisions", lambda self, **query: [{"model": "m", "decisions": []}])
    monkeypatch.setattr(ChatClient, "router_state", lambda self: [])
    assert module.route(["explain"]) == 0
    assert "No routing decisions yet" in capsys.readouterr().out
    assert module.route(["state"]) == 0
    assert "--router-mode kv" in capsys.readouterr().out
    assert module.route([]) == 0
    assert "dynamo route explain" in capsys.readouterr().out


def test_route_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unreachable(self: ChatClient, **query: Any) -> Any:
        raise CannotConnect("no server answers")

    monkeypatch.setattr(ChatClient, "decisions", unreachable)
    assert module.route(["explain"]) == 1
    assert capsys.readouterr().err == "error: no server answers\n"
    with pytest.raises(ConfigError, match="dynamo route teleport: expected explain or state"):
        module.route(["teleport"])
    with pytest.raises(ConfigError, match="--last 0"):
        module.route(["explain", "--last", "0"])
