"""Calls between event loops: objects that belong to one loop, used from another loop or from a thread without one."""

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_S = 5.0  # A loop stops after its current callbacks.
READ_AHEAD_MAX = 1024  # Elements of a stream that another loop has produced and the reader has not taken.
_END = object()


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, run on `loop`, which runs in this thread or in another one."""
    if loop is asyncio.get_running_loop():
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def is_foreign(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the caller does not run on `loop`."""
    return running_loop() is not loop


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs in this thread, None without."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopThread:
    """Runs a loop in a thread while its owner uses it from elsewhere. The thread ends with the program at the latest."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def ensure_running(self) -> None:
        """Start the thread unless the loop runs already, here or elsewhere. Raise `RuntimeError` for a closed loop."""
        with self._lock:
            if not self.loop.is_running() and self._thread is None:
                if self.loop.is_closed():
                    raise RuntimeError("the event loop of this runtime is closed")
                self._thread = threading.Thread(target=self.loop.run_forever, name="event loop", daemon=True)
                self._thread.start()

    def offer(self, build: Callable[[], object], wait_s: float) -> None:
        """Call `build` on the loop. Return after `wait_s` seconds even if it has not run: its thread may wait for this one."""
        if not is_foreign(self.loop):
            build()
            return

        async def built() -> None:
            build()

        self.ensure_running()
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(built(), self.loop).result(wait_s)

    def wait(self, work: Callable[[], Coroutine[Any, Any, object]], patience_s: float) -> None:
        """Run `work` on the loop and return at its end, with its error. On the loop's own thread, do nothing.

        Return early, while it runs on, if the loop is blocked for `patience_s` seconds: its thread may wait for this one.
        """
        if not is_foreign(self.loop):
            return
        self.ensure_running()
        done = asyncio.run_coroutine_threadsafe(work(), self.loop)
        while not done.done():
            with contextlib.suppress(TimeoutError):
                done.exception(patience_s)
            is_alive = threading.Event()
            self.loop.call_soon_threadsafe(is_alive.set)
            if not is_alive.wait(patience_s):
                return
        done.result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, run on the loop."""
        if is_foreign(self.loop):
            self.ensure_running()
        return await on_loop(self.loop, work)

    def stop(self) -> None:
        """Stop the thread if there is one; the loop can then be run by others. Not for callers on the loop."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self.loop.call_soon_threadsafe(self.loop.stop)
                thread.join(JOIN_S)


class LoopCaller:
    """Calls on the event loop on which this object is created, from any thread; engines have threads of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` on the loop's thread; immediately if it is the current one."""
        if threading.get_ident() == self._thread:
            work()
        else:
            self.loop.call_soon_threadsafe(work)


class ForeignStream(AsyncIterator[Any]):
    """Response stream that belongs to another loop."""

    def __init__(self, stream: AsyncIterator[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop

    def __aiter__(self) -> "ForeignStream":
        return self

    async def __anext__(self) -> Any:
        element = await on_loop(self._loop, self._next())
        if element is _END:
            raise StopAsyncIteration
        return element

    async def aclose(self) -> None:
        """Kill the request if it has not ended."""
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await on_loop(self._loop, close())

    async def _next(self) -> Any:
        return await anext(self._stream, _END)


async def read_ahead(
    start: Callable[[], AsyncIterator[Any]], loop: asyncio.AbstractEventLoop
) -> AsyncGenerator[Any, None]:
    """Yield copies of the elements of `start()`, which runs on another loop and does not wait for the reader.

    A producer that reuses an object thus changes no element that was yielded. It waits after `READ_AHEAD_MAX` elements;
    closing the generator cancels it.
    """
    here, elements, capacity = asyncio.get_running_loop(), asyncio.Queue[Any](), asyncio.Semaphore(READ_AHEAD_MAX)

    async def produce() -> None:
        try:
            stream = start()
            try:
                async for element in stream:
                    await capacity.acquire()
                    here.call_soon_threadsafe(elements.put_nowait, copy.deepcopy(element))
            finally:
                if isinstance(stream, AsyncGenerator):
                    await stream.aclose()
        finally:
            here.call_soon_threadsafe(elements.put_nowait, _END)

    producer = asyncio.run_coroutine_threadsafe(produce(), loop)
    try:
        while (element := await elements.get()) is not _END:
            loop.call_soon_threadsafe(capacity.release)
            yield element
        await asyncio.wrap_future(producer)
    finally:
        producer.cancel()
