"""NATS connection: one that comes back; what was subscribed before is subscribed again.

nats-py speaks the protocol. When to connect again, what is kept meanwhile and what is given up is decided here: its own
reconnection would later send requests that their callers have long given up.
"""

import asyncio
import contextlib
import logging
import os
import random
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dynamo.core.errors import CannotConnect, ConfigError
from dynamo.core.extras import install_command
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.transports.nats.liveness import PING_GIVEN_UP_S, Pings
from dynamo.runtime.transports.nats.options import NatsOptions
from dynamo.runtime.transports.nats.outbox import Message, Outbox

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription as LiveSubscription

logger = logging.getLogger(__name__)

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 2.0  # A server that restarts is found at once; one that is gone is not besieged.
WAITING_LOG_INTERVAL_S = 10.0
CLOSE_TIMEOUT_S = 2.0  # What is written already should be gone by then.
FLUSH_POLL_S = 0.001
NEVER_S = 1e9

Deliver = Callable[["Msg"], None]


class Subscription:
    """A subject that is listened to, on whatever connection is up."""

    def __init__(self, subject: str, queue: str, deliver: Deliver) -> None:
        self.subject = subject
        self.queue = queue
        self._deliver = deliver
        self.client: Client | None = None
        self.live: LiveSubscription | None = None

    async def hear(self, message: "Msg") -> None:
        try:
            self._deliver(message)
        except Exception:
            logger.exception("a message on %s could not be handled", self.subject)


class NatsConnection:
    """One process's connection for one purpose. Raises `ConfigError` where the client library is missing."""

    def __init__(
        self,
        options: NatsOptions,
        purpose: str,
        *,
        registry: MetricsRegistry | None = None,
        keeps_unsent: bool = False,
        on_down: Callable[[], None] = lambda: None,
    ) -> None:
        """`keeps_unsent` holds what is published during an outage, within limits, until the server is back."""
        self.options = options
        self.purpose = purpose
        registry, labels = registry or MetricsRegistry(), ("purpose",)
        prefix = "dynamo_transport_nats_"
        self._dropped = registry.counter(
            prefix + "dropped_total", "Messages that were published and never sent", labels
        ).labels(purpose=purpose)
        self._outages = registry.counter(
            prefix + "outages_total", "Times that the connection to the server was lost", labels
        ).labels(purpose=purpose)
        registry.gauge(prefix + "connected", "1 while the server is there", labels).labels(purpose=purpose).follow(
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

    # Being connected -----------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self._client is not None

    @property
    def client(self) -> "Client":
        """The library's connection, for what a server is asked beyond subjects. Raises `CannotConnect` while it is away."""
        if self._client is None:
            raise CannotConnect(f"NATS at {self.options.where} is not there: {self._last_error}")
        return self._client

    @property
    def dropped(self) -> int:
        """Messages that were published and never sent."""
        return int(self._dropped.value)

    @property
    def payload_bytes_max(self) -> int:
        """What the server takes in one message, headers included; valid while up."""
        return self._client.max_payload if self._client is not None else 0

    def begin(self) -> None:
        """Connects in the background, now and whenever the connection breaks."""
        if not self._has_begun and not self._is_closed:
            self._has_begun = True
            self._down_since = self._loop.time()
            self._tasks.start(self._keep(), "keep")

    async def start(self) -> None:
        """Returns when connected. Raises `ConfigError` when refused, or not there within the time to start."""
        if self._is_closed:
            raise CannotConnect(f"the connection to NATS at {self.options.where} is closed")
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
        """Waits a moment for a server that is away. Raises `CannotConnect`, at once where it has long been away."""
        self.begin()
        left_s = self._down_since + self.options.connect_timeout_s - self._loop.time()
        try:
            async with asyncio.timeout(max(left_s, 0)):
                await self._up.wait()
        except TimeoutError:
            raise CannotConnect(f"NATS at {self.options.where} is not there: {self._last_error}") from None

    async def close(self) -> None:
        """Sends what waits, if somebody listens, and closes."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._client is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._flush(self._client)
            except Exception as error:
                logger.debug("%s: not everything reached NATS: %s", self.purpose, error)
        self._is_ending = True
        await self._tasks.cancel_and_wait()
        client, self._client = self._client, None
        self._up.clear()
        if client is not None:
            await self._abandon(client)
        self._outbox.drop_all()
        self._refused.cancel()

    async def _keep(self) -> None:
        # The library may swallow a cancellation (`asyncio.wait_for` of 3.11 does), hence the look at `_is_ending`.
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
        logger.warning(
            "%s: the connection to NATS at %s broke: %s; connecting again", self.purpose, self.options.where, reason
        )
        self._client = None
        self._up.clear()
        self._down_since = self._loop.time()
        self._last_error = reason
        self._outages.inc()
        if not self._keeps_unsent:
            self._outbox.drop_all()
        self._on_down()

    async def _connect_again(self) -> "tuple[Client, asyncio.Event]":
        """Tries until there is a connection with every subscription on it."""
        began = self._loop.time()
        backoff_s = BACKOFF_MIN_S
        logged_at = -NEVER_S
        while True:
            broken = asyncio.Event()
            client = self._client_type()
            try:
                async with asyncio.timeout(self.options.connect_timeout_s):
                    await self._connect(client, broken)
                    await client.rtt(PING_GIVEN_UP_S)
                    while missing := [one for one in self._subscriptions if one.client is not client]:
                        for subscription in missing:
                            await self._subscribe(client, subscription)
                        await client.rtt(PING_GIVEN_UP_S)
            except Exception as error:  # Whatever the library raises: it is tried again.
                self._last_error = self._describe(error)
                self._consider_refusal(error)
                await self._abandon(client)
                if self._is_ending:
                    raise asyncio.CancelledError from None
            except BaseException:
                await self._abandon(client)
                raise
            else:
                if self._outages.value or logged_at > 0:
                    logger.info("%s: connected to NATS at %s", self.purpose, self.options.where)
                return client, broken
            now = self._loop.time()
            if now >= logged_at + WAITING_LOG_INTERVAL_S:
                logged_at = now
                logger.warning(
                    "%s: waiting for NATS at %s (NATS_SERVER) since %.0f s: %s",
                    self.purpose,
                    self.options.where,
                    now - began,
                    self._last_error,
                )
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _consider_refusal(self, error: Exception) -> None:
        """Ends the wait for a server that is there, and not for us."""
        if self._refused.done():
            return
        if isinstance(error, ConfigError):
            self._refused.set_result(error)
        elif isinstance(error, ssl.SSLCertVerificationError):
            self._refused.set_result(
                ConfigError(f"NATS at {self.options.where} is not to be trusted (NATS_TLS_*): {self._last_error}")
            )
        elif "Authorization Violation" in self._last_error:
            self._refused.set_result(
                ConfigError(f"NATS at {self.options.where} refuses us (NATS_AUTH_*): {self._last_error}")
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
        except Exception as error:
            if type(error).__module__ == "nkeys":
                raise ConfigError(f"NATS_AUTH_NKEY or NATS_AUTH_CREDENTIALS_FILE: {error}") from None
            raise
        broken.clear()  # Of a cluster, some may have been away.

    async def _until_broken(self, client: "Client", broken: asyncio.Event) -> str:
        """Returns why the connection is of no use any more."""
        while not self._is_ending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.ping_interval_s):
                    await broken.wait()
            if broken.is_set() or client.is_closed:
                return self._last_error
            try:
                await self._pings.until_answered(client, self.options.ping_interval_s)
            except Exception as error:
                return self._describe(error)
        return "closed by us"

    async def _abandon(self, client: "Client") -> None:
        """Closes without a last word: the library would first wait for a peer that may not read."""
        client._pending.clear()
        client._pending_data_size = 0
        writer = getattr(client._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
        except Exception as error:
            logger.debug("closing a NATS connection: %s", error)
        self._pings.end()

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.options.connect_timeout_s:g} s"
        if isinstance(error, ssl.SSLError):
            return str(error)
        if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
            return os.strerror(error.errno)
        text = str(error) or type(error).__name__
        if "no servers available" in text:  # It hides what was wrong with them.
            return self._last_error
        return text.removeprefix("nats: ").strip("'")

    # Speaking and listening ----------------------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> bool:
        """Sends soon; never blocks. False when it was dropped: nobody is connected, or too much waits."""
        if self._is_closed or (self._client is None and not self._keeps_unsent):
            self._dropped.inc()
            return False
        return self._outbox.put(Message(subject, data, reply, headers))

    async def subscribe(self, subject: str, deliver: Deliver, queue: str = "") -> Subscription:
        """Listens from now on; the server knows of it when this returns, or as soon as it is back."""
        subscription = Subscription(subject, queue, deliver)
        self._subscriptions.add(subscription)
        client = self._client
        if client is not None:
            try:
                await self._subscribe(client, subscription)
                await self._pings.once(client, self.options.connect_timeout_s)
            except Exception as error:
                logger.warning("%s: subscribing to %s: %s; it is tried again", self.purpose, subject, error)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        live, subscription.live = subscription.live, None
        if live is not None:
            try:
                await live.unsubscribe()
            except Exception as error:
                logger.debug("%s: unsubscribing from %s: %s", self.purpose, subscription.subject, error)

    async def settle(self, subscription: Subscription) -> None:
        """Returns when what the server had for us before this call is delivered, or the server does not answer."""
        client, live = self._client, subscription.live
        if client is None or live is None:
            return
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                await self._pings.once(client, self.options.connect_timeout_s)
                while live.pending_msgs:  # noqa: ASYNC110 - it is delivered tick by tick, and the library tells nobody
                    await asyncio.sleep(0)
        except Exception as error:
            logger.debug("%s: %s did not settle: %s", self.purpose, subscription.subject, error)

    async def flush(self) -> None:
        """Returns when the server has what was published before, or does not answer."""
        if self._client is None:
            return
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                await self._flush(self._client)
        except Exception as error:
            logger.debug("%s: not everything reached NATS: %s", self.purpose, error)

    async def _flush(self, client: "Client") -> None:
        await self._outbox.wait_empty()
        while client.pending_data_size:  # noqa: ASYNC110 - the library writes in its next tick, and tells nobody
            await asyncio.sleep(FLUSH_POLL_S)
        await self._pings.once(client, self.options.connect_timeout_s)

    async def _subscribe(self, client: "Client", subscription: Subscription) -> None:
        subscription.client = client
        subscription.live = await client.subscribe(subscription.subject, subscription.queue, cb=subscription.hear)


def load_client() -> "type[Client]":
    """The client library's class. Raises `ConfigError` where it is not installed."""
    try:
        from nats.aio.client import Client
    except ImportError:
        raise ConfigError(f"NATS: the client library is missing; install it: {install_command('nats')}") from None
    return Client
