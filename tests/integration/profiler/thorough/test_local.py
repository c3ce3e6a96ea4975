"""Deployments on this machine: readiness, capacity, and the end of their processes."""

import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from dynamo.core.errors import CannotConnect
from dynamo.profiler.thorough.deployment import CannotDeploy
from dynamo.profiler.thorough.local import deployed

pytestmark = pytest.mark.integration

MOCKER = (
    f"{shlex.quote(sys.executable)} -m dynamo.mocker --model-name mock --num-gpu-blocks-override 100 --block-size 64"
)


async def test_deployment_serves_the_worker_and_reports_its_cache(tmp_path: Path) -> None:
    async with deployed(MOCKER, tmp_path, 60) as found:
        assert found.model == "mock"
        assert found.kv_tokens == 6400
        assert found.sequences(100) == 50
        assert found.sequences(128) == 33
        assert msgspec.json.decode(await found.stream.get("/health"))
        address = found.stream
    with pytest.raises(CannotConnect):
        await address.get("/health")


async def test_worker_that_ends_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(CannotDeploy, match=r"worker ended with exit code 2: .*no-such-flag"):
        async with deployed(f"{MOCKER} --no-such-flag", tmp_path, 60):
            pass


async def test_absent_command_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CannotDeploy, match="cannot start no-such-command"):
        async with deployed("no-such-command", tmp_path, 60):
            pass
