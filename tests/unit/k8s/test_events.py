"""Event recorder: bounded, aggregated, and never blocking its caller."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.events import RETRY_MAX_S, EventLimits, EventRecorder, subject_of
from dynamo.k8s.kinds import EVENTS, GRAPHS, NODES, ObjectKind
from dynamo.protocols.kubernetes.common import KubeObject

GENEROUS = EventLimits(burst=1000)


def graph(name: str = "g") -> KubeObject:
    return {"metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"}}


class EventServer:
    """Events by namespace and name."""

    def __init__(self) -> None:
        self.events: dict[tuple[str | None, str], KubeObject] = {}
        self.failure: DynamoException | None = None
        self.response_lost = False
        self.requests = 0
        self.open = asyncio.Event()
        self.open.set()

    async def _pass(self) -> None:
        self.requests += 1
        await self.open.wait()
        if self.failure:
            raise self.failure

    async def create(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject:
        await self._pass()
        assert kind is EVENTS
        at = (namespace, value["metadata"]["name"])
        if at in self.events:
            raise KubeRefused(409, "AlreadyExists", "exists")
        self.events[at] = dict(value)
        if self.response_lost:
            raise KubeUnavailable("no response")
        return value

    async def patch(self, kind: ObjectKind, name: str, value: KubeObject, namespace: str | None = None) -> KubeObject:
        await self._pass()
        if (namespace, name) not in self.events:
            raise KubeRefused(404, "NotFound", "expired")
        self.events[namespace, name] |= value
        return self.events[namespace, name]

    @property
    def counted(self) -> list[tuple[str, int]]:
        return [(one["message"], one["count"]) for one in self.events.values()]


class Recorded:
    """A recorder with a manual clock."""

    def __init__(self, limits: EventLimits = GENEROUS) -> None:
        self.server = EventServer()
        self.clock = ManualClock()
        self.recorder = EventRecorder(self.server, "dynamo-operator", instance="pod-0", limits=limits, clock=self.clock)

    def record(self, message: str, name: str = "g") -> None:
        self.recorder.record(GRAPHS, graph(name), "Normal", "Created", message)

    async def advance(self, seconds: float = 0.0) -> None:
        await turns(5)
        self.clock.advance(seconds)
        await turns(10)


@asynccontextmanager
async def recorded(limits: EventLimits = GENEROUS) -> AsyncIterator[Recorded]:
    made = Recorded(limits)
    made.recorder.start()
    yield made
    made.server.open.set()
    await made.recorder.close(0.01)


async def test_event_has_the_fields_that_kubectl_shows() -> None:
    async with recorded() as made:
        made.record("service created")
        await made.advance()
        ((at, event),) = made.server.events.items()
    assert at[0] == "ns"
    assert event.pop("metadata") == {"name": at[1], "namespace": "ns"}
    assert at[1].startswith("g.")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "involvedObject": {
            "apiVersion": "nvidia.com/v1beta1",
            "kind": "DynamoGraphDeployment",
            "name": "g",
            "namespace": "ns",
            "uid": "uid-g",
        },
        "type": "Normal",
        "reason": "Created",
        "message": "service created",
        "source": {"component": "dynamo-operator"},
        "reportingComponent": "dynamo-operator",
        "reportingInstance": "pod-0",
        "firstTimestamp": "2023-11-14T22:13:20Z",
        "lastTimestamp": "2023-11-14T22:13:20Z",
        "count": 1,
    }


async def test_repeat_increments_the_count_of_the_written_event() -> None:
    async with recorded() as made:
        for _ in range(3):
            made.record("same")
            await made.advance(60.0)
        made.record("other")
        made.record("same", name="h")
        await made.advance()
        assert made.server.counted == [("same", 3), ("other", 1), ("same", 1)]
        same = next(iter(made.server.events.values()))
        assert (same["firstTimestamp"], same["lastTimestamp"]) == ("2023-11-14T22:13:20Z", "2023-11-14T22:15:20Z")


async def test_event_about_an_object_without_namespace_is_in_the_default_one() -> None:
    async with recorded() as made:
        made.recorder.record(NODES, {"metadata": {"name": "n"}}, "Warning", "NoGpu", "none")
        await made.advance()
        (((namespace, _), event),) = made.server.events.items()
    assert namespace == "default"
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": ""}


async def test_event_that_expired_is_created_again_with_its_count() -> None:
    async with recorded() as made:
        made.record("same")
        await made.advance()
        made.server.events.clear()
        made.record("same")
        await made.advance()
        assert made.server.counted == [("same", 2)]


async def test_events_of_an_outage_are_written_afterwards_as_one_each(caplog: pytest.LogCaptureFixture) -> None:
    async with recorded() as made:
        made.server.failure = KubeUnavailable("gone")
        for _ in range(20):
            made.record("a")
            made.record("b")
            await made.advance(RETRY_MAX_S)
        assert made.recorder.pending == 2
        made.server.failure = None
        await made.advance(RETRY_MAX_S)
        assert made.server.counted == [("a", 20), ("b", 20)]
    assert [one.getMessage() for one in caplog.records] == ["failed to write an event: gone"]


async def test_event_whose_response_was_lost_is_not_written_twice() -> None:
    async with recorded() as made:
        made.server.response_lost = True
        made.record("a")
        await made.advance()
        made.server.response_lost = False
        await made.advance(RETRY_MAX_S)
        made.record("a")
        await made.advance()
        assert made.server.counted == [("a", 2)]


@pytest.mark.parametrize(("code", "requests"), [(403, 1), (429, 5), (500, 5)])
async def test_refused_event_is_lost_at_once_or_after_some_attempts(code: int, requests: int) -> None:
    async with recorded() as made:
        made.server.failure = KubeRefused(code, "", "no")
        made.record("a")
        for _ in range(20):
            await made.advance(RETRY_MAX_S)
        assert (made.server.requests, made.recorder.counts.lost, made.recorder.pending) == (requests, 1, 0)
        made.server.failure = None
        made.record("b")
        await made.advance()
        assert made.server.counted == [("b", 1)]


async def test_error_of_one_event_does_not_end_the_others() -> None:
    async with recorded() as made:
        made.server.failure = InvalidArgument("not a name")
        made.record("a")
        await made.advance()
        made.server.failure = None
        made.record("b")
        await made.advance()
        assert made.server.counted == [("b", 1)]


async def test_event_rate_is_limited_per_object_and_repeats_are_still_counted() -> None:
    async with recorded(EventLimits(burst=3, refill_s=100.0)) as made:
        for _ in range(10):
            made.record("a")
            await made.advance()
        made.record("a", name="h")
        await made.advance()
        assert made.server.counted == [("a", 3), ("a", 1)]
        assert made.recorder.counts.suppressed == 7
        await made.advance(100.0)
        made.record("a")
        await made.advance()
        assert made.server.counted == [("a", 11), ("a", 1)]


async def test_repeats_during_a_request_are_written_by_the_next_one() -> None:
    async with recorded() as made:
        made.server.open.clear()
        made.record("a")
        await made.advance()
        made.record("a")
        made.record("a")
        made.server.open.set()
        await made.advance()
        assert (made.server.counted, made.server.requests) == ([("a", 3)], 2)


async def test_full_queue_loses_new_events() -> None:
    async with recorded(EventLimits(pending=2)) as made:
        made.server.failure = KubeUnavailable("gone")
        for message in "abcd":
            made.record(message)
        assert (made.recorder.pending, made.recorder.counts.lost) == (2, 2)


async def test_least_recent_event_is_forgotten_and_written_as_a_new_one() -> None:
    async with recorded(EventLimits(known=2)) as made:
        for message in "abca":
            made.record(message)
            await made.advance()
        assert made.server.counted == [("a", 1), ("b", 1), ("c", 1), ("a", 1)]


async def test_malformed_object_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorded().recorder
    recorder.record(GRAPHS, {}, "Normal", "Created", "x")
    assert "failed to record event Created" in caplog.text


async def test_long_texts_are_truncated_to_the_limits_of_the_api_server() -> None:
    async with recorded() as made:
        made.recorder.record(GRAPHS, graph("n" * 253), "Warning", "R" * 200, "m" * 2000)
        await made.advance()
        (((_, name), event),) = made.server.events.items()
    assert (len(name), len(event["reason"]), len(event["message"])) == (253, 128, 1024)
    assert event["message"].endswith("m...")


async def test_close_writes_queued_events() -> None:
    made = Recorded()
    made.recorder.start()
    made.record("a")
    await made.recorder.close()
    assert made.server.counted == [("a", 1)]


async def test_close_does_not_wait_for_an_unreachable_server(caplog: pytest.LogCaptureFixture) -> None:
    made = Recorded()
    made.recorder.start()
    made.server.failure = KubeUnavailable("gone")
    made.record("a")
    await made.recorder.close(0.001)
    assert "1 events were not written before the end" in caplog.text


def test_subject_is_named_by_the_kind_and_not_by_the_object() -> None:
    assert subject_of(GRAPHS, graph())[:4] == ("nvidia.com/v1beta1", "DynamoGraphDeployment", "ns", "g")


STEPS = st.one_of(
    st.tuples(st.just("record"), st.sampled_from("abc")),
    st.tuples(st.sampled_from(["away", "serve", "expire", "lose", "pass"]), st.just("")),
)


@given(st.lists(STEPS, max_size=30))
@example([("record", "a"), ("record", "b"), ("lose", ""), ("pass", "")])
def test_last_event_of_each_message_has_the_count_of_all_its_records(steps: list[tuple[str, str]]) -> None:
    async def run() -> None:
        counts: dict[str, int] = {}
        async with recorded() as made:
            for action, message in steps:
                match action:
                    case "record":
                        made.record(message)
                        counts[message] = counts.get(message, 0) + 1
                    case "expire":
                        made.server.events.clear()
                    case "pass":
                        await made.advance(RETRY_MAX_S)
                    case _:
                        made.server.failure = KubeUnavailable("gone") if action == "away" else None
                        made.server.response_lost = action == "lose"
            made.server.failure, made.server.response_lost = None, False
            for message in counts:
                made.record(message)
            await made.advance(RETRY_MAX_S)
            await made.advance(RETRY_MAX_S)
            assert dict(made.server.counted) == {message: count + 1 for message, count in counts.items()}
            assert (made.recorder.pending, made.recorder.counts.lost) == (0, 0)

    asyncio.run(run())
