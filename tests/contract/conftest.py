"""Every contract is kept on both event loops, and nothing that fails inside a loop goes unnoticed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest
import uvloop
from tests.cluster.nats import NatsServer


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Our processes run on uvloop where there is one."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
async def no_callback_fails() -> AsyncIterator[None]:
    """A callback that raises is only logged by the loop; here it fails the test."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    yield
    assert failures == []


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for every contract that is kept through it."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server
