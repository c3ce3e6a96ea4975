"""A process waits for a signal to stop."""

import asyncio
import os
import signal

from tests.settle import until

from dynamo.runtime import run_service


async def test_first_signal_sets_the_event_and_the_second_ends_the_process() -> None:
    ended: list[int] = []
    exit_now, os._exit = os._exit, ended.append  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    try:
        reported = run_service.stop_event()
        assert not reported.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await reported.wait()
        assert ended == []
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: ended)
        assert ended == [run_service.EXIT_AT_ONCE]
    finally:
        os._exit = exit_now
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
