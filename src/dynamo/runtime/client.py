"""Client: instances of an endpoint, and requests to them."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from dynamo.core.amortized import AmortizedValue, LoopTurn
from dynamo.core.codec import MSGPACK, UNREADABLE, decode, encode
from dynamo.core.errors import CannotConnect, InstanceTimeout, InvalidArgument, WorkerOverloaded, WorkerUnavailable
from dynamo.core.loops import ForeignStream, is_foreign, on_loop
from dynamo.core.metrics import Counter, MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import INSTANCES, EndpointId, Instance
from dynamo.runtime.config import device_ratio, inhibited_duration_s
from dynamo.runtime.context import Context
from dynamo.runtime.discovery.base import Put, Synced
from dynamo.runtime.push_router import PushRouter, RouterMode
from dynamo.runtime.request_plane.base import Call, FramedPlane, Receiver, Request, Target, WatchfulPlane
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.runtime.runtime_data import wait_for_instances_by_runtime_data
from dynamo.runtime.streams import ResponseStream

if TYPE_CHECKING:
    from dynamo.runtime.discovery.base import Discovery
    from dynamo.runtime.request_plane.base import RequestPlane

logger = logging.getLogger(__name__)

FIRST_VIEW_TIMEOUT_S = 10.0  # A registry that needs longer has an outage: start with the instances found so far.

SEND_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
"""Upstream's buckets."""

NOTHING: Mapping[str, str] = {}

_read_instance = msgspec.json.Decoder(Instance).decode


def unreadable_records(registry: MetricsRegistry, bucket: str) -> Counter:
    """Return the counter of unreadable records of a bucket; it counts each change of such a record."""
    name = "dynamo_component_discovery_unreadable_records_total"
    return registry.counter(name, "Records in the registry that could not be read", ("bucket",)).labels(bucket=bucket)


class SendMetrics:
    """`dynamo_request_plane_*` metrics of the caller, shared by all clients of a process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        prefix = "dynamo_request_plane_"
        self.inflight = registry.gauge(prefix + "inflight_requests", "Requests with an incomplete response").labels()
        self.unreadable = unreadable_records(registry, INSTANCES)
        self.queue = registry.histogram(
            prefix + "queue_seconds", "Wait for a connection to the worker", (), SEND_BUCKETS
        ).labels()
        self.send = registry.histogram(
            prefix + "send_seconds", "Time from worker selection until the request is sent", (), SEND_BUCKETS
        ).labels()


class Client:
    """Client of one endpoint: discovers its instances and sends requests to them."""

    def __init__(
        self,
        endpoint: EndpointId,
        discovery: "Discovery",
        plane: "RequestPlane",
        mode: RouterMode | str | None = None,
        registry: MetricsRegistry | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._metrics = SendMetrics(registry or MetricsRegistry())
        self._discovery = discovery
        self._plane = plane
        self._watchful = plane if isinstance(plane, WatchfulPlane) else None
        self._router = PushRouter(
            RouterMode(mode or RouterMode.ROUND_ROBIN), inhibited_duration_s(), device_ratio=device_ratio()
        )
        self._loop = asyncio.get_running_loop()
        self._silent = AmortizedValue(self._find_silent)
        self._silent_now: frozenset[int] = frozenset()
        self._silent_at: float | None = None
        """Loop time of `_silent_now`."""
        self._instances: dict[int, Instance] = {}
        self._targets: dict[int, Target] = {}
        self._keys: dict[str, int] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._synced = asyncio.Event()
        self._tasks = TaskOwner(f"client.{endpoint}")
        self.is_closed = False

    # Instances -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start watching; return once the instances registered so far are known."""
        self._tasks.supervise(self._watch, "watch")
        try:
            async with asyncio.timeout(FIRST_VIEW_TIMEOUT_S):  # Before 3.12 `wait_for` may swallow a cancellation.
                await self._synced.wait()
        except TimeoutError:
            logger.warning("no instance list for %s yet: registry timeout; check the registry", self.endpoint)

    @property
    def is_sound(self) -> bool:
        """Return False while the watch is restarting after a crash; the last instance list is used meanwhile."""
        return self._tasks.is_sound

    async def close(self) -> None:
        """Stop watching and forget all instances. Running requests continue while their workers are alive."""
        self.is_closed = True
        targets = list(self._targets.values())
        self._keys.clear()
        self._instances.clear()
        self._targets.clear()
        self._router.update(())
        for target in targets:
            self._suspect(target)
        await self._tasks.cancel_and_wait()

    def instances(self) -> list[Instance]:
        return [self._instances[instance_id] for instance_id in sorted(self._instances)]

    def instance_ids(self) -> list[int]:
        return list(self._router.ids)

    def inflight(self, instance_id: int) -> int:
        """Return the number of this client's requests in flight to an instance."""
        return self._router.inflight(instance_id)

    def has_sound(self, exclude: Collection[int] = ()) -> bool:
        """Return whether an instance exists that is not excluded, not inhibited and responsive."""
        now = self._loop.time()
        return any(
            instance_id not in exclude
            and not self._router.is_inhibited(instance_id, now)
            and not (self._watchful is not None and self._watchful.is_silent(self._targets[instance_id]))
            for instance_id in self._router.ids
        )

    def unsound(self) -> frozenset[int]:
        """Return the ids of instances that failed recently or are unresponsive."""
        now = self._loop.time()
        if (
            now != self._silent_at
        ):  # Requests that arrive together are routed in one turn of the loop, at one loop time.
            self._silent_now, self._silent_at = self._silent.get(), now
        inhibited = self._router.inhibited(now)
        return self._silent_now.union(inhibited) if inhibited else self._silent_now

    def _find_silent(self) -> frozenset[int]:
        if self._watchful is None:
            return frozenset()
        is_silent = self._watchful.is_silent
        return frozenset(instance_id for instance_id, target in self._targets.items() if is_silent(target))

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after an instance was added, removed or changed."""
        self._callbacks.append(callback)

    async def wait_for_instances(self, timeout_s: float | None = None) -> list[int]:
        """Return the instance ids once there is at least one. Raise `InstanceTimeout` after the timeout."""
        return await on_loop(self._loop, self._wait_for_instances(timeout_s))

    async def _wait_for_instances(self, timeout_s: float | None) -> list[int]:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._instances:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise InstanceTimeout(f"no instance of {self.endpoint} within {timeout_s} s") from None
        return self.instance_ids()

    async def wait_for_instance_by_runtime_data(self, key: str, value: str, timeout_s: float | None = None) -> int:
        """Return the only instance whose model card has this value in its runtime data.

        Raise `InstanceTimeout` if none or several match until the timeout.
        """
        found = wait_for_instances_by_runtime_data(
            self, self._discovery, key, value, min_count=1, max_count=1, timeout_s=timeout_s
        )
        return (await on_loop(self._loop, found))[0]

    async def wait_for_instances_by_runtime_data(
        self, key: str, value: str, min_count: int, timeout_s: float | None = None
    ) -> list[int]:
        """Return the sorted instances whose cards have this runtime data, once there are `min_count` of them.

        Raise `InstanceTimeout` after the timeout.
        """
        found = wait_for_instances_by_runtime_data(
            self, self._discovery, key, value, min_count=min_count, timeout_s=timeout_s
        )
        return await on_loop(self._loop, found)

    # Requests ------------------------------------------------------------------------------------------------------

    async def send(
        self,
        body: bytes,
        receiver: Receiver,
        *,
        request_id: str,
        instance_id: int | None = None,
        codec: str = MSGPACK,
        headers: Mapping[str, str] = NOTHING,
        metadata: Mapping[str, str] = NOTHING,
        exclude: Collection[int] = (),
        mode: RouterMode | None = None,
        frames: RequestFrames | None = None,
    ) -> Call:
        """Send a request to one instance; the response and later errors go to `receiver`.

        `frames` are further frames of the request, encoded with the instance's codec (`codec_of`).

        Without `instance_id` the router mode selects an instance outside `exclude`; an instance that cannot be
        connected is skipped. Raise `WorkerUnavailable` when no instance is left, `InvalidArgument` for an oversized
        request.
        """
        if frames is not None and not (isinstance(self._plane, FramedPlane) and self._plane.carries_frames):
            raise InvalidArgument("request streams are not supported by this request plane; use --request-plane tcp")
        request = Request(request_id, body, codec, headers, metadata)
        begun = time.perf_counter()  # The clock of the loop does not advance within one iteration.
        tried: set[int] = set()
        last_error: CannotConnect | None = None
        while True:
            if instance_id is not None:
                target = self._target(instance_id)
            else:
                target = self._choose(mode, {*exclude, *tried} if tried else exclude, last_error)
            if frames is not None:
                # The batched protocol has no request frames.
                target = replace(target, is_batched=False, has_pulse=False)
                request = Request(request_id, b"", target.codec, headers, metadata, frames=frames)
            elif target.codec != codec:
                request = Request(
                    request_id, encode(decode(body, codec), target.codec), target.codec, headers, metadata
                )
            self._router.begin(target.instance_id)
            self._metrics.inflight.value += 1
            try:
                call = self._plane.send(target, request, receiver, self._done)
                if call is None:
                    call = await self._connect_and_send(target, request, receiver)
            except CannotConnect as error:
                self._done(target.instance_id, error)
                if instance_id is not None:
                    raise
                tried.add(target.instance_id)
                last_error = error
            except BaseException:  # Without a context manager: this runs for every request.
                self._end(target.instance_id)
                raise
            else:
                self._metrics.send.observe(time.perf_counter() - begun)
                return call

    def pick(self, exclude: Collection[int] = ()) -> int:
        """Return the instance for the next request that must name its worker. Raise `WorkerUnavailable`."""
        return self._choose(None, exclude, None).instance_id

    def codec_of(self, instance_id: int) -> str:
        """Return the codec of an instance; the default codec if the instance has left."""
        target = self._targets.get(instance_id)
        return MSGPACK if target is None else target.codec

    async def _connect_and_send(self, target: Target, request: Request, receiver: Receiver) -> Call:
        begun = time.perf_counter()
        await self._plane.connect(target)
        self._metrics.queue.observe(time.perf_counter() - begun)
        call = self._plane.send(target, request, receiver, self._done)
        if call is None:
            raise CannotConnect(f"connection to {target.address} closed immediately")
        return call

    def _choose(self, mode: RouterMode | None, exclude: Collection[int], last_error: CannotConnect | None) -> Target:
        if (mode or self._router.mode) is RouterMode.DIRECT:
            raise WorkerUnavailable(f"{self.endpoint} uses direct routing: the request must name an instance")
        now = self._loop.time()
        instance_id = self._router.pick(now, exclude, mode)
        if self._watchful is not None:
            passed_over: set[int] = set()
            while (
                instance_id is not None
                and instance_id not in passed_over
                and self._watchful.is_silent(self._targets[instance_id])
            ):
                passed_over.add(instance_id)
                self._router.inhibit(instance_id, now)
                instance_id = self._router.pick(now, exclude, mode)
        if instance_id is not None:
            return self._targets[instance_id]
        if last_error is not None:
            raise last_error
        raise WorkerUnavailable(f"no instance of {self.endpoint} can take the request")

    def _target(self, instance_id: int) -> Target:
        target = self._targets.get(instance_id)
        if target is None:
            raise WorkerUnavailable(f"instance {instance_id:x} of {self.endpoint} not found")
        return target

    def _suspect(self, target: Target) -> None:
        """Check the connection of an instance that left the registry or changed its address."""
        if self._watchful is not None and self._router.inflight(target.instance_id):
            self._watchful.suspect(target)

    def _end(self, instance_id: int) -> None:
        self._router.end(instance_id)
        self._metrics.inflight.value -= 1

    def _done(self, instance_id: int, error: Exception | None) -> None:
        self._end(instance_id)
        if isinstance(error, WorkerUnavailable) and not isinstance(error, WorkerOverloaded):
            self._router.inhibit(instance_id, self._loop.time())

    # Public API ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> ResponseStream | ForeignStream:
        """Send a value to an instance selected by this client's mode; return the response stream."""
        return await self._stream(request, annotated, context)

    async def round_robin(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> ResponseStream | ForeignStream:
        """Send a value to the next instance in turn."""
        return await self._stream(request, annotated, context, mode=RouterMode.ROUND_ROBIN)

    async def random(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> ResponseStream | ForeignStream:
        """Send a value to a random instance."""
        return await self._stream(request, annotated, context, mode=RouterMode.RANDOM)

    async def device_aware_weighted(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> ResponseStream | ForeignStream:
        """Send a value to the least loaded instance of the device kind with the lowest load per capacity."""
        return await self._stream(request, annotated, context, mode=RouterMode.DEVICE_AWARE_WEIGHTED)

    async def direct(
        self, request: Any, instance_id: int, annotated: bool | None = True, context: Context | None = None
    ) -> ResponseStream | ForeignStream:
        """Send a value to the given instance."""
        return await self._stream(request, annotated, context, instance_id=instance_id)

    async def _stream(
        self,
        request: Any,
        annotated: bool | None,
        context: Context | None,
        instance_id: int | None = None,
        mode: RouterMode | None = None,
    ) -> ResponseStream | ForeignStream:
        if is_foreign(self._loop):
            shadow = None if context is None else context.shadow(self._loop)
            work = self._stream(request, annotated, shadow, instance_id, mode)
            return ForeignStream(await on_loop(self._loop, work), self._loop)
        stream = ResponseStream(annotated is not False)
        call = await self.send(
            encode(request, MSGPACK),
            stream,
            request_id=context.id() if context else str(uuid.uuid4()),
            instance_id=instance_id,
            headers=context.propagated() if context else NOTHING,
            metadata=context.metadata_to_send() if context else NOTHING,
            mode=mode,
        )
        stream.bind(call, context)
        return stream

    # Watching ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Watch the registry forever. After a restart, remove the instances that left meanwhile."""
        path = self.endpoint.path  # Compared in full: a name may contain slashes.
        unconfirmed = set(self._keys)
        turn = LoopTurn()
        async for change in self._discovery.watch(INSTANCES):
            await turn.yield_if_long()
            if isinstance(change, Synced):
                for key in unconfirmed:
                    self._apply(key, None)
                unconfirmed.clear()
                self._synced.set()
            elif change.key.rpartition("/")[0] == path:
                unconfirmed.discard(change.key)
                self._apply(change.key, change.value if isinstance(change, Put) else None)

    def _apply(self, key: str, value: bytes | None) -> None:
        read: Instance | None = None
        if value is not None:
            try:
                read = _read_instance(value)
            except UNREADABLE as error:
                self._metrics.unreadable.inc()
                logger.warning("ignoring malformed instance record %s: %s", key, error)
                return  # Keep the last valid record until the instance repairs it or leaves.
        known = self._keys.pop(key, None)
        before: Target | None = None
        if known is not None:
            del self._instances[known]
            before = self._targets.pop(known)
        if read is not None:
            self._keys[key] = read.instance_id
            self._instances[read.instance_id] = read
            self._targets[read.instance_id] = Target.of(read)
        cpus = [one for one, instance in self._instances.items() if instance.device_type == "cpu"]
        self._router.update(self._instances, cpus)
        if before is not None and self._targets.get(before.instance_id) != before:
            self._suspect(before)
        self._changed.set()
        for callback in self._callbacks:
            callback()
