"""Prefill and decode mockers that connect over TCP."""

from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.settle import repeat
from tests.unit.mocker.test_engine import ReceivedOutput, running

from dynamo.protocols.engine import (
    BootstrapInfo,
    PreprocessedRequest,
    StopConditions,
)


async def test_prefill_and_decode_mockers_connect_by_bootstrap_id(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_HTTP_RPC_HOST", "127.0.0.1")
    port = free_port()
    prefill = running(model_dir, "--disaggregation-mode=prefill", f"--bootstrap-ports={port}")
    async with prefill as source, running(model_dir, "--disaggregation-mode=decode") as target:
        assert source.config.bootstrap_port == port
        received: list[ReceivedOutput] = []
        for bench, max_tokens in ((target, 3), (source, 1)):
            received.append(ReceivedOutput())
            request = PreprocessedRequest(
                model="m",
                token_ids=[1] * 20,
                stop_conditions=StopConditions(max_tokens=max_tokens),
                bootstrap_info=BootstrapInfo("127.0.0.1", port, 7),
            )
            bench.engine.submit(request, received[-1])

        async def pass_time() -> None:
            await source.pass_ms(2)
            await target.pass_ms(2)

        await repeat(pass_time, lambda: all(one.is_finished for one in received))
        assert len(received[0].tokens) == 2, "and the last one"
