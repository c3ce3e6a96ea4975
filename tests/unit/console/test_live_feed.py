"""Live feed: samples only with subscribers, a bounded number of them, and no wait for slow ones."""

import asyncio

from tests.settle import turns

from dynamo.console.live_feed import POLLED_S, QUEUED_MAX, WATCHERS_MAX, LiveFeed
from dynamo.core.clock import ManualClock


class Samples:
    """Counts the samples that are taken."""

    def __init__(self) -> None:
        self.taken = 0

    async def take(self) -> bytes | None:
        self.taken += 1
        return b"%d" % self.taken


async def advance(clock: ManualClock, seconds: int) -> None:
    for _ in range(seconds):
        clock.advance(1.0)
        await turns(5)


async def test_feed_without_a_watcher_takes_no_samples() -> None:
    clock, samples = ManualClock(), Samples()
    feed = LiveFeed(samples.take, 1.0, clock)
    await advance(clock, 5)
    assert (samples.taken, feed.is_sampling) == (0, False)


async def test_every_watcher_receives_every_sample_until_it_unsubscribes() -> None:
    clock, samples = ManualClock(), Samples()
    feed = LiveFeed(samples.take, 1.0, clock)
    one, two = feed.join(), feed.join()
    assert one is not None
    assert two is not None
    await turns(5)
    await advance(clock, 1)
    feed.leave(two)
    await advance(clock, 1)
    assert [one.get_nowait() for _ in range(one.qsize())] == [b"1", b"2", b"3"]
    assert two.qsize() == 2
    feed.leave(one)
    await advance(clock, 3)
    assert (samples.taken, feed.is_sampling) == (3, False)


async def test_watcher_that_does_not_read_loses_samples() -> None:
    clock, samples = ManualClock(), Samples()
    feed = LiveFeed(samples.take, 1.0, clock)
    watcher = feed.join()
    assert watcher is not None
    await turns(5)
    await advance(clock, 3 * QUEUED_MAX)
    assert watcher.qsize() == QUEUED_MAX
    await feed.close()


async def test_watchers_are_limited() -> None:
    feed = LiveFeed(Samples().take, 1.0, ManualClock())
    watchers = [feed.join() for _ in range(WATCHERS_MAX)]
    assert None not in watchers
    assert feed.join() is None
    feed.leave(watchers[0])  # type: ignore[arg-type]
    assert feed.join() is not None
    await feed.close()


async def test_poll_extends_sampling_for_some_seconds() -> None:
    clock, samples = ManualClock(), Samples()
    feed = LiveFeed(samples.take, 1.0, clock)
    feed.poll()
    await turns(5)
    await advance(clock, int(POLLED_S) + 3)
    assert feed.is_sampling is False
    assert samples.taken == int(POLLED_S)


async def test_close_ends_the_streams() -> None:
    feed = LiveFeed(Samples().take, 1.0, ManualClock())
    watcher = feed.join()
    assert watcher is not None
    await turns(5)
    await feed.close()
    async with asyncio.timeout(1):
        assert await watcher.get() is None
