"""Virtual connector: scaling decisions that a planner publishes in discovery for an external environment.

The bucket `v1/<namespace>/planner` contains `num_prefill_workers`, `num_decode_workers`, `decision_id` and
`scaled_decision_id` as decimal text; a missing key is -1. The coordinator, part of the planner, writes the first three;
the client, part of the environment, writes the id of the last decision that it has carried out.
"""

import logging
from dataclasses import dataclass

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import InvalidArgument
from dynamo.runtime.discovery.base import Discovery, PersistentDiscovery, Synced
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

PREFILL, DECODE, DECISION, SCALED = "num_prefill_workers", "num_decode_workers", "decision_id", "scaled_decision_id"
UNSET_VALUE = -1


@dataclass(frozen=True, slots=True)
class PlannerDecision:
    """Numbers of workers that the planner requests; -1 where it has not decided."""

    num_prefill_workers: int = UNSET_VALUE
    num_decode_workers: int = UNSET_VALUE
    decision_id: int = UNSET_VALUE
    """Ids count from 0."""

    @property
    def is_unset(self) -> bool:
        """Whether nothing was decided."""
        return self.num_prefill_workers == UNSET_VALUE and self.num_decode_workers == UNSET_VALUE


class PlannerState:
    """Keys of one namespace's planner in discovery."""

    def __init__(self, discovery: Discovery, dynamo_namespace: str) -> None:
        if not dynamo_namespace or "/" in dynamo_namespace:
            raise InvalidArgument(f"namespace {dynamo_namespace!r}: must be one part", param="dynamo_namespace")
        self._discovery = discovery
        self._bucket = f"v1/{dynamo_namespace}/planner"

    async def read(self) -> tuple[PlannerDecision, int]:
        """Return the present decision, and the id of the last one that was carried out."""
        records = await self._discovery.snapshot(self._bucket)
        decision = PlannerDecision(*(_number(records.get(key)) for key in (PREFILL, DECODE, DECISION)))
        return decision, _number(records.get(SCALED))

    async def write(self, key: str, value: int) -> None:
        """Write a number; it outlives this process where the registry permits it."""
        discovery = self._discovery
        put = discovery.put_persistent if isinstance(discovery, PersistentDiscovery) else discovery.put
        await put(self._bucket, key, str(value).encode())

    async def clear(self) -> None:
        """Remove all keys: those of an earlier deployment of this name."""
        for key in (DECISION, SCALED, PREFILL, DECODE):
            await self._discovery.delete(self._bucket, key)

    async def wait(self) -> None:
        """Wait for a decision that was not carried out."""
        async for change in self._discovery.watch(self._bucket):
            if isinstance(change, Synced) or getattr(change, "key", None) == DECISION:
                decision, scaled = await self.read()
                if decision.decision_id > scaled:
                    return


class VirtualConnectorCoordinator:
    """Planner's side: publishes decisions, one at a time."""

    def __init__(
        self,
        drt: DistributedRuntime,
        dynamo_namespace: str,
        check_interval_secs: int,
        max_wait_time_secs: int,
        max_retries: int,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Create a coordinator that polls at this interval, at most `max_retries` times and `max_wait_time_secs`."""
        for name, value in (("check_interval_secs", check_interval_secs), ("max_retries", max_retries)):
            if value < 0:
                raise InvalidArgument(f"{name} {value}: must be 0 or more", param=name)
        self._state = PlannerState(drt.discovery, dynamo_namespace)
        self._interval_s, self._wait_max_s, self._retries = check_interval_secs, max_wait_time_secs, max_retries
        self._clock = clock or SystemClock()
        self._decision = PlannerDecision()
        self._scaled = UNSET_VALUE
        self._pending_since: float | None = None

    async def async_init(self) -> None:
        """Read the present state, which an earlier planner may have left. Required before any other method."""
        self._decision, self._scaled = await self._state.read()

    def read_state(self) -> PlannerDecision:
        """Return the last decision."""
        return self._decision

    async def is_scaling_ready(self) -> bool:
        """Return whether the last decision was carried out; True without one."""
        if self._scaled < self._decision.decision_id:
            _, self._scaled = await self._state.read()
        return self._decision.is_unset or self._scaled >= self._decision.decision_id

    async def update_scaling_decision(self, num_prefill: int | None = None, num_decode: int | None = None) -> None:
        """Publish the numbers of workers; None leaves one as it is.

        Nothing is published if nothing changes, or while the previous decision is pending; after `max_wait_time_secs` a
        pending decision is replaced.
        """
        before = self._decision
        prefill = before.num_prefill_workers if num_prefill is None else num_prefill
        decode = before.num_decode_workers if num_decode is None else num_decode
        if (prefill, decode) == (before.num_prefill_workers, before.num_decode_workers):
            return
        now = self._clock.now()
        if not await self.is_scaling_ready():
            self._pending_since = now if self._pending_since is None else self._pending_since
            if now - self._pending_since < self._wait_max_s:
                logger.warning("decision %d is pending; skipping an update", before.decision_id)
                return
            logger.warning("replacing decision %d, pending for %d s", before.decision_id, self._wait_max_s)
        await self._publish(PlannerDecision(prefill, decode, before.decision_id + 1))
        self._pending_since = now

    async def publish_again(self) -> None:
        """Publish the present numbers as a new decision: the environment carries them out again."""
        before = self._decision
        number = before.decision_id + 1
        await self._publish(PlannerDecision(before.num_prefill_workers, before.num_decode_workers, number))
        self._pending_since = self._clock.now()

    async def wait_for_scaling_completion(self) -> None:
        """Wait until the last decision was carried out. Raise `TimeoutError` after `max_retries` polls."""
        for _ in range(self._retries):
            if await self.is_scaling_ready():
                return
            await self._clock.sleep(self._interval_s)
        if not await self.is_scaling_ready():
            raise TimeoutError(f"decision {self._decision.decision_id} was not carried out in {self._retries} polls")

    async def _publish(self, decision: PlannerDecision) -> None:
        """Write the numbers first: the id announces them."""
        for key, value, before in (
            (PREFILL, decision.num_prefill_workers, self._decision.num_prefill_workers),
            (DECODE, decision.num_decode_workers, self._decision.num_decode_workers),
        ):
            if value != before:
                await self._state.write(key, value)
        await self._state.write(DECISION, decision.decision_id)
        self._decision = decision


class VirtualConnectorClient:
    """Environment's side: reads decisions and reports their completion."""

    def __init__(self, drt: DistributedRuntime, dynamo_namespace: str) -> None:
        self._state = PlannerState(drt.discovery, dynamo_namespace)

    async def get(self) -> PlannerDecision:
        """Return the present decision."""
        return (await self._state.read())[0]

    async def complete(self, event: PlannerDecision) -> None:
        """Report that a decision was carried out."""
        await self._state.write(SCALED, event.decision_id)

    async def wait(self) -> None:
        """Wait for a decision that was not carried out, including one that is published already."""
        await self._state.wait()


def _number(value: bytes | None) -> int:
    """Return a number of the registry; -1 if it is absent or malformed."""
    try:
        return UNSET_VALUE if value is None else int(value)
    except ValueError:
        logger.warning("malformed number of the planner: %r", value)
        return UNSET_VALUE
