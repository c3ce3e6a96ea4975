"""Streams: async-iterator API over the callback-based request plane.

`ResponseStream` is a receiver that can be iterated; `GeneratorHandler` writes the elements of a generator to a reply.
"""

import asyncio
import inspect
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from dynamo.core.codec import decode, encode
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, ResponseTimeout, Unknown
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import AnnotatedValue, Call, Item, Reply, Request
from dynamo.runtime.request_plane.wire_errors import named, refused

logger = logging.getLogger(__name__)

UNREAD_MAX = 65_536  # Elements buffered for a slow reader; enough for a whole response of the longest models.

ENVELOPE = "_dynamo_annotated"
"""Key of a dictionary that is an element with annotations: `data`, `event`, `comment` and `id`, each optional."""

GeneratorFunction = Callable[..., AsyncIterator[Any]]


class Annotated:
    """One response element with its annotations: event, comments and id."""

    def __init__(self, item: Item) -> None:
        self._item = item

    def data(self) -> Any:
        return None if self._item.data is None else decode(self._item.data, self._item.codec)

    def event(self) -> str | None:
        return self._item.event

    def comments(self) -> list[str] | None:
        return self._item.comment

    def id(self) -> str | None:
        return self._item.id

    def is_error(self) -> bool:
        return self._item.event == "error"

    def __repr__(self) -> str:
        return f"Annotated(data={self.data()!r}, event={self.event()!r})"


class _Plain:
    """Bare token with the interface of an annotated element."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def data(self) -> dict[str, Any]:
        return {"token_ids": [self._token_id], "index": 0}

    def event(self) -> None:
        return None

    def comments(self) -> None:
        return None

    def id(self) -> None:
        return None

    def is_error(self) -> bool:
        return False


_VALUE_ERRORS: dict[type[Exception], type[Exception]] = {}
"""For each class of errors, its subclass of `ValueError`, created with the first such error."""


def as_value_error(error: Exception) -> Exception:
    """Return the same error as an instance of its class and of `ValueError`."""
    if isinstance(error, ValueError):
        return error
    kind = _VALUE_ERRORS.get(type(error))
    if kind is None:
        kind = type(type(error).__name__, (type(error), ValueError), {"__module__": type(error).__module__})
        _VALUE_ERRORS[type(error)] = kind
    same = kind.__new__(kind, *error.args)
    same.__dict__.update(error.__dict__)
    return same


class ResponseStream:
    """Response to one request as an async iterator. Leaving it early kills the request.

    Without annotations, elements that have no data are skipped, as in upstream's bindings. Stopping its context ends
    the iteration: what the worker still sends is dropped. The errors that it raises are
    `ValueError`s too, as in upstream's bindings.
    """

    def __init__(self, annotated: bool = True) -> None:
        self._annotated = annotated
        self._unread: deque[int | Item] = deque()
        self._error: Exception | None = None
        self._is_over = False
        self._is_stopped = False
        self._call: Call | None = None
        self._wake: asyncio.Future[None] | None = None
        self._untie: Callable[[], None] | None = None

    def bind(self, call: Call, context: Context | None) -> None:
        """Bind the stream to its call, and the call to the context that it was sent under."""
        if self._is_over:
            return
        self._call = call
        if context is not None:
            itself = weakref.ref(self)  # A long-lived context must not keep unreferenced streams alive.

            def end() -> None:
                stream = itself()
                if stream is None:
                    return
                if context.is_killed():
                    stream.killed()
                else:
                    stream.stopped()

            self._untie = context.on_end(end)

    def stopped(self) -> None:
        """End the stream after the elements received so far, and let the worker end the request."""
        self._is_stopped = True
        if self._call is not None:
            self._call.stop()
        self._rouse()

    def killed(self) -> None:
        """End the request and the stream: no further elements are needed."""
        self._is_stopped = False  # A worker that ends slowly is not waited for any longer.
        self._leave()
        self._unread.clear()
        self._rouse()

    def on_token(self, token_id: int) -> None:
        self._enqueue(token_id)

    def on_item(self, item: Item) -> None:
        self._enqueue(item)

    def on_end(self) -> None:
        self._over()
        self._rouse()

    def on_error(self, error: Exception) -> None:
        self._error = None if self._is_stopped else error
        self._over()
        self._rouse()

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> Any:
        element = await self._next()
        while element is None and not self._annotated:  # Annotations without data.
            element = await self._next()
        return element

    async def _next(self) -> Any:
        while not self._unread:
            if self._is_over or self._is_stopped:
                error, self._error = self._error, None
                if error is not None:
                    raise as_value_error(error)
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            except asyncio.CancelledError:
                self._leave()
                raise
        return self._give(self._unread.popleft())

    async def aclose(self) -> None:
        """Kill the request if it has not ended."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _give(self, element: int | Item) -> Any:
        if isinstance(element, int):
            plain = _Plain(element)
            return plain if self._annotated else plain.data()
        return Annotated(element) if self._annotated else Annotated(element).data()

    def _enqueue(self, element: int | Item) -> None:
        if self._is_stopped:
            return
        if len(self._unread) >= UNREAD_MAX:
            self._leave()
            self.on_error(ResponseTimeout(f"{UNREAD_MAX} unread elements: the reader of the response is too slow"))
            return
        self._unread.append(element)
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _over(self) -> None:
        self._is_over = True
        self._call = None  # It refers to this stream, which must end as soon as its reader drops it.
        if self._untie is not None:
            self._untie()
            self._untie = None

    def _leave(self) -> None:
        if not self._is_over:
            call = self._call
            self._over()
            if call is not None and not self._is_stopped:
                call.kill()


class ItemStream(ResponseStream):
    """Response whose elements are not decoded, for readers that decode large ones elsewhere."""

    def _give(self, element: int | Item) -> Item:
        return Item(encode(_Plain(element).data(), "msgpack")) if isinstance(element, int) else element


class GeneratorHandler:
    """Request-plane handler for an async generator: `handler(request)` or `handler(request, context)`."""

    def __init__(self, handler: GeneratorFunction, tasks: TaskOwner) -> None:
        if inspect.iscoroutinefunction(handler):
            raise InvalidArgument(f"handler {handler.__qualname__} is not an async generator: it must use `yield`")
        self._handler = handler
        self._tasks = tasks
        self._takes_context = takes_context(handler)

    def __call__(self, request: Request, reply: Reply) -> None:
        value = self._read(request)
        context = Context(request.id, request.metadata, request.headers, request.span)
        reply.on_cancel(lambda: context.kill() if getattr(reply, "is_killed", True) else context.stop_generating())
        self._tasks.start(self._run(value, context, reply), request.id)

    def _read(self, request: Request) -> Any:
        """Return the decoded request. Raise `InvalidArgument` for a malformed body."""
        return decode(request.body, request.codec)

    def _start(self, value: Any, context: Context) -> AsyncIterator[Any]:
        return call_handler(self._handler, self._takes_context, value, context)

    def _write(self, reply: Reply, element: Any) -> None:
        write(reply, element)

    async def _run(self, value: Any, context: Context, reply: Reply) -> None:
        is_over = False
        try:
            elements = self._start(value, context)
            async for element in elements:
                context.notify_first_token()
                if is_over:
                    await _close(elements)
                    break
                # As upstream: elements after a stop are not sent, and the handler is resumed once to see the stop.
                is_over = context.is_stopped() or getattr(reply, "is_killed", False)
                if not is_over:
                    self._write(reply, element)
            reply.finish()
        except DynamoException as error:
            _end(reply, context, error)
        except (ValueError, TypeError) as error:  # Reported as an invalid request, as in Dynamo.
            logger.warning("handler rejected request %s: %s: %s", reply.request_id, type(error).__name__, error)
            logger.debug("traceback of the rejection", exc_info=True)
            _end(reply, context, refused(error))
        except (asyncio.CancelledError, GeneratorExit) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or not task.cancelling()):
                _end(reply, context, named(error))  # Raised by the handler: this task was not cancelled.
                return
            reply.fail(EngineShutdown("engine shutting down"))
            raise
        except Exception as error:  # Request boundary: the caller gets the error.
            if not context.is_stopped():
                logger.exception("handler failed on request %s", reply.request_id)
            _end(reply, context, error)


def _end(reply: Reply, context: Context, error: Exception) -> None:
    """End a response with the handler's error; after a stop without it, as upstream: the caller awaits no result."""
    if context.is_stopped():
        logger.debug("handler of the stopped request %s raised %s: %s", reply.request_id, type(error).__name__, error)
        reply.finish()
    else:
        reply.fail(error)


class RequestStream:
    """Request frames as an async iterator. Its end closes only the request side; the response may continue."""

    def __init__(self, request: Request) -> None:
        """Wrap a request; one without a stream is a single frame. Raise `InvalidArgument` for a malformed body."""
        self._frames = request.frames
        self._codec = request.codec
        self._whole = deque([decode(request.body, request.codec)] if request.frames is None else [])

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Any:
        """Return the next frame. Raise `InvalidArgument` for a malformed frame."""
        if self._frames is not None:
            return decode(await anext(self._frames), self._codec)
        if not self._whole:
            raise StopAsyncIteration
        return self._whole.popleft()

    def close(self) -> None:
        """Stop reading."""
        if self._frames is not None:
            self._frames.close()


class BidirectionalHandler(GeneratorHandler):
    """Request-plane handler for `handler(request_stream)` or `handler(request_stream, context)`."""

    def _read(self, request: Request) -> RequestStream:
        return RequestStream(request)

    async def _run(self, value: Any, context: Context, reply: Reply) -> None:
        try:
            await super()._run(value, context, reply)
        finally:
            value.close()


NOT = ""
KEYWORD = "keyword"
POSITION = "position"


def takes_context(handler: Callable[..., Any]) -> str:
    """Return how the handler takes the context: by keyword, by a required second position, or not at all."""
    parameters = inspect.signature(handler).parameters
    if "context" in parameters and parameters["context"].kind is not inspect.Parameter.POSITIONAL_ONLY:
        return KEYWORD
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    demanded = [one for one in parameters.values() if one.kind in kinds and one.default is inspect.Parameter.empty]
    return POSITION if len(demanded) >= 2 else NOT


def call_handler(handler: GeneratorFunction, takes: str, value: Any, context: Context) -> AsyncIterator[Any]:
    """Call a handler with its request and, as `takes_context` returned, the context."""
    if takes == KEYWORD:
        return handler(value, context=context)
    return handler(value, context) if takes == POSITION else handler(value)


async def _close(elements: AsyncIterator[Any]) -> None:
    """Close a generator at its current position."""
    close = getattr(elements, "aclose", None)
    if close is not None:
        await close()


def bare_token(element: Any) -> int | None:
    """Return the token of an element that is one token of choice 0 and nothing else; None for another element."""
    if type(element) is dict and len(element) == 2 and element.get("index") == 0:
        tokens = element.get("token_ids")
        if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < 1 << 32:
            return tokens[0]
    return None


def write(reply: Reply, element: Any) -> None:
    """Write one element; a bare token takes the fast path."""
    token = bare_token(element)
    if token is not None:
        reply.token(token)
    elif type(element) is dict and element.get(ENVELOPE):
        _write_annotated(reply, element)
    else:
        _write_item(reply, element)


def _write_item(reply: Reply, value: Any) -> None:
    try:
        reply.item(value)
    except InvalidArgument as error:  # The handler's fault, not the caller's.
        raise Unknown(f"critical error: failed serializing Python response: {error}") from None


def _write_annotated(reply: Reply, envelope: dict[str, Any]) -> None:
    """Write an element with the annotations of its envelope; the event `error` ends the response with an error.

    Raises `Unknown` for annotations of other types than text, which would make the caller close the connection.
    """
    known = {name: envelope[name] for name in AnnotatedValue.__struct_fields__ if name in envelope}
    try:
        value = msgspec.convert(known, AnnotatedValue)
    except msgspec.ValidationError as error:
        reason = "critical error: invalid response object from Python async generator"
        raise Unknown(f"{reason}; application-logic-mismatch: {error}") from None
    if value.event == "error":
        reply.fail(Unknown(", ".join(value.comment or ["unknown error"])))
    else:
        _write_item(reply, value)
