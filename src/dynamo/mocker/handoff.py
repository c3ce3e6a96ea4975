"""Handoff: transfer of a computed prompt from a prefill worker to a decode worker over a TCP session.

    decode                     prefill
    Register            ──▶
                        ◀──    Registered
                        ◀──    SourceHeld             the prompt is computed; contains the transfer parameters
                        ◀──    ReserveDestination     reserve blocks
    DestinationReserved ──▶
                        ◀──    ActivateDestination    the blocks have been transferred
    ActionAck           ──▶
                        ◀──    Complete

SGLang's workers reserve before the prompt is computed, vLLM's workers after it. Each side closes the session after the
session timeout.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dynamo.core.clock import Clock
from dynamo.core.errors import WorkerUnavailable
from dynamo.core.listening import listen_error
from dynamo.mocker.handoff_wire import (
    ACCEPTED,
    ACK,
    ACTION,
    ACTIVATE,
    APPLIED,
    COMPLETE,
    DESTINATION_FIRST,
    FACT,
    HELD,
    REFUSED,
    RESERVE,
    RESERVED,
    SOURCE_FIRST,
    HandoffIdentity,
    Registration,
    Wire,
    WireError,
    identity_of,
)
from dynamo.mocker.simulation.rules import EngineType, TransferRules
from dynamo.protocols.engine import BootstrapInfo

SESSIONS_MAX = 1 << 16  # More than the sequences of any worker; beyond it the oldest session is dropped.
RESERVE_FIRST, RESERVE_SECOND, ACTIVATE_LAST = 0, 1, 3
"""Action ids as in upstream; those in between are internal to the prefill worker."""
BROKEN = (OSError, EOFError, WireError)


def order_of(engine_type: EngineType) -> str:
    """Return the order of reservations: destination first for SGLang, source first otherwise."""
    return DESTINATION_FIRST if engine_type == "sglang" else SOURCE_FIRST


@dataclass(slots=True, eq=False)
class HandoffSession:
    """The prefill worker's state of one handoff."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    reserved: asyncio.Event = field(default_factory=asyncio.Event)
    is_met: bool = False
    """Whether the decode worker has connected."""
    prompt_tokens: int = 0
    error: str | None = None
    let_go: Callable[[], None] | None = None
    expiry: asyncio.TimerHandle | None = None

    def fail(self, why: str) -> None:
        """Record an error and wake both waiters."""
        self.error = self.error or why
        self.ready.set()
        self.reserved.set()

    def leave(self) -> None:
        """Release the blocks of the prompt and stop the timer."""
        if self.expiry is not None:
            self.expiry.cancel()
        let_go, self.let_go = self.let_go, None
        if let_go is not None:
            let_go()


class HandoffServer:
    """Prefill side of handoffs: a listening port, and one session for each request."""

    def __init__(self, timeout_s: float, engine_type: EngineType, transfer: TransferRules, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._engine_type = engine_type
        self._order = order_of(engine_type)
        self._transfer = transfer
        self._clock = clock
        self._sessions: dict[int, HandoffSession] = {}
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    @property
    def decode_is_first(self) -> bool:
        """Return whether a prompt is computed only after the decode worker has reserved blocks for it."""
        return self._order == DESTINATION_FIRST

    async def open(self, host: str, port: int) -> int:
        """Listen and return the bound port (port 0 chooses one). Raise `ConfigError` if the port is in use."""
        try:
            self._server = await asyncio.start_server(self._meet, host, port)
        except OSError as error:
            raise listen_error(f"--bootstrap-ports {port}", host, error) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def settled(self) -> None:
        """Wait until no connection is open."""
        while self._talks:
            await asyncio.wait(self._talks)

    async def close(self) -> None:
        """Close all connections and fail all sessions."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._talks):
            task.cancel()
        if self._talks:
            await asyncio.wait(self._talks)
        for session in self._sessions.values():
            session.fail("the worker is stopping")
            session.leave()
        self._sessions.clear()

    async def reserved(self, number: int) -> None:
        """Wait until the decode worker has reserved blocks. Raise `WorkerUnavailable` if the handoff failed."""
        session = self._session(number)
        await session.reserved.wait()
        if session.error is not None:
            raise WorkerUnavailable(f"handoff with the decode worker failed: {session.error}")

    def computed(self, number: int, prompt_tokens: int, let_go: Callable[[], None]) -> None:
        """Record a computed prompt; `let_go` is called after the transfer, or when the session expires."""
        session = self._session(number)
        session.prompt_tokens, session.let_go = prompt_tokens, let_go
        if session.error is not None:
            self._forget(number)
        session.ready.set()

    def lost(self, number: int) -> None:
        """Fail the handoff of a prompt that will not be computed."""
        self._session(number).fail("the prefill was cancelled")

    def _session(self, number: int) -> HandoffSession:
        session = self._sessions.get(number)
        if session is None:
            if len(self._sessions) >= SESSIONS_MAX:
                self._forget(next(iter(self._sessions)))
            session = self._sessions[number] = HandoffSession()
            loop = asyncio.get_running_loop()
            session.expiry = loop.call_later(self._timeout_s, self._forget, number)
        return session

    def _forget(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            session.fail("handoff session timed out")
            session.leave()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        wire = Wire(reader, writer)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._talk(wire)
        except (*BROKEN, asyncio.CancelledError):
            pass  # The peer disconnected, sent an invalid message or timed out; the session has its own timeout.
        finally:
            self._talks.discard(task)
            wire.close()

    async def _talk(self, wire: Wire) -> None:
        identity, who = await wire.registered()
        wanted = ("Destination", self._order, self._engine_type)
        if (who.role, who.order, who.engine_type) != wanted:
            await wire.give_up(f"expected {wanted}, not {(who.role, who.order, who.engine_type)}", REFUSED)
            return
        session = self._session(identity.bootstrap_room)
        if session.is_met:
            await wire.give_up("another peer is already connected for this request", REFUSED)
            return
        session.is_met = True
        try:
            await self._hand_over(wire, session)
        finally:
            if session.ready.is_set():
                self._forget(identity.bootstrap_room)
            else:
                session.fail("the decode worker disconnected before the prompt was computed")

    async def _hand_over(self, wire: Wire, session: HandoffSession) -> None:
        await wire.send("Registered")
        tokens = 0
        if self.decode_is_first:
            tokens = await self._reserve(wire, RESERVE_FIRST)
            session.reserved.set()
        await session.ready.wait()
        if session.error is not None:
            await wire.give_up(session.error)
            return
        await wire.send_fact(HELD, transfer_timing=self._timing(session.prompt_tokens))
        if not self.decode_is_first:
            tokens = await self._reserve(wire, RESERVE_SECOND)
        moved = min(tokens, session.prompt_tokens) if self._transfer.only_missing else session.prompt_tokens
        await self._clock.sleep(self._transfer.transfer_ms(moved) / 1000)
        await wire.act(ACTIVATE_LAST, ACTIVATE)
        session.leave()
        await wire.send(COMPLETE)

    async def _reserve(self, wire: Wire, number: int) -> int:
        """Return the number of uncached prompt tokens for which the decode worker reserved blocks."""
        await wire.act(number, RESERVE)
        fact = await wire.expect(FACT, RESERVED)
        tokens = fact[RESERVED].get("transferable_prompt_tokens") if isinstance(fact[RESERVED], dict) else None
        if not isinstance(tokens, int):
            raise WireError(f"{RESERVED} without an integer transferable_prompt_tokens")
        return tokens

    def _timing(self, prompt_tokens: int) -> dict[str, object]:
        transfer = self._transfer
        return {
            "mode": "destination_missing" if transfer.only_missing else "full_prompt",
            "full_prompt_tokens": prompt_tokens,
            "kv_bytes_per_token": transfer.bytes_per_token,
            "bandwidth_gb_s": transfer.bandwidth_gbps or None,
        }


@dataclass(slots=True)
class Handoff:
    """Decode side of one handoff."""

    info: BootstrapInfo
    request_id: str
    engine_type: EngineType
    timeout_s: float
    dp_rank: int = 0

    async def receive(self, reserve: Callable[[], Awaitable[int]], activate: Callable[[], None]) -> None:
        """Receive a prompt: `reserve` allocates blocks and returns their tokens, `activate` follows the transfer.

        Returns when both sides are done. Raise `WorkerUnavailable` if the transfer fails.
        """
        where = f"{self.info.bootstrap_host}:{self.info.bootstrap_port}"
        wire: Wire | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                wire = Wire(*await asyncio.open_connection(self.info.bootstrap_host, self.info.bootstrap_port))
                await wire.register(self.identity, self._registration)
                await self._follow(wire, reserve, activate)
        except TimeoutError:
            raise WorkerUnavailable(f"handoff session timed out: {where}") from None
        except BROKEN as error:
            raise WorkerUnavailable(f"cannot complete handoff with the prefill worker at {where}: {error}") from None
        finally:
            if wire is not None:
                wire.close()

    @property
    def identity(self) -> HandoffIdentity:
        """Return the identity of the request in messages of both sides."""
        return identity_of(self.info, self.request_id)

    @property
    def _registration(self) -> Registration:
        return Registration("Destination", self.dp_rank, order_of(self.engine_type), self.engine_type)

    async def _follow(self, wire: Wire, reserve: Callable[[], Awaitable[int]], activate: Callable[[], None]) -> None:
        """Execute the prefill worker's actions until it sends `Complete`."""
        is_reserved = is_active = False
        while True:
            try:
                message = await wire.receive()
            except BROKEN:
                if is_active:
                    return  # The transfer is complete: a late failure of the peer does not matter.
                raise
            if message.name == COMPLETE:
                if not is_active:
                    raise WireError("the handoff completed before activation")
                return
            if message.name != ACTION:
                continue
            number, action = message.body.get("id"), message.body.get("action")
            if action is not None and RESERVE in action and not is_reserved:
                is_reserved = True
                await wire.send(ACK, {"action_id": number, "outcome": ACCEPTED})
                await wire.send_fact(RESERVED, transferable_prompt_tokens=await reserve())
            elif action is not None and ACTIVATE in action and is_reserved and not is_active:
                is_active = True
                activate()
                await wire.send(ACK, {"action_id": number, "outcome": APPLIED})
            else:
                raise WireError(f"unexpected action {action}")
