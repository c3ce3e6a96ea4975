"""RequestFlow: a simulated request from its arrival to its end: placement, queue, transfer, refusal, completion.

    vLLM, TensorRT-LLM   prefill worker: prompt ──▶ decode worker chosen: blocks reserved ── transfer ──▶ tokens
    SGLang               decode worker chosen: blocks reserved ──▶ prefill worker: prompt ── transfer ──▶ tokens

Between reservation and transfer two workers have a request of SGLang; if one fails or refuses it, it is withdrawn from the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dynamo.core.errors import ConfigError, NotReady, Overloaded
from dynamo.mocker.simulation.sequence import SimulatedSequence
from dynamo.replay.cluster_state import ClusterState, Happening, Reservation, SourcePrompt
from dynamo.replay.coast import CompletedSteps
from dynamo.replay.fleet import Fleet
from dynamo.replay.load import Due
from dynamo.replay.outcome import Flight
from dynamo.replay.placement import DEVICE, PlacementRequest, RankId
from dynamo.replay.worker import Doing, SimulatedWorker


@dataclass(slots=True)
class RequestFlow:
    """The requests of a run."""

    _state: ClusterState
    _known: Iterator[Due] = field(init=False)

    def __post_init__(self) -> None:
        self._known = iter(self._state.load.first())

    def expect_arrival(self) -> None:
        """Schedule the next independent arrival; one at a time, so that long traces do not fill the heap."""
        due = next(self._known, None)
        if due is not None:
            self._announce(due, is_known=True)

    def _announce(self, due: Due, *, is_known: bool = False) -> None:
        at_ms, session, place = due
        self._state.arrived += 1
        self._state.open_requests += 1
        flight = Flight(f"{self._state.arrived}", session, place, session.turns[place], at_ms)
        self._state.push(at_ms + self._state.plan.overhead_ms, Happening.ARRIVAL, (flight, is_known))

    def arrive(self, flight: Flight, now_ms: float) -> None:
        """Begin a request that reaches the router. Raise `ConfigError` if it exceeds every cache."""
        limit = self._state.plan.max_model_len
        if limit is not None and flight.turn.input_tokens >= limit:
            self._reject(flight, now_ms)
            return
        if limit is not None:
            answer_tokens = min(flight.turn.output_tokens, limit - flight.turn.input_tokens)
            flight.turn = replace(flight.turn, output_tokens=answer_tokens)
        turn = flight.turn
        flight.names = self._state.namer.names(turn.hash_ids, turn.input_tokens)
        tokens = turn.input_tokens + turn.output_tokens
        for fleet in self._state.fleets.values():
            limits = fleet.plan.limits
            if -(-tokens // limits.block_tokens) > limits.num_blocks:
                raise ConfigError(f"request {turn.request_id}: {tokens} tokens exceed the KV cache of every worker")
        self._state.outcome.flights.append(flight)
        self.begin(flight, now_ms)

    def _reject(self, flight: Flight, now_ms: float) -> None:
        """End a request that is too long at its arrival; its session continues."""
        self._state.outcome.rejected.append(flight)
        self._state.open_requests -= 1
        for due in (
            *self._state.load.begun(flight.session, flight.place, now_ms),
            *self._state.load.after(flight.session, flight.place, now_ms),
        ):
            self._announce(due)

    def _refuse(self, flight: Flight, reason: str, now_ms: float) -> None:
        """End a request that the router refuses, and its session, as a client does that receives status 503 or 529."""
        flight.refusal, flight.names = reason, None
        self._computed_away(flight, now_ms)
        self.withdraw(flight, now_ms)
        self._state.outcome.rejected.append(flight)
        self._state.outcome.failures[reason] += 1
        self._state.open_requests -= 1
        for due in self._state.load.after(flight.session, len(flight.session.turns) - 1, now_ms):
            self._announce(due)

    def _computed_away(self, flight: Flight, now_ms: float) -> None:
        """Release the computed prompt of a request that is refused a decode worker."""
        if flight.key in self._state.computed:
            self.let_go(self._state.computed.pop(flight.key), now_ms)

    def time_out(self, now_ms: float) -> None:
        """Refuse the requests that waited too long in a router's queue."""
        late, next_ms = self._state.held.expire(now_ms)
        if next_ms is not None:
            self._state.push(next_ms, Happening.QUEUE_TIMEOUT, self._state.held)
        for flight in late:
            fleet = self._state.entry if flight.is_prefilling else self._state.exit
            fleet.placement.withdraw(flight.key)
            seconds = self._state.plan.queue_timeout_ms / 1000
            self._refuse(flight, f"Overloaded: no worker had capacity within {seconds:g} s", now_ms)

    def begin(self, flight: Flight, now_ms: float) -> None:
        """Send a request to its first worker: one that computes the prompt, or reserves blocks for it."""
        flight.sent_ms = now_ms
        is_split = self._state.entry is not self._state.exit and not self._bypasses_prefill(flight, now_ms)
        flight.is_reserving = is_split and self._state.reserves_first
        flight.is_prefilling = is_split and not flight.is_reserving
        self.place(flight, now_ms)

    def prefill(self, flight: Flight, now_ms: float) -> None:
        """Send a request whose decode worker has reserved blocks to a prefill worker."""
        flight.is_reserving, flight.is_prefilling, flight.sent_ms = False, True, now_ms
        self.place(flight, now_ms)

    def _bypasses_prefill(self, flight: Flight, now_ms: float) -> bool:
        """Return whether the decode worker should compute the prompt as well."""
        if self._state.plan.bypass is None or flight.names is None:
            return False
        tokens = flight.turn.input_tokens + flight.migrated_tokens
        held = (
            self._state.exit.placement.deepest(flight.names.packed, now_ms / 1000)
            * self._state.exit.plan.limits.block_tokens
        )
        is_bypassed = self._state.plan.bypass.applies(tokens, max(0, tokens - held))
        self._state.outcome.bypassed += is_bypassed
        return is_bypassed

    def place(self, flight: Flight, now_ms: float) -> None:
        """Send a request to the worker that the placement chooses, or queue or refuse it."""
        assert flight.names is not None
        turn, session = flight.turn, flight.session
        request = PlacementRequest(
            flight.key,
            turn.input_tokens + flight.migrated_tokens,
            flight.names.packed,
            session.session_id if len(session.turns) > 1 else None,
            turn.priority,
            turn.strict_priority,
            is_remote=flight.is_reserving or flight.key in self._state.computed,
        )
        fleet = self._state.entry if flight.is_prefilling else self._state.exit
        try:
            rank_id, is_anybody = fleet.place(request, now_ms)
        except Overloaded as error:
            self._refuse(flight, f"{type(error).__name__}: {error}", now_ms)
            return
        if rank_id is not None:
            self._send(fleet, flight, rank_id, now_ms)
        elif is_anybody:
            timeout_ms = self._state.held.add(flight, now_ms)
            if timeout_ms is not None:
                self._state.push(timeout_ms, Happening.QUEUE_TIMEOUT, self._state.held)
        else:
            self._state.unplaced.append(flight)

    def admit(self, fleet: Fleet, now_ms: float) -> None:
        """Send queued requests for which a worker has capacity now."""
        if self._state.held:
            for key, rank_id in fleet.placement.admit(now_ms / 1000):
                flight = self._state.held.pop(key)
                if isinstance(rank_id, NotReady):
                    self._state.unplaced.append(flight)
                elif isinstance(rank_id, Exception):
                    self._refuse(flight, f"{type(rank_id).__name__}: {rank_id}", now_ms)
                else:
                    self._send(fleet, flight, rank_id, now_ms)

    def _send(self, fleet: Fleet, flight: Flight, rank_id: RankId, now_ms: float) -> None:
        worker = fleet.rank(rank_id)
        is_first = flight.worker < 0
        is_computed = flight.key in self._state.computed
        flight.waited_ms += now_ms - flight.sent_ms
        if not (is_computed or flight.is_reserving) and flight.first_ms < 0:
            flight.placed_ms = now_ms
        flight.worker, flight.slot = rank_id[0], worker.slot
        self._state.note(worker, now_ms)
        transfer_ms = self._begin_transfer(flight, worker) if is_computed else None
        sequence, passed = worker.submit(flight, now_ms, transfer_ms)
        if flight.is_reserving:
            self._state.reservations[flight.key] = Reservation(worker, sequence)
        elif flight.is_prefilling and self._state.reserves_first:
            self._state.reservations[flight.key].prompt = SourcePrompt(worker, sequence)
        self.expect_transfers(worker, now_ms)
        self._wake(fleet, worker, passed, now_ms)
        if is_first:
            for due in self._state.load.begun(flight.session, flight.place, now_ms):
                self._announce(due)

    def _wake(self, fleet: Fleet, worker: SimulatedWorker, passed: CompletedSteps | None, now_ms: float) -> None:
        """Schedule the end of an interrupted step, or the start of a step on an idle worker."""
        if passed is not None:
            self._state.observe(fleet, worker, passed, now_ms)
            self._state.push(worker.until_ms, Happening.STEP_ENDS, (worker, worker.turn))
        elif worker.doing is Doing.IDLE:
            self._state.push(now_ms, Happening.STEP_BEGINS, worker)

    def _begin_transfer(self, flight: Flight, to: SimulatedWorker) -> float:
        """Return the duration of the KV transfer to a decode worker that reserves blocks after the prompt is computed."""
        cached_tokens, limits = 0, self._state.exit.plan.limits
        if limits.transfer.only_missing and flight.names is not None:
            cached_tokens = to.simulation.pool.match(flight.names.sequence_hashes) * limits.block_tokens
        self._state.transfers[flight.key] = self._state.computed.pop(flight.key)
        return self._transfer_ms(flight, cached_tokens)

    def _transfer_ms(self, flight: Flight, cached_tokens: int) -> float:
        """Return the duration of a KV transfer, and count it. `cached_tokens`: prompt tokens that the decode worker has."""
        rules = self._state.exit.plan.limits.transfer
        tokens = flight.turn.input_tokens + flight.migrated_tokens
        takes_ms = rules.transfer_ms(tokens - cached_tokens if rules.only_missing else tokens)
        self._state.outcome.transfers += 1
        self._state.outcome.transfer_ms += takes_ms
        flight.is_transferred = True
        return takes_ms

    def expect_transfers(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Schedule the release of prompts on their prefill workers at the end of their transfers to a worker."""
        for key, ready_ms in worker.arrivals():
            self._state.push(max(now_ms, ready_ms), Happening.LET_GO, self._state.transfers.pop(key))

    def let_go(self, prompt: SourcePrompt, now_ms: float) -> None:
        """Release a computed prompt on its prefill worker."""
        worker, sequence = prompt
        if not self._state.entry.has(worker.worker_id):  # The worker failed after the transfer had begun.
            return
        self._state.note(worker, now_ms)
        changes, passed = worker.let_go(sequence, now_ms)
        self._state.deliver(self._state.entry, worker, DEVICE, changes, now_ms)
        self._go_on(self._state.entry, worker, passed, now_ms)

    def _go_on(self, fleet: Fleet, worker: SimulatedWorker, passed: CompletedSteps | None, now_ms: float) -> None:
        """Wake a worker that released blocks, or remove it if it is draining and idle."""
        if passed is not None or not worker.is_quiet:
            self._wake(fleet, worker, passed, now_ms)
        else:
            self._state.lifecycle.dismiss(fleet, worker, now_ms)

    def receive(self, reservation: Reservation, now_ms: float) -> None:
        """Deliver a transferred prompt to the decode worker that reserved blocks for it, and release it on its prefill worker."""
        worker, sequence, prompt = reservation.worker, reservation.sequence, reservation.prompt
        assert prompt is not None, "the prompt is not computed"
        if self._state.reservations.get(sequence.owner.key) is reservation:  # Otherwise the decode worker failed.
            del self._state.reservations[sequence.owner.key]
            self._state.note(worker, now_ms)
            self._wake(self._state.exit, worker, worker.receive(sequence, now_ms), now_ms)
        self.let_go(prompt, now_ms)

    def withdraw(self, flight: Flight, now_ms: float) -> None:
        """Remove a request that is refused, or whose worker failed, from the other worker that has it (SGLang)."""
        reservation = self._state.reservations.pop(flight.key, None)
        if reservation is None:
            return
        self._cancel(self._state.exit, reservation.worker, reservation.sequence, now_ms)
        if not flight.is_prefilling:  # Reserving, or being transferred: `receive` releases the prompt.
            return
        if reservation.prompt is not None:
            self._cancel(self._state.entry, *reservation.prompt, now_ms)
        elif flight.key in self._state.held:
            self._state.held.pop(flight.key)
            self._state.entry.placement.withdraw(flight.key)
        elif flight in self._state.unplaced:
            self._state.unplaced.remove(flight)

    def _cancel(
        self, fleet: Fleet, worker: SimulatedWorker, sequence: SimulatedSequence[Flight], now_ms: float
    ) -> None:
        """Remove a request from a worker that has not failed."""
        if not fleet.has(worker.worker_id):
            return
        if fleet.is_serving(worker.worker_id):
            fleet.placement.finish(sequence.owner.key, None, now_ms / 1000)
        self._state.note(worker, now_ms)
        self._go_on(fleet, worker, worker.cancel(sequence, now_ms), now_ms)

    def hand_over(self, worker: SimulatedWorker, sequence: SimulatedSequence[Flight], now_ms: float) -> None:
        """Transfer a computed prompt to the decode worker that reserved blocks for it, or choose its decode worker."""
        flight = sequence.owner
        if self._state.entry.is_serving(worker.worker_id):
            self._state.entry.placement.finish(flight.key, 1, now_ms / 1000)
        flight.is_prefilling, flight.sent_ms = False, now_ms
        flight.prefill_slot, flight.cached_tokens = worker.slot, sequence.cached_tokens
        reservation = self._state.reservations.get(flight.key)
        if reservation is None:
            self._state.computed[flight.key] = SourcePrompt(worker, sequence)
            self.place(flight, now_ms)
            return
        flight.worker, flight.slot = reservation.worker.worker_id, reservation.worker.slot
        takes_ms = self._transfer_ms(flight, reservation.sequence.cached_tokens)
        self._state.push(now_ms + takes_ms, Happening.LET_GO, reservation)

    def finish(self, fleet: Fleet, flight: Flight, now_ms: float) -> None:
        """End an answered request, and announce the requests that follow it."""
        flight.finished_ms = now_ms
        flight.names = None
        self._state.open_requests -= 1
        if fleet.is_serving(flight.worker):
            fleet.placement.finish(flight.key, flight.turn.output_tokens, now_ms / 1000)
        if self._state.planner is not None:
            self._state.planner.ended(flight, now_ms)
        if self._state.sampler is not None:
            self._state.sampler.ended(flight)
        for due in self._state.load.after(flight.session, flight.place, now_ms):
            self._announce(due)
