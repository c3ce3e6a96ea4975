"""Requests: options that exclude each other, requests that were seen before, and requests of trace files."""

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.cli.requests import SLOW_MS, RequestsConfig, followed, new, requests, traced
from dynamo.console.request_views import RequestSelection, RequestView
from dynamo.core.errors import ConfigError
from dynamo.serving.request_trace.rows import SCHEMA, RequestEnd, TraceRow, Worker


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "--limit 0: must be 1 to 500"),
        ({"interval": 0.0}, "--interval 0"),
        ({"slower_than": -1}, "--slower-than -1"),
        ({"slow": True, "failed": True}, "exclude each other"),
        ({"trace": ["x"], "follow": True}, "--trace"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RequestsConfig(**options)


def test_follow_polls_slow_and_failed_requests_separately() -> None:
    both = followed(RequestsConfig(follow=True, slow=True, failed=True))
    assert [(one.state, one.slower_than_ms) for one in both] == [("failed", 0), ("", SLOW_MS)]
    assert [one.state for one in followed(RequestsConfig(follow=True, failed=True))] == ["failed"]
    assert followed(RequestsConfig(follow=True, slow=True, slower_than=50))[0].slower_than_ms == 50


def view(name: str, started_at: float) -> RequestView:
    return RequestView(id=name, model="m", endpoint="e", type="stream", state="succeeded", started_at=started_at)


def test_requests_are_new_once_and_in_the_order_in_which_they_ended() -> None:
    seen: dict[str, None] = {}
    assert [one.id for one in new([view("b", 2.0), view("a", 1.0)], seen)] == ["a", "b"]
    assert [one.id for one in new([view("c", 3.0), view("b", 2.0)], seen)] == ["c"]
    refused = [view("", 4.0), view("", 5.0), view("", 4.0)]
    assert [one.started_at for one in new(refused, seen)] == [4.0, 5.0]


def row(name: str, ttft_ms: float, **changes: Any) -> bytes:
    values = {
        "request_id": name, "input_tokens": 640, "output_tokens": 11, "cached_tokens": 0, "request_received_ms": 1_000_000,
        "prefill_wait_time_ms": 5.0, "ttft_ms": ttft_ms, "total_time_ms": ttft_ms + 100.0, "avg_itl_ms": 10.0, "worker": Worker(7, 7),
    }  # fmt: skip
    end = RequestEnd(**(values | changes))
    return msgspec.json.encode(TraceRow(schema=SCHEMA, event_type="request_end", event_time_unix_ms=0, request=end))


def test_trace_files_show_slow_requests_with_their_causes(tmp_path: Path) -> None:
    path = tmp_path / "trace.000000.jsonl.gz"
    lines = [row("quick", 20.0), row("slow", 900.0), row("waited", 700.0, prefill_wait_time_ms=690.0)]
    separate = row("separate", 60.0, worker=Worker(3, 7))
    path.write_bytes(gzip.compress(b"\n".join([*lines, separate]) + b"\n"))
    found = traced([str(path)], RequestSelection(state="slow", limit=4))
    assert [(one.id, one.cause) for one in found] == [
        ("slow", "prefill"), ("waited", "routing"), ("separate", "output"), ("quick", "output"),
    ]  # fmt: skip
    assert (found[2].prefill_worker, found[2].workers) == ("3", ["7"])
    assert found[0].total_ms == 1000.0


def test_trace_that_is_still_written_is_read_up_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.000000.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(row("a", 20.0) + b"\n")
        file.flush()
        written = path.read_bytes()
    path.write_bytes(written)
    assert [one.id for one in traced([str(path)], RequestSelection())] == ["a"]


def test_command_prints_a_trace_and_one_request_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(row("4f3a1", 20.0) + b"\n" + row("4f3b2", 900.0) + b"\n")
    assert requests(["--trace", str(path), "--slow", "--limit", "1"]) == 0
    assert "4f3b2" in capsys.readouterr().out
    assert requests(["4f3b", "--trace", str(path)]) == 0
    assert "wait for first token" in capsys.readouterr().out
    assert requests(["4f3", "--trace", str(path)]) == 1
    assert "2 requests begin with 4f3" in capsys.readouterr().err
    assert requests(["zz", "--trace", str(path)]) == 1
    assert "is not kept" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot read the trace"):
        requests(["--trace", str(tmp_path / "absent")])
