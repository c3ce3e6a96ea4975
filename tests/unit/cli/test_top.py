"""Top: the tables of one reading, and options that are refused."""

import io
from typing import Any

import pytest
from rich.console import Console

from dynamo.cli.top import TopConfig, age, has_recent, milliseconds, number, page, percent
from dynamo.core.errors import ConfigError

POINT = {
    "requests": 12.5, "failures": 0.5, "input_tokens": 4000, "cached_tokens": 1000, "output_tokens": 900, "in_flight": 7, "queued": 2,
    "ttft": {"p50": 30.0, "p95": 1500.0, "p99": None}, "itl": {"p50": 8.0, "p95": 9.5, "p99": None},
}  # fmt: skip


def rank(**changes: Any) -> dict[str, Any]:
    known = {
        "dp_rank": 0,
        "kv_used": 50,
        "kv_total": 200,
        "hit_rate": None,
        "running": 3,
        "waiting": 1,
        "prefill_tokens": 640,
        "cached_blocks": 90,
    }
    return {**known, **changes}


def worker(name: str, **changes: Any) -> dict[str, Any]:
    known = {
        "id": name, "namespace": "dynamo", "component": "backend", "models": ["m"], "role": "aggregated", "state": "serving", "address": "",
        "host": "h", "engine": "mocker", "version": "1.6.1", "started_at": None, "in_flight": 3, "ranks": [rank()],
        "is_controllable": True, "control_error": "", "last_error": None,
    }  # fmt: skip
    return {**known, **changes}


def overview(**changes: Any) -> dict[str, Any]:
    part = {
        "endpoint": "dynamo.backend.generate",
        "role": "aggregated",
        "workers": 2,
        "router_mode": "kv",
        "router_waiting": 0,
        "is_guessing": False,
    }
    model = {
        "name": "m",
        "is_ready": True,
        "type": "Chat",
        "context_length": 0,
        "block_size": 16,
        "kv_blocks": 200,
        "sets": [part],
    }
    sample = {"at": 0.0, "total": POINT, "models": {"m": POINT}, "workers": 2, "kv_usage": 0.25, "router_waiting": 0}
    known = {
        "version": "1.6.1", "started_at": 0.0, "interval_s": 1.0, "is_draining": False, "models": [model, {**model, "name": "other"}],
        "workers": [worker("aa"), worker("bb", in_flight=9, state="drained", last_error={"at": 1.0, "message": "lost [1]"})], "samples": [sample],
    }  # fmt: skip
    return {**known, **changes}


def shown(reading: dict[str, Any], **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(page(reading, TopConfig(**options), "http://localhost:8000"))
    return out.getvalue()


def test_overview_shows_models_and_workers() -> None:
    text = shown(overview())
    for word in (
        "12.5 req/s",
        "900 tok/s out",
        "TTFT p95 1.50 s",
        "KV 25%",
        "2 aggregated",
        "dynamo.backend",
        "drained",
        "lost [1]",
        "640",
        "9.5 ms",
    ):
        assert word in text


def test_overview_selects_one_model_and_sorts_workers() -> None:
    assert "other" not in shown(overview(), model="m")
    by_load = shown(overview(), sort="load")
    assert by_load.index("bb ") < by_load.index("aa ")


def test_overview_without_samples_or_workers_is_shown() -> None:
    text = shown(overview(samples=[], workers=[]))
    assert "req/s" in text
    assert not has_recent(overview(samples=[]))


def test_unknown_numbers_are_dashes() -> None:
    assert (number(None), milliseconds(None), percent(None), age(None)) == ("-", "-", "-", "-")
    text = shown(overview(workers=[worker("aa", ranks=[rank(kv_used=None, waiting=None)])]))
    assert " -" in text


def test_too_short_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--interval 0.1: must be at least 0.5"):
        TopConfig(interval=0.1)
