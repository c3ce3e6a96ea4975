"""NATS connection that reconnects and restores its subscriptions.

nats-py implements the protocol. This module decides when to reconnect and which messages to keep or to drop: the
library's own reconnection would send requests later, after their callers have timed out.
"""

import asyncio
import contextlib
import logging
import os
import random
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo.core.boundaries import AsyncRollback, ErrorBoundary, logged
from dynamo.core.errors import CannotConnect, ConfigError
from dynamo.core.extras import install_command
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.transports.nats.liveness import PING_GIVEN_UP_S, Pings
from dynamo.runtime.transports.nats.options import NatsOptions
from dynamo.runtime.transports.nats.outbox import Outbox, OutboxMessage

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription as LiveSubscription

logger = logging.getLogger(__name__)

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 2.0  # Finds a restarted server quickly without flooding an absent one.
WAITING_LOG_INTERVAL_S = 10.0
CLOSE_TIMEOUT_S = 2.0  # Time to send pending data.
FLUSH_POLL_S = 0.001
NEVER_S = 1e9

Deliver = Callable[["Msg"], None]


def _tolerated(message: str, *args: object, level: int = logging.DEBUG) -> ErrorBoundary:
    """Return a boundary that logs an error of the library as the message's last argument: the connection is renewed."""
    return ErrorBoundary(lambda error: logger.log(level, message, *args, error))


def _nkey_errors() -> tuple[type[Exception], ...]:
    """Return the errors of unusable NKEY credentials."""
    try:
        from nkeys import NkeysError
    except ImportError:
        return ()
    return (NkeysError,)


class Subscription:
    """Subject subscription that survives reconnections."""

    def __init__(self, subject: str, queue: str, deliver: Deliver) -> None:
        self.subject = subject
        self.queue = queue
        self._deliver = deliver
        self.client: Client | None = None
        self.live: LiveSubscription | None = None

    async def handle(self, message: "Msg") -> None:
        with logged(logger, "handler of a message on %s failed", self.subject):
            self._deliver(message)


class NatsConnection:
    """Connection of a process for one purpose. Raise `ConfigError` if the client library is missing."""

    def __init__(
        self,
        options: NatsOptions,
        purpose: str,
        *,
        registry: MetricsRegistry | None = None,
        keeps_unsent: bool = False,
        on_down: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a connection; `keeps_unsent` queues messages during an outage, within limits."""
        self.options = options
        self.purpose = purpose
        registry, labels = registry or MetricsRegistry(), ("purpose",)
        prefix = "dynamo_transport_nats_"
        self._dropped = registry.counter(
            prefix + "dropped_total", "Published messages that were never sent", labels
        ).labels(purpose=purpose)
        self._outages = registry.counter(prefix + "outages_total", "Lost connections to the server", labels).labels(
            purpose=purpose
        )
        registry.gauge(prefix + "connected", "1 while connected to the server", labels).labels(purpose=purpose).follow(
            lambda: float(self.is_up)
        )
        self._client_type = load_client()
        self._tls = options.tls()
        self._keeps_unsent = keeps_unsent
        self._on_down = on_down
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._up = asyncio.Event()
        self._refused: asyncio.Future[ConfigError] = self._loop.create_future()
        self._down_since = self._loop.time()
        self._last_error = "no attempt yet"
        self._subscriptions: set[Subscription] = set()
        self._outbox = Outbox(self._dropped.inc)
        self._pings = Pings()
        self._tasks = TaskOwner(f"nats.{purpose}")
        self._has_begun = False
        self._is_closed = False
        self._is_ending = False

    # Connection state ----------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self._client is not None

    @property
    def client(self) -> "Client":
        """Return the library's connection, for requests beyond subjects. Raise `CannotConnect` while disconnected."""
        if self._client is None:
            raise CannotConnect(f"not connected to NATS at {self.options.where}: {self._last_error}")
        return self._client

    @property
    def dropped(self) -> int:
        """Return the number of published messages that were never sent."""
        return int(self._dropped.value)

    @property
    def payload_bytes_max(self) -> int:
        """Return the server's maximum message size in bytes, headers included; valid while connected."""
        return self._client.max_payload if self._client is not None else 0

    def begin(self) -> None:
        """Start connecting in the background, now and after every lost connection."""
        if not self._has_begun and not self._is_closed:
            self._has_begun = True
            self._down_since = self._loop.time()
            self._tasks.start(self._keep(), "keep")

    async def start(self) -> None:
        """Wait for the connection. Raise `ConfigError` when rejected, or after the startup timeout."""
        if self._is_closed:
            raise CannotConnect(f"connection to NATS at {self.options.where} is closed")
        self.begin()
        up = asyncio.ensure_future(self._up.wait())
        timeout_s = self.options.startup_timeout_s
        try:
            either: set[asyncio.Future[Any]] = {up, self._refused}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if self.is_up:
            return
        if self._refused.done():
            raise self._refused.result()
        raise ConfigError(
            f"no NATS server at {self.options.where} (NATS_SERVER) within {timeout_s:g} s: {self._last_error}"
        )

    async def wait_up(self) -> None:
        """Wait at most `connect_timeout_s` since the connection loss for the server. Raise `CannotConnect`."""
        self.begin()
        left_s = self._down_since + self.options.connect_timeout_s - self._loop.time()
        try:
            async with asyncio.timeout(max(left_s, 0)):
                await self._up.wait()
        except TimeoutError:
            raise CannotConnect(f"not connected to NATS at {self.options.where}: {self._last_error}") from None

    async def close(self) -> None:
        """Send pending messages if connected, and close."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._client is not None:
            with _tolerated("%s: pending messages were not sent to NATS: %s", self.purpose):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._flush(self._client)
        self._is_ending = True
        await self._tasks.cancel_and_wait()
        client, self._client = self._client, None
        self._up.clear()
        if client is not None:
            await self._abandon(client)
        self._outbox.drop_all()
        self._refused.cancel()

    async def _keep(self) -> None:
        # The library may swallow a cancellation (`asyncio.wait_for` of 3.11 does), hence the check of `_is_ending`.
        while not self._is_ending:
            client, broken = await self._connect_again()
            sending = self._loop.create_task(self._outbox.send(client), name=f"nats.{self.purpose}.send")
            self._client = client
            self._up.set()
            try:
                reason = await self._until_broken(client, broken)
            finally:
                sending.cancel()
            self._went_down(reason)
            await self._abandon(client)

    def _went_down(self, reason: str) -> None:
        logger.warning("%s: connection to NATS at %s lost: %s; reconnecting", self.purpose, self.options.where, reason)
        self._client = None
        self._up.clear()
        self._down_since = self._loop.time()
        self._last_error = reason
        self._outages.inc()
        if not self._keeps_unsent:
            self._outbox.drop_all()
        self._on_down()

    async def _connect_again(self) -> "tuple[Client, asyncio.Event]":
        """Reconnect until a connection with every subscription is established."""
        began = self._loop.time()
        backoff_s = BACKOFF_MIN_S
        logged_at = -NEVER_S
        while True:
            broken = asyncio.Event()
            client = self._client_type()
            try:
                async with (
                    AsyncRollback(partial(self._abandon, client)),
                    asyncio.timeout(self.options.connect_timeout_s),
                ):
                    await self._connect(client, broken)
                    await client.rtt(PING_GIVEN_UP_S)
                    while missing := [one for one in self._subscriptions if one.client is not client]:
                        for subscription in missing:
                            await self._subscribe(client, subscription)
                        await client.rtt(PING_GIVEN_UP_S)
            except Exception as error:  # noqa: BLE001 - the library raises many types; all of them are retried
                self._last_error = self._describe(error)
                self._consider_refusal(error)
                if self._is_ending:
                    raise asyncio.CancelledError from None
            else:
                if self._outages.value or logged_at > 0:
                    logger.info("%s: connected to NATS at %s", self.purpose, self.options.where)
                return client, broken
            now = self._loop.time()
            if now >= logged_at + WAITING_LOG_INTERVAL_S:
                logged_at = now
                logger.warning(
                    "%s: not connected to NATS at %s (NATS_SERVER) for %.0f s: %s",
                    self.purpose,
                    self.options.where,
                    now - began,
                    self._last_error,
                )
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _consider_refusal(self, error: Exception) -> None:
        """End the startup wait if a reachable server rejects this process."""
        if self._refused.done():
            return
        if isinstance(error, ConfigError):
            self._refused.set_result(error)
        elif isinstance(error, ssl.SSLCertVerificationError):
            self._refused.set_result(
                ConfigError(f"NATS at {self.options.where}: untrusted certificate (NATS_TLS_*): {self._last_error}")
            )
        elif "Authorization Violation" in self._last_error:
            self._refused.set_result(
                ConfigError(f"NATS at {self.options.where}: authorization rejected (NATS_AUTH_*): {self._last_error}")
            )

    async def _connect(self, client: "Client", broken: asyncio.Event) -> None:
        from nats.errors import UnexpectedEOF

        async def on_error(error: Exception) -> None:
            self._last_error = self._describe(error)
            if isinstance(error, (OSError, UnexpectedEOF)):
                broken.set()
            elif broken.is_set() or self._client is client:
                logger.warning("%s: NATS: %s", self.purpose, self._last_error)

        async def on_closed() -> None:
            broken.set()

        options: dict[str, Any] = self.options.credentials()
        if self._tls is not None:
            options["tls"] = self._tls
        try:
            await client.connect(
                self.options.servers,
                name=f"dynamo.{self.purpose}",
                error_cb=on_error,
                closed_cb=on_closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=int(NEVER_S),
                **options,
            )
        except ImportError:
            raise ConfigError(f"NATS_AUTH_NKEY: nkeys is missing; install it: {install_command('nats')}") from None
        except _nkey_errors() as error:
            raise ConfigError(f"NATS_AUTH_NKEY or NATS_AUTH_CREDENTIALS_FILE: {error}") from None
        broken.clear()  # Servers of a cluster that were tried before may have failed.

    async def _until_broken(self, client: "Client", broken: asyncio.Event) -> str:
        """Wait until the connection is unusable; return the reason."""
        while not self._is_ending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.ping_interval_s):
                    await broken.wait()
            if broken.is_set() or client.is_closed:
                return self._last_error
            try:
                await self._pings.until_answered(client, self.options.ping_interval_s)
            except Exception as error:  # noqa: BLE001 - the library raises many types; all end the connection
                return self._describe(error)
        return "closed by this process"

    async def _abandon(self, client: "Client") -> None:
        """Close without flushing: the library would first wait for a peer that may not read."""
        client._pending.clear()
        client._pending_data_size = 0
        writer = getattr(client._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        with _tolerated("failed to close a NATS connection: %s"):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
        self._pings.end()

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no response within {self.options.connect_timeout_s:g} s"
        if isinstance(error, ssl.SSLError):
            return str(error)
        if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
            return os.strerror(error.errno)
        text = str(error) or type(error).__name__
        if "no servers available" in text:  # This error hides the cause.
            return self._last_error
        return text.removeprefix("nats: ").strip("'")

    # Publishing and subscribing ------------------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> bool:
        """Queue a message; never block. Return False if it was dropped: not connected, or the queue is full."""
        if self._is_closed or (self._client is None and not self._keeps_unsent):
            self._dropped.inc()
            return False
        return self._outbox.put(OutboxMessage(subject, data, reply, headers))

    async def subscribe(self, subject: str, deliver: Deliver, queue: str = "") -> Subscription:
        """Subscribe; the server has the subscription on return, or once it is connected again."""
        subscription = Subscription(subject, queue, deliver)
        self._subscriptions.add(subscription)
        client = self._client
        if client is not None:
            message = "%s: failed to subscribe to %s: %s; retrying"
            with _tolerated(message, self.purpose, subject, level=logging.WARNING):
                await self._subscribe(client, subscription)
                await self._pings.once(client, self.options.connect_timeout_s)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        live, subscription.live = subscription.live, None
        if live is not None:
            with _tolerated("%s: failed to unsubscribe from %s: %s", self.purpose, subscription.subject):
                await live.unsubscribe()

    async def settle(self, subscription: Subscription) -> None:
        """Wait until the messages sent by the server before this call are delivered, or the server does not respond."""
        client, live = self._client, subscription.live
        if client is None or live is None:
            return
        with _tolerated("%s: failed to settle %s: %s", self.purpose, subscription.subject):
            async with asyncio.timeout(self.options.connect_timeout_s):
                await self._pings.once(client, self.options.connect_timeout_s)
                while live.pending_msgs:  # noqa: ASYNC110 - the library delivers without notification
                    await asyncio.sleep(0)

    async def flush(self) -> None:
        """Wait until the server has received what was published before, or does not respond."""
        if self._client is None:
            return
        with _tolerated("%s: pending messages were not sent to NATS: %s", self.purpose):
            async with asyncio.timeout(self.options.connect_timeout_s):
                await self._flush(self._client)

    async def _flush(self, client: "Client") -> None:
        await self._outbox.wait_empty()
        while client.pending_data_size:  # noqa: ASYNC110 - the library writes without notification
            await asyncio.sleep(FLUSH_POLL_S)
        await self._pings.once(client, self.options.connect_timeout_s)

    async def _subscribe(self, client: "Client", subscription: Subscription) -> None:
        subscription.client = client
        subscription.live = await client.subscribe(subscription.subject, subscription.queue, cb=subscription.handle)


def load_client() -> "type[Client]":
    """Return the client library's class. Raise `ConfigError` if it is not installed."""
    try:
        from nats.aio.client import Client
    except ImportError:
        raise ConfigError(f"NATS: client library is missing; install it: {install_command('nats')}") from None
    return Client
