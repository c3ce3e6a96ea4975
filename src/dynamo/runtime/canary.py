"""Canary: health checks of idle endpoints through their own handlers.

`Canary` decides when a check is due and what its outcome means; it takes the time as an argument. `watch` executes the
checks. A response to any request counts as a sign of life, so a busy endpoint is not checked.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from dynamo.core.clock import Clock
from dynamo.core.codec import encode
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import ConfigError, DynamoException, EngineShutdown, ResponseTimeout, Unknown, WorkerOverloaded
from dynamo.protocols.engine import EngineOutput
from dynamo.runtime.request_plane.base import Request
from dynamo.runtime.request_plane.reply import ReplyBase
from dynamo.runtime.server import Served

logger = logging.getLogger(__name__)

MARKER = "_HEALTH_CHECK"  # Key in the payload that marks a health check for the handler, as in Dynamo.


class CanaryOptions(Struct, frozen=True):
    """When an idle endpoint is checked and with which payload."""

    wait_s: float = 10.0
    timeout_s: float = 3.0
    payload: Any = None
    """Payload that overrides the endpoint's own; an endpoint without a payload is not checked."""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str] | None = None) -> "CanaryOptions | None":
        """Return the options, None when health checks are disabled. Raise `ConfigError` for invalid values."""
        if not setting("DYN_HEALTH_CHECK_ENABLED", False, read_bool, variables):
            return None
        return cls(
            _positive("DYN_CANARY_WAIT_TIME", 10.0, variables),
            _positive("DYN_HEALTH_CHECK_REQUEST_TIMEOUT", 3.0, variables),
            _read_payload(setting("DYN_HEALTH_CHECK_PAYLOAD", "", str, variables)),
        )


class Canary:
    """Health state of one endpoint."""

    def __init__(self, wait_s: float, now: float) -> None:
        self.is_well = True
        self._wait_s = wait_s
        self._checked_s = now

    def due_s(self, alive_s: float) -> float:
        """Return the time of the next check, given that the last sign of life was at `alive_s`."""
        return max(self._checked_s, alive_s) + self._wait_s

    def mark_alive(self, alive_s: float) -> None:
        """Record a sign of life at `alive_s`; one that is later than a failed check clears the failure."""
        if alive_s > self._checked_s:
            self.is_well = True

    def checked(self, now: float, *, is_well: bool) -> None:
        """Record the outcome of a check."""
        self._checked_s = now
        self.is_well = is_well


class CanaryReply(ReplyBase):
    """Reply to a health check; it succeeds with at least one element and no error."""

    __slots__ = ("error", "has_responded", "over")

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.error: BaseException | None = None
        self.has_responded = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def token(self, token_id: int) -> None:
        self.has_responded = True

    def item(self, value: Any) -> None:
        reason = value.finish_reason if isinstance(value, EngineOutput) else _finish_reason(value)
        if reason is not None and reason.startswith("error"):
            self.error = Unknown(reason)
        else:
            self.has_responded = True

    def write_end(self) -> None:
        """Complete the check; there is no caller to notify."""

    def write_error(self, error: BaseException) -> None:
        self.error = error

    def _done(self, error: BaseException | None) -> None:
        super()._done(error)
        if not self.over.done():
            self.over.set_result(None)


async def check(served: Served, body: bytes, codec: str, timeout_s: float) -> BaseException | None:
    """Send one health check; return the error, None if the check succeeded."""
    reply = CanaryReply(f"canary-{uuid.uuid4()}")
    try:
        served.admit()
    except DynamoException as error:
        return error
    served.start(Request(reply.request_id, body, codec), reply)
    await asyncio.wait({reply.over}, timeout=timeout_s)
    if not reply.over.done():
        reply.kill()
        return None if reply.has_responded else ResponseTimeout(f"no response within {timeout_s:g} s")
    if reply.error is not None:
        return reply.error
    return None if reply.has_responded else Unknown("empty response")


async def watch(
    served: Served, payload: Any, codec: str, options: CanaryOptions, clock: Clock, report: Callable[[bool], None]
) -> None:
    """Check the endpoint whenever it is idle, until it drains; pass each result to `report`."""
    payload = payload if options.payload is None else options.payload
    body = encode({**payload, MARKER: True} if isinstance(payload, dict) else payload, codec)
    canary = Canary(options.wait_s, clock.now())
    while not served.is_draining:
        canary.mark_alive(served.alive_s)
        report(canary.is_well)
        wait_s = canary.due_s(served.alive_s) - clock.now()
        if wait_s > 0:
            await clock.sleep(wait_s)
            continue
        error = await check(served, body, codec, options.timeout_s)
        # A worker that refuses because of load or draining is alive.
        is_well = error is None or isinstance(error, WorkerOverloaded | EngineShutdown)
        if not is_well and canary.is_well:
            logger.error("health check of %s failed: %s", served.path, error or type(error).__name__)
        elif is_well and not canary.is_well:
            logger.info("health check of %s succeeded again", served.path)
        canary.checked(clock.now(), is_well=is_well)


def _finish_reason(value: Any) -> str | None:
    reason = value.get("finish_reason") if isinstance(value, dict) else None
    return reason if isinstance(reason, str) else None


def _positive(name: str, default: float, variables: Mapping[str, str] | None) -> float:
    value = setting(name, default, float, variables)
    if not value > 0:
        raise ConfigError(f"{name}={value:g}: must be greater than 0 seconds")
    return value


def _read_payload(text: str) -> Any:
    """Parse JSON text, or the JSON file whose path follows an `@`."""
    if not text:
        return None
    try:
        if text.startswith("@"):
            with open(text[1:], encoding="utf-8") as file:
                return json.load(file)
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"DYN_HEALTH_CHECK_PAYLOAD={text[:200]!r}: {error}") from None
