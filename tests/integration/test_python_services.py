"""HttpService and run_input: frontends inside a program, over a real socket."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from benchmarks.corpus import bench_model
from benchmarks.ports import free_port

from dynamo.llm import (
    EngineType,
    EntrypointArgs,
    HttpAsyncEngine,
    HttpError,
    HttpService,
    make_engine,
    run_input,
)
from dynamo.runtime import Context, DistributedRuntime

pytestmark = pytest.mark.integration

TIMEOUT_S = 30.0


async def chat(request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
    words = request["messages"][-1]["content"]
    if words == "too much":
        raise HttpError(429, "slow down")
    for word in words.split():
        delta = {"role": "assistant", "content": word + " "}
        yield {"id": context.id(), "created": 1, "model": request["model"], "choices": [{"index": 0, "delta": delta}]}


async def complete(request: dict[str, Any]) -> AsyncIterator[Any]:
    yield {"id": "c", "created": 1, "choices": [{"index": 0, "text": request["prompt"][::-1], "finish_reason": "stop"}]}


async def until(client: httpx.AsyncClient, models: list[str]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                served = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
            except httpx.TransportError:
                served = None
            if served == models:
                return
            await asyncio.sleep(0.02)


def send_request(words: str, model: str = "local") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": words}], "max_tokens": 32}


async def test_engines_of_the_same_program_serve_over_http() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    loop = asyncio.get_running_loop()
    port = free_port()
    service = HttpService(port, wait_for_first_item=True, host="127.0.0.1")
    service.add_chat_completions_model("local", "sum", HttpAsyncEngine(chat, loop))
    running = asyncio.ensure_future(service.run(runtime))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
        await until(client, ["local"])
        answer = (await client.post("/v1/chat/completions", json=send_request("one two"))).json()
        assert answer["choices"][0]["message"]["content"] == "one two "
        for stream in (False, True):
            refused = await client.post("/v1/chat/completions", json={**send_request("too much"), "stream": stream})
            assert refused.status_code == 429

        body = {"model": "later", "prompt": "abc"}
        assert (await client.post("/v1/completions", json=body)).status_code == 404
        service.add_completions_model("later", "sum", HttpAsyncEngine(complete, loop))
        await until(client, ["later", "local"])
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "cba"
        service.remove_completions_model("later")
        await until(client, ["local"])
        service.enable_endpoint("chat", False)
        await until(client, [])
    service.shutdown()
    await asyncio.wait_for(running, TIMEOUT_S)
    await runtime.shutdown()


async def test_service_ends_with_its_runtime() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    running = asyncio.ensure_future(HttpService(free_port(), host="127.0.0.1").run(runtime))
    await asyncio.sleep(0)
    await runtime.shutdown()
    await asyncio.wait_for(running, TIMEOUT_S)


async def test_run_input_serves_an_echo_worker_and_a_frontend_over_it() -> None:
    worker = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    frontend = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    port = free_port()
    echoing = await make_engine(worker, EntrypointArgs(EngineType.Echo, bench_model(), "echo"))
    dynamic = await make_engine(
        frontend, EntrypointArgs(EngineType.Dynamic, http_host="127.0.0.1", http_port=port, namespace="pub")
    )
    tasks = [
        asyncio.ensure_future(run_input(worker, "dyn://pub.echo.generate", echoing)),
        asyncio.ensure_future(run_input(frontend, "http", dynamic)),
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
        await until(client, ["echo"])
        answer = (await client.post("/v1/chat/completions", json=send_request("How are you?", "echo"))).json()
        assert "How are you?" in answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"  # The echoed prompt contains the token that ends a turn.
    await frontend.shutdown()
    await worker.shutdown()
    await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)


async def test_a_mocker_serves_as_an_engine_of_run_input_until_the_runtime_ends() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    port = free_port()
    args = EntrypointArgs(
        EngineType.Mocker,
        bench_model(),
        "mocked",
        http_host="127.0.0.1",
        http_port=port,
        mocker_engine_args={"engine": {"speedup_ratio": 0.0, "block_size": 16}},
    )
    running = asyncio.ensure_future(run_input(runtime, "http", await make_engine(runtime, args)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
        await until(client, ["mocked"])
        answer = (await client.post("/v1/chat/completions", json=send_request("one two", "mocked"))).json()
        assert answer["usage"]["completion_tokens"] == 32
    await runtime.shutdown()
    await asyncio.wait_for(running, TIMEOUT_S)


async def test_terminal_conversation_ends_with_its_input() -> None:
    code = (
        "import asyncio, sys\n"
        "from dynamo.llm import EngineType, EntrypointArgs, make_engine, run_input\n"
        "from dynamo.runtime import DistributedRuntime\n"
        "async def main():\n"
        "    runtime = DistributedRuntime(None, 'mem', 'mem', event_plane='mem')\n"
        "    args = EntrypointArgs(EngineType.Echo, sys.argv[1], 'echo')\n"
        "    await run_input(runtime, 'text', await make_engine(runtime, args))\n"
        "    await runtime.shutdown()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, bench_model(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(b"a word or two\n/exit\n"), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert b"a word or two" in output
