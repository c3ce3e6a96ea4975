"""TensorResponses: turns responses of tensor workers into serialized messages without blocking the event loop.

A short response is decoded, checked and written at once, a longer one in a thread. Each step of that holds the interpreter lock
for up to 20 ms per MiB; a response of more is therefore written by a child process (`grpc.tensor_child`).
"""

import asyncio

from msgspec import Struct

from dynamo.core.child_pool import ChildError, ChildOutOfMemory, ChildPool, ChildTimeout
from dynamo.core.errors import Unknown
from dynamo.core.threads import in_daemon_thread, in_few_threads
from dynamo.grpc.received import KSERVE_THREADS
from dynamo.grpc.tensors import ResponseForm, serialized_response
from dynamo.runtime.request_plane.base import Item

INLINE_BYTES = 8 << 10
"""Written within 2 ms."""
THREAD_BYTES = 1 << 20
CHILDREN_MAX = 2
CHILD_DEADLINE_S = 60.0
CHILD_MEMORY_BYTES = 8 << 30
"""A value takes up to 100 times as much memory as in the response."""


class Serialized(Struct, frozen=True):
    """A message as it is sent."""

    data: bytes


class TensorWriter:
    """Writer of the responses of one KServe service."""

    def __init__(self, pool: ChildPool | None = None) -> None:
        self._pool = pool or ChildPool(
            "dynamo.grpc.tensor_child",
            deadline_s=CHILD_DEADLINE_S,
            memory_bytes=CHILD_MEMORY_BYTES,
            children_max=CHILDREN_MAX,
            per_key_max=CHILDREN_MAX,
        )
        self._turns = asyncio.Semaphore(CHILDREN_MAX)

    async def write(self, item: Item, form: ResponseForm) -> Serialized:
        """Return a worker's response as a message of that form. Raise `Unknown` for a malformed or too large one."""
        data, codec = item.data or b"", item.codec
        if len(data) <= INLINE_BYTES:
            return Serialized(serialized_response(data, codec, form))
        if len(data) <= THREAD_BYTES:
            work = in_few_threads(lambda: serialized_response(data, codec, form), "kserve", KSERVE_THREADS)
            return Serialized(await work)
        async with self._turns:
            return Serialized(await self._in_child(data, codec, form))

    def close(self) -> None:
        """End the child processes."""
        self._pool.close()

    async def _in_child(self, data: bytes, codec: str, form: ResponseForm) -> bytes:
        is_wanted = True
        try:
            problem, written = await in_daemon_thread(
                lambda: self._pool.call((codec, *form), data, is_wanted=lambda: is_wanted), "kserve response"
            )
        except (ChildTimeout, ChildOutOfMemory):
            raise Unknown(f"the worker's response of {len(data)} bytes has too many values") from None
        except ChildError as error:
            raise Unknown(f"the worker's response of {len(data)} bytes could not be written: {error}") from None
        finally:
            is_wanted = False  # A client that left does not keep a child busy.
        if problem:
            raise Unknown(problem)
        return bytes(written)
