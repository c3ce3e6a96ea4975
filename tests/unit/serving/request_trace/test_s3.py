"""Rows of the request trace as objects of a bucket; the store is in memory."""

import asyncio
import gzip
import json
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.errors import ConfigError
from dynamo.serving.request_trace import s3 as request_trace_s3
from dynamo.serving.request_trace.s3 import WAITING_MAX, S3Options, S3Sink, S3Writer
from dynamo.serving.request_trace.sinks import Row

NOON = 1_767_268_800.0  # 2026-01-01 12:00:00 UTC.


class Store:
    """Object store; an upload blocks while `is_slow`, and fails with `error`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.error: OSError | None = None
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.done = asyncio.Event()

    async def put(self, key: str, body: bytes) -> None:
        await self.is_open.wait()
        self.done.set()
        if self.error is not None:
            raise self.error
        self.objects[key] = body

    def rows(self) -> list[Any]:
        lines = [line for body in self.objects.values() for line in gzip.decompress(body).splitlines()]
        return [json.loads(line) for line in lines]


def rows(*numbers: int) -> list[Row]:
    return [Row(number, {"n": number}) for number in numbers]


def make(store: Store, losses: list[int], **options: Any) -> S3Sink:
    sink = S3Sink(
        S3Options(bucket="b", **options), store, losses.append, wall_clock=lambda: NOON, host="host", run="run"
    )
    sink.start()
    return sink


async def test_s3_sink_uploads_the_rest_when_it_is_closed() -> None:
    store, losses = Store(), list[int]()
    sink = make(store, losses, prefix="traces/")
    await sink.write(rows(1, 2))
    await sink.flush()
    assert store.objects == {}
    await sink.close()
    assert list(store.objects) == ["traces/date=2026-01-01/hour=12/0000-000000-host-run.jsonl.gz"]
    assert store.rows() == [{"n": 1}, {"n": 2}]
    assert losses == []


async def test_s3_sink_rolls_by_bytes_and_numbers_its_objects() -> None:
    store, losses = Store(), list[int]()
    sink = make(store, losses, roll_bytes=16)
    await sink.write(rows(1, 2, 3))
    await sink.close()
    assert [key.rpartition("/")[2] for key in store.objects] == [
        "0000-000000-host-run.jsonl.gz",
        "0000-000001-host-run.jsonl.gz",
    ]
    assert all(key.startswith("date=") for key in store.objects), "without a prefix keys begin at the root"


async def test_s3_sink_uploads_a_batch_after_the_flush_interval() -> None:
    store = Store()
    now = [NOON]
    sink = S3Sink(S3Options(bucket="b", flush_s=10.0), store, lambda _: None, wall_clock=lambda: now[0])
    await sink.write(rows(1))
    now[0] += 10.0
    sink.start()
    await asyncio.wait_for(store.done.wait(), 10)
    await sink.close()
    assert store.rows() == [{"n": 1}]


async def test_s3_sink_reports_the_rows_of_a_failed_upload(caplog: pytest.LogCaptureFixture) -> None:
    store, losses = Store(), list[int]()
    store.error = OSError(0, "access denied")
    sink = make(store, losses)
    await sink.write(rows(1, 2))
    await sink.close()
    assert losses == [2]
    assert "failed to upload date=" in caplog.text and "access denied" in caplog.text


async def test_s3_sink_refuses_rows_while_too_many_batches_wait() -> None:
    store, losses = Store(), list[int]()
    store.is_open.clear()
    sink = make(store, losses, roll_bytes=1)
    await sink.write(rows(*range(WAITING_MAX + 1)))
    with pytest.raises(OSError, match="too slow"):
        await sink.write(rows(9))
    store.is_open.set()
    await sink.close()
    assert len(store.objects) == WAITING_MAX + 1


async def test_s3_sink_cancels_uploads_when_its_close_is_cancelled() -> None:
    store, losses = Store(), list[int]()
    store.is_open.clear()
    sink = make(store, losses)
    await sink.write(rows(1))
    closing = asyncio.ensure_future(sink.close())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def test_s3_writer_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"obstore is missing: pip install 'dynamo-serve\[s3\]'"):
        S3Writer(S3Options(bucket="b"))


def test_s3_error_message_is_its_first_line() -> None:
    assert request_trace_s3.first_line(ValueError("Generic S3 error: denied\n\nDebug source:\nmore")) == (
        "Generic S3 error: denied"
    )
