"""Mutants: bugs introduced into production code, each of which the simulation must detect."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import msgspec

from dynamo.backend.admission import Admission, AdmittedRequest
from dynamo.runtime.client import Client
from dynamo.runtime.discovery.base import Watch
from dynamo.runtime.event_plane.memory import MemorySubscriber
from dynamo.runtime.push_router import PushRouter
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.tcp.batched_caller import BatchedLink
from dynamo.runtime.request_plane.tcp.liveness_probe import KeepAlive
from dynamo.runtime.request_plane.tcp.upstream_caller import ResponseConnection
from dynamo.serving import migration, prefill_router
from dynamo.serving.answers import BaseAnswer, StreamAnswer
from dynamo.serving.generation import Generation
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.served_model import ServedModel

Mutant = Callable[[], AbstractContextManager[Any]]


def ignore(*_: object) -> None:
    """Do nothing."""


@contextmanager
def ignores_used_token_budget() -> Iterator[None]:
    def resumed(request: Any, observed: list[int]) -> Any:
        again = real(request, observed)
        if again is None:
            return None
        stop = msgspec.structs.replace(again.stop_conditions, max_tokens=request.stop_conditions.max_tokens)
        return msgspec.structs.replace(again, stop_conditions=stop)

    real = migration.resumed
    with mock.patch.object(migration, "resumed", resumed):
        yield


@contextmanager
def ignores_generated_min_tokens() -> Iterator[None]:
    def resumed(request: Any, observed: list[int]) -> Any:
        again = real(request, observed)
        if again is None:
            return None
        stop = msgspec.structs.replace(again.stop_conditions, min_tokens=request.stop_conditions.min_tokens)
        return msgspec.structs.replace(again, stop_conditions=stop)

    real = migration.resumed
    with mock.patch.object(migration, "resumed", resumed):
        yield


@contextmanager
def loses_last_token_before_failure() -> Iterator[None]:
    def revive(self: Generation) -> None:
        if self.received_ids:
            self.received_ids.pop()
        real(self)

    real = Generation.revive
    with mock.patch.object(Generation, "revive", revive):
        yield


@contextmanager
def sends_to_excluded_workers() -> Iterator[None]:
    def pick(self: PushRouter, now: float, exclude: Any = (), mode: Any = None) -> int | None:
        return real(self, now, (), mode)

    real = PushRouter.pick
    with mock.patch.object(PushRouter, "pick", pick):
        yield


@contextmanager
def drops_errors() -> Iterator[None]:
    with mock.patch.object(Generation, "on_error", ignore):
        yield


@contextmanager
def never_releases_requests() -> Iterator[None]:
    with mock.patch.object(PushRouter, "end", ignore):
        yield


@contextmanager
def ends_response_twice() -> Iterator[None]:
    def complete(self: StreamAnswer) -> None:
        real(self)
        self.exchange.end()

    real = StreamAnswer.complete
    with mock.patch.object(StreamAnswer, "complete", complete):
        yield


@contextmanager
def keeps_engine_running_after_client_disconnect() -> Iterator[None]:
    with mock.patch.object(BaseAnswer, "_cancel_generations", ignore):
        yield


@contextmanager
def does_not_cancel_in_engine() -> Iterator[None]:
    def cancel(self: Admission, ticket: AdmittedRequest) -> None:
        if ticket.is_open:
            ticket.inner.finish()
            self.leave(ticket)

    with mock.patch.object(Admission, "cancel", cancel):
        yield


@contextmanager
def keeps_removed_workers() -> Iterator[None]:
    def apply(self: Client, key: str, value: bytes | None) -> None:
        if value is not None:
            real(self, key, value)

    real = Client._apply
    with mock.patch.object(Client, "_apply", apply):
        yield


@contextmanager
def keeps_slot_of_cancelled_request() -> Iterator[None]:
    def leave(self: Admission, ticket: AdmittedRequest) -> None:
        if not ticket.is_cancelled:
            real(self, ticket)

    real = Admission.leave
    with mock.patch.object(Admission, "leave", leave):
        yield


@contextmanager
def misses_updates_during_snapshot() -> Iterator[None]:
    def notify(self: Watch, key: str) -> None:
        if not self._changed:
            real(self, key)

    real = Watch.notify
    with mock.patch.object(Watch, "notify", notify):
        yield


@contextmanager
def loads_card_of_model_without_workers() -> Iterator[None]:
    """A bug that the simulation found."""

    def card(self: ServedModel) -> Any:
        return next(record.card_json for record, checksum in self.records.values() if checksum == self.checksum)

    with mock.patch.object(ServedModel, "card", property(card)):
        yield


@contextmanager
def times_out_complete_responses() -> Iterator[None]:
    """A bug that the simulation found."""

    def spoke_s(self: BaseAnswer, now_s: float) -> float:
        return self.state.last_s or self.state.started_s

    with mock.patch.object(BaseAnswer, "spoke_s", spoke_s):
        yield


@contextmanager
def swaps_tokens_of_one_frame() -> Iterator[None]:
    def apply_tokens(self: BatchedLink, payload: bytes) -> None:
        numbers = frame.read_u32s(payload)
        half = len(numbers) // 2
        for stream, token in list(zip(numbers[:half], numbers[half:], strict=True))[::-1]:
            on_token = self._on_token.get(stream)
            if on_token is not None:
                on_token(token)

    with mock.patch.object(BatchedLink, "_apply_tokens", apply_tokens):
        yield


@contextmanager
def leaves_calls_open_after_broken_connection() -> Iterator[None]:
    def connection_lost(self: BatchedLink, error: Exception | None) -> None:
        self._transport = None
        self._on_close(self)

    with mock.patch.object(BatchedLink, "connection_lost", connection_lost):
        yield


@contextmanager
def completes_broken_streams() -> Iterator[None]:
    def connection_lost(self: ResponseConnection, error: Exception | None) -> None:
        if self._call is not None:
            self._call.end(None)
        real(self, error)

    real = ResponseConnection.connection_lost
    with mock.patch.object(ResponseConnection, "connection_lost", connection_lost):
        yield


@contextmanager
def times_out_slow_workers() -> Iterator[None]:
    def is_silent(self: KeepAlive, received: int) -> bool:
        return self._quiet >= 1

    with mock.patch.object(KeepAlive, "is_silent", is_silent):
        yield


@contextmanager
def never_unsubscribes() -> Iterator[None]:
    async def close(_: MemorySubscriber) -> None: ...

    with mock.patch.object(MemorySubscriber, "close", close):
        yield


def never_releases_prefills() -> AbstractContextManager[Any]:
    return mock.patch.object(PrefillPhase, "release", ignore)


def never_stops_prefills() -> AbstractContextManager[Any]:
    return mock.patch.object(PrefillPhase, "_stop", ignore)


@contextmanager
def transfers_result_of_another_prompt() -> Iterator[None]:
    def phase(request: Any, *more: Any) -> Any:
        return real(msgspec.structs.replace(request, token_ids=request.token_ids[:4]), *more)

    real = prefill_router.prefill_request
    with mock.patch.object(prefill_router, "prefill_request", phase):
        yield


MUTANTS: Mapping[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        ignores_used_token_budget,
        ignores_generated_min_tokens,
        loses_last_token_before_failure,
        sends_to_excluded_workers,
        drops_errors,
        never_releases_requests,
        ends_response_twice,
        keeps_engine_running_after_client_disconnect,
        does_not_cancel_in_engine,
        keeps_removed_workers,
        keeps_slot_of_cancelled_request,
        misses_updates_during_snapshot,
        loads_card_of_model_without_workers,
        times_out_complete_responses,
        swaps_tokens_of_one_frame,
        leaves_calls_open_after_broken_connection,
        completes_broken_streams,
        times_out_slow_workers,
        never_unsubscribes,
        never_releases_prefills,
        never_stops_prefills,
        transfers_result_of_another_prompt,
    )
}
