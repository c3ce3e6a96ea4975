"""Responses of tensors are written at once, in a thread or in a child process, by their size."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.core.child_pool import ChildError, ChildOutOfMemory, ChildTimeout
from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import Unknown
from dynamo.grpc import tensor_child, tensor_responses
from dynamo.grpc.messages import CLASSES
from dynamo.grpc.tensor_responses import INLINE_BYTES, THREAD_BYTES, TensorWriter
from dynamo.grpc.tensors import ResponseForm, serialized_response
from dynamo.runtime.request_plane.base import Item

FORM = ResponseForm("r", False, False)


def response(count: int, shape: int | None = None) -> bytes:
    """Return a worker's response of so many numbers, each a byte long."""
    metadata = {"name": "out", "data_type": "Int32", "shape": [count if shape is None else shape]}
    tensor = {"metadata": metadata, "data": {"data_type": "Int32", "values": [7] * count}}
    return msgpack_encode({"model": "m", "tensors": [tensor]})


class Pool:
    """Pool whose child is this process."""

    def __init__(self, outcome: Exception | None = None) -> None:
        self.outcome = outcome
        self.threads: list[str] = []
        self.is_closed = False
        self.wanted: list[Callable[[], bool]] = []

    def call(self, request: tuple[Any, ...], data: bytes, *, is_wanted: Callable[[], bool]) -> Any:
        self.threads.append(threading.current_thread().name)
        self.wanted.append(is_wanted)
        assert is_wanted()
        if self.outcome is not None:
            raise self.outcome
        return tensor_child.write((*request, data))  # type: ignore[arg-type]

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(("count", "where"), [(100, "loop"), (INLINE_BYTES, "thread"), (THREAD_BYTES, "child")])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_long_responses_are_not_written_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, count: int, where: str, is_streamed: bool
) -> None:
    threads: list[threading.Thread] = []

    def write(*values: Any) -> bytes:
        threads.append(threading.current_thread())
        return serialized_response(*values)

    monkeypatch.setattr(tensor_responses, "serialized_response", write)
    pool: Any = Pool()
    found = await TensorWriter(pool).write(Item(response(count)), FORM._replace(is_streamed=is_streamed))
    if is_streamed:
        message = CLASSES["ModelStreamInferResponse"].FromString(found.data).infer_response
    else:
        message = CLASSES["ModelInferResponse"].FromString(found.data)
    assert (message.id, message.model_name, list(message.outputs[0].shape)) == ("r", "m", [count])
    assert sum(message.outputs[0].contents.int_contents) == 7 * count
    assert [one is threading.current_thread() for one in threads] == {"loop": [True], "thread": [False], "child": []}[
        where
    ]
    assert len(pool.threads) == (where == "child")
    assert threading.current_thread().name not in pool.threads
    assert not any(is_wanted() for is_wanted in pool.wanted)


@pytest.mark.parametrize("count", [100, INLINE_BYTES, THREAD_BYTES])
async def test_malformed_response_is_an_error_of_the_worker(count: int) -> None:
    pool: Any = Pool()
    with pytest.raises(Unknown, match=f"shape implies 3 elements but data has {count}"):
        await TensorWriter(pool).write(Item(response(count, shape=3)), FORM)
    with pytest.raises(Unknown, match="malformed tensor response from the worker"):
        await TensorWriter(pool).write(Item(b"\xc1" * count), FORM)
    with pytest.raises(Unknown, match="missing field `tensors`"):
        await TensorWriter(pool).write(Item(msgpack_encode({"model": "m" * count})), FORM)


@pytest.mark.parametrize("outcome", [ChildTimeout("slow"), ChildOutOfMemory("large"), ChildError("broken")])
async def test_response_that_the_child_cannot_write_is_an_error_of_the_worker(outcome: Exception) -> None:
    pool: Any = Pool(outcome)
    writer = TensorWriter(pool)
    with pytest.raises(Unknown, match=r"response of 1\d{6} bytes"):
        await writer.write(Item(response(THREAD_BYTES)), FORM)
    pool.outcome = None
    assert (await writer.write(Item(response(THREAD_BYTES)), FORM)).data
    writer.close()
    assert pool.is_closed
