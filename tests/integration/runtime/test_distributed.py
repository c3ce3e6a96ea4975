"""The system server of a runtime."""

import pytest
from tests.unit.runtime.test_distributed import Join, echo


async def test_runtime_starts_the_system_server_when_its_port_is_set(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = join()
    assert await runtime.start_system_server() is None
    monkeypatch.setenv("DYN_SYSTEM_PORT", "0")
    monkeypatch.setenv("DYN_SYSTEM_HOST", "127.0.0.1")
    port = await runtime.start_system_server()
    assert port is not None
    assert await runtime.start_system_server() == port
    runtime.register_engine_route("sleep", echo)  # type: ignore[arg-type]
    runtime.set_health_status(True)
    assert runtime.health.is_ready()
