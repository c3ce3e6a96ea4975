"""Fixtures of the contract tests: both event loops, and a failure for each exception of a callback."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest
import uvloop
from tests.cluster.nats import NatsServer


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return uvloop where it is installed, as production processes use it, and asyncio's loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
async def no_callback_fails() -> AsyncIterator[None]:
    """Fail the test when a callback raises, which the loop only logs."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    yield
    assert failures == []


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Start one NATS server for all contracts that use it."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server
