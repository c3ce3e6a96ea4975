"""The service's methods, called without a socket."""

import asyncio
from typing import Any

import pytest
from tests.unit.grpc.kserve_stack import open_kserve_stack, output_texts, tensor_request, text_request

from dynamo.core.errors import ConfigError, DynamoException, NotFound
from dynamo.core.metrics import MetricsRegistry
from dynamo.grpc.messages import CLASSES, SERVICE
from dynamo.grpc.service import OPEN_PATHS, KserveOptions, headers_of, message_limit
from dynamo.grpc.statuses import status_of
from dynamo.http.server.access import KeyLimits
from dynamo.http.server.gate import Gate, KeyMetrics, Keys

KEY = [(b"authorization", b"Bearer secret-key")]


def gate_of(registry: MetricsRegistry) -> Gate:
    return Gate(OPEN_PATHS, KeyMetrics(registry, "x"), keys=Keys.of(["secret-key"], None))


def named(kind: str, name: str) -> Any:
    return CLASSES[kind](name=name)


async def test_server_is_live_and_ready_until_it_drains() -> None:
    async with open_kserve_stack() as stack:
        service = stack.service
        assert (await service.server_live(None, None)).live
        assert (await service.server_ready(None, None)).ready
        assert (await service.server_metadata(None, None)).name == "dynamo"
        await stack.pipeline.drain(0.0)
        assert not (await service.server_ready(None, None)).ready
        for message in (text_request("hi"), tensor_request(1)):
            with pytest.raises(DynamoException) as raised:
                await stack.infer(message)
            assert status_of(raised.value)[0] == "UNAVAILABLE"


async def test_text_and_tensor_models_are_ready_and_described() -> None:
    async with open_kserve_stack() as stack:
        service = stack.service
        for name, is_ready in (("say", True), ("echo", True), ("talk", False), ("no-such-model", False)):
            assert (await service.model_ready(named("ModelReadyRequest", name), None)).ready is is_ready
        assert (await service.model_metadata(named("ModelMetadataRequest", "say"), None)).inputs[0].name == "text_input"
        config = (await service.model_config(named("ModelConfigRequest", "echo"), None)).config
        assert (config.name, config.input[0].dims, config.backend) == ("echo", [-1], "dynamo")
        with pytest.raises(NotFound):
            await service.model_metadata(named("ModelMetadataRequest", "no-such-model"), None)


async def test_text_is_completed_in_one_response() -> None:
    async with open_kserve_stack() as stack:
        answer = await stack.infer(text_request("a b", n=2, max_tokens=9))
        assert (answer.model_name, answer.id) == ("say", "7")
        assert output_texts(answer) == {"text_output": ["ab", "ab"], "finish_reason": ["stop", "stop"]}
        [requested] = stack.engines.received_requests
        assert (requested["prompt"], requested["user"], requested["n"], requested["max_tokens"]) == ("a b", "7", 2, 9)


async def test_text_is_streamed_chunk_by_chunk() -> None:
    async with open_kserve_stack() as stack:
        answers = await stack.stream(text_request("a b", streaming=True), text_request("c"))
        shown = [output_texts(one.infer_response) for one in answers]
        assert [one["text_output"] for one in shown] == [["a"], ["b"], [""], ["c"]]
        assert [one["finish_reason"] for one in shown] == [[""], [""], ["stop"], ["stop"]]


@pytest.mark.parametrize("raw", [True, False])
async def test_tensors_are_returned_in_the_representation_of_the_request(raw: bool) -> None:
    async with open_kserve_stack() as stack:
        answer = await stack.infer(tensor_request(1, 2, raw=raw))
        assert (answer.id, answer.parameters["place"].int64_param) == ("t", 0)
        assert list(answer.raw_output_contents) == ([b"\1\0\0\0\2\0\0\0"] if raw else [])
        assert list(answer.outputs[0].contents.int_contents) == ([] if raw else [1, 2])


async def test_large_tensors_are_supported() -> None:
    values = range(300_000)
    async with open_kserve_stack() as stack:
        answer = await stack.infer(tensor_request(*values, raw=True))
        assert answer.raw_output_contents[0] == b"".join(value.to_bytes(4, "little") for value in values)


async def test_requests_of_a_stream_are_answered_in_order() -> None:
    async with open_kserve_stack() as stack:
        answers = await stack.stream(tensor_request(1, id="x", count=2), tensor_request(2, id="y"))
        assert [one.infer_response.id for one in answers] == ["x", "x", "y"]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (text_request("hi", model="no-such-model"), "NOT_FOUND"),
        (text_request("hi", model="talk"), "NOT_FOUND"),
        (text_request("hi", streaming=True), "INVALID_ARGUMENT"),
        (text_request("hi", max_tokens=-1), "INVALID_ARGUMENT"),
        (text_request("fail"), "INTERNAL"),
        (tensor_request(1, count=0), "INTERNAL"),
        (tensor_request(1, count=2), "INTERNAL"),
        (tensor_request(1, **{"count": 0, "break": 1}), "INTERNAL"),
        (tensor_request(1, fail=1), "INVALID_ARGUMENT"),
    ],
)
async def test_each_failure_has_its_status_and_no_secret(message: Any, status: str) -> None:
    async with open_kserve_stack() as stack:
        with pytest.raises(DynamoException) as raised:
            await stack.infer(message)
        name, reported = status_of(raised.value)
        assert name == status
        assert "secret" not in reported


async def test_worker_failure_is_a_stream_error_and_later_requests_succeed() -> None:
    async with open_kserve_stack() as stack:
        answers = await stack.stream(
            text_request("a fail", streaming=True), tensor_request(1, **{"break": 1}), text_request("b")
        )
        assert [bool(one.error_message) for one in answers] == [False, True, False, True, False]
        assert all("secret" not in one.error_message for one in answers)


async def test_invalid_request_ends_the_stream() -> None:
    async with open_kserve_stack() as stack:
        with pytest.raises(NotFound):
            await stack.stream(text_request("a", model="no-such-model"), text_request("b"))
        assert stack.engines.received_requests == []


@pytest.mark.parametrize("message", [text_request("hold"), tensor_request(1, hold=1)])
async def test_client_disconnect_stops_the_worker(message: Any) -> None:
    async with open_kserve_stack() as stack, asyncio.timeout(30):
        asking = asyncio.ensure_future(stack.infer(message))
        await stack.engines.held.wait()
        asking.cancel()
        await stack.engines.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_client_disconnect_from_a_stream_stops_the_worker() -> None:
    async with open_kserve_stack() as stack, asyncio.timeout(30):
        asking = asyncio.ensure_future(stack.stream(text_request("a hold", streaming=True)))
        await stack.engines.held.wait()
        asking.cancel()
        await stack.engines.left.wait()


async def test_api_keys_are_required_when_configured() -> None:
    async with open_kserve_stack(gate_of) as stack:
        for send_request in (stack.infer, stack.stream):
            for headers, reported in ((), "required"), ([(b"x-api-key", b"wrong")], "Incorrect"):
                with pytest.raises(DynamoException, match=reported) as raised:
                    await send_request(text_request("hi"), headers=headers)
                assert status_of(raised.value)[0] == "UNAUTHENTICATED"
        assert output_texts(await stack.infer(text_request("hi"), KEY))["text_output"] == ["hi"]
        assert (await stack.infer(tensor_request(1), KEY)).id == "t"


def limited_gate(registry: MetricsRegistry) -> Gate:
    keys = Keys(["secret-key"], None)
    keys.ring.replace([KeyLimits(name="limited", key="secret-key", models=("other",))])
    return Gate(OPEN_PATHS, KeyMetrics(registry, "x"), keys=keys)


async def test_kserve_refuses_models_that_the_key_may_not_use() -> None:
    async with open_kserve_stack(limited_gate) as stack:
        service = stack.service
        account = service._admit("ModelReady", KEY, streams=False).account
        assert not (await service.model_ready(named("ModelReadyRequest", "say"), account)).ready
        for send_request in (
            service.model_metadata(named("ModelMetadataRequest", "say"), account),
            service.model_config(named("ModelConfigRequest", "echo"), account),
            stack.infer(text_request("hi"), KEY),
            stack.infer(tensor_request(1), KEY),
            stack.stream(text_request("hi"), headers=KEY),
        ):
            with pytest.raises(DynamoException, match="may not use the model") as raised:
                await send_request
            assert status_of(raised.value)[0] == "PERMISSION_DENIED"


async def test_request_metrics_count_kserve_requests() -> None:
    async with open_kserve_stack() as stack:
        await stack.infer(tensor_request(1))
        await stack.infer(text_request("a"))
        text = stack.pipeline.metrics.registry.render()
        for endpoint, model in (("tensor", "echo"), ("completions", "say")):
            labels = f'endpoint="{endpoint}",error_type="",model="{model}",request_type="unary",status="success"'
            assert f"dynamo_frontend_requests_total{{{labels}}} 1" in text


def test_binary_metadata_is_dropped_from_the_headers() -> None:
    class Context:
        @staticmethod
        def invocation_metadata() -> Any:
            return (("Authorization", "Bearer x"), ("trace-bin", b"\1"))

    assert headers_of(Context()) == [(b"authorization", b"Bearer x")]
    assert all(path.startswith(f"/{SERVICE}/Server".encode()) for path in OPEN_PATHS)


@pytest.mark.parametrize(("value", "limit"), [("", 4), ("0", 0), ("64", 64)])
def test_the_limit_of_messages_is_upstreams_unless_it_is_set(
    value: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_GRPC_MESSAGE_LIMIT_MB", value)
    assert KserveOptions().message_bytes_max == limit << 20


def test_a_negative_limit_of_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRPC_MESSAGE_LIMIT_MB", "-1")
    with pytest.raises(ConfigError, match=r"^DYN_GRPC_MESSAGE_LIMIT_MB=-1: must be at least 0"):
        message_limit()
