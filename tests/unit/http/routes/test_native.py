"""The routes of the engines' own APIs, with workers in the same process."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.relays import Handler, RelayCluster, open_relays

from dynamo.http.routes.native import add
from dynamo.model_card.types import ModelType

VLLM, SGLANG = "/inference/v1/generate", "/generate"
BOTH = {"vllm_inference_v1_generate": "true", "sglang_generate": "true"}


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", "1")
    monkeypatch.setenv("DYN_SGLANG_ENABLE_GENERATE", "1")


def says(*items: Any) -> Handler:
    async def handler(request: Any) -> AsyncIterator[Any]:
        for one in items:
            if isinstance(one, Exception):
                raise one
            yield one

    return handler


async def serve(relays: RelayCluster, model_dir: Path, *items: Any) -> None:
    await relays.serve("m", ModelType.Chat, says(*items), directory=str(model_dir), data=BOTH)


TOKENS = (
    {"token_ids": [5], "index": 0},
    {"token_ids": [6, 7], "index": 0, "finish_reason": "eos", "engine_data": {"kv_transfer_params": {"a": 1}}},
)


async def test_vllm_generate_returns_tokens_in_the_vllm_format(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *TOKENS)
        params = {"max_tokens": 4, "temperature": 0.5, "stop": "x", "ignore_eos": True}
        body = {"token_ids": [1, 2], "sampling_params": params, "request_id": "r", "priority": 3, "surprise": 1}
        answer = await relays.send_request(VLLM, body)
        choice = {"index": 0, "token_ids": [5, 6, 7], "logprobs": None, "finish_reason": "stop"}
        assert answer.json == {
            "request_id": "r",
            "choices": [{**choice, "routed_experts": None, "sampling_mask": None}],
            "prompt_logprobs": None,
            "kv_transfer_params": {"a": 1},
        }
        (requested,) = relays.received_requests
        carried = requested["extra_args"]["vllm_tito"]
        assert (carried["sampling_params"], carried["surprise"], carried["request_id"]) == (params, 1, "r")
        assert (requested["model"], requested["token_ids"], requested["routing"]["priority"]) == ("m", [1, 2], -3)
        assert (requested["stop_conditions"]["stop"], requested["sampling_options"]["temperature"]) == (["x"], 0.5)
        assert 'endpoint="generate",error_type="",model="m"' in relays.registry.render()


async def test_vllm_generate_returns_logprobs_and_several_choices(model_dir: Path) -> None:
    top = [[{"rank": 1, "token_id": 9, "logprob": -0.25}]]
    expected_message = (
        {"token_ids": [5], "index": 1, "log_probs": [-0.5], "top_logprobs": top, "finish_reason": "length"},
        {"token_ids": [6], "index": 0, "finish_reason": "stop"},
    )
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *expected_message)
        answer = await relays.send_request(
            VLLM, {"model": "m", "token_ids": [1], "sampling_params": {"n": 2, "logprobs": 1}}
        )
        first, second = answer.json["choices"]
        assert (first["token_ids"], first["logprobs"], second["finish_reason"]) == ([6], None, "length")
        (entry,) = second["logprobs"]["content"]
        assert (entry["token"], bytes(entry["bytes"])) == ("token_id:5", b"token_id:5")
        assert [one["token"] for one in entry["top_logprobs"]] == ["token_id:9"]
        assert answer.json["request_id"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"stream_options": {"include_usage": True}}, 400, "stream_options is only allowed when stream is true"),
        ({"token_ids": []}, 400, "token_ids must contain at least one token ID."),
        ({"token_ids": [-1]}, 400, "token_ids: expected token ids"),
        ({"sampling_params": {"max_tokens": 0}}, 400, "sampling_params.max_tokens must be greater than 0."),
        ({"sampling_params": None}, 400, "sampling_params"),
        ({"model": "no-such-model"}, 404, "Model not found: no-such-model"),
    ],
)
async def test_invalid_vllm_field_is_refused(
    model_dir: Path, fields: dict[str, Any], status: int, message: str
) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *TOKENS)
        answer = await relays.send_request(VLLM, {"token_ids": [1], "sampling_params": {}, **fields})
        assert answer.status == status
        assert message in answer.json["error"]["message"]
        assert answer.json["code"] == answer.json["error"]["code"] == status


async def test_vllm_generate_streams_new_tokens_and_the_usage(model_dir: Path) -> None:
    expected_message = (
        {"token_ids": [5], "index": 0, "log_probs": [-0.5]},
        {"token_ids": [6, 7], "index": 0, "finish_reason": "eos"},
    )
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *expected_message)
        body = {"token_ids": [1, 2], "sampling_params": {"logprobs": 0}, "request_id": "r", "stream": True}
        answer = await relays.send_request(VLLM, {**body, "stream_options": {"include_usage": True}})
        first, second, last = answer.events
        (choice,) = first["choices"]
        assert (first["request_id"], choice["index"], choice["token_ids"]) == ("r", 0, [5])
        assert choice["logprobs"]["content"][0]["logprob"] == -0.5
        assert second["choices"] == [{"index": 0, "token_ids": [6, 7], "finish_reason": "stop"}]
        assert last == {
            "request_id": "r",
            "choices": [],
            "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
        }
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert relays.received_requests[0]["extra_args"]["vllm_tito"]["stream"] is False, (
            "workers send pieces in any case"
        )


async def test_vllm_generate_stream_reports_running_usage_and_a_failure(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, {"token_ids": [5], "index": 0}, RuntimeError("secret"))
        options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        answer = await relays.send_request(VLLM, {"token_ids": [1], "sampling_params": {}, **options})
        first, last = answer.events
        assert first["usage"]["completion_tokens"] == 1
        assert last["error"]["code"] == 500
        assert "secret" not in answer.body.decode()


async def test_vllm_generate_stream_without_a_finish_reason_is_an_error(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, {"token_ids": [5], "index": 0})
        answer = await relays.send_request(VLLM, {"token_ids": [1], "sampling_params": {}, "stream": True})
        assert answer.events[-1]["error"]["code"] == 500


async def test_vllm_generate_passes_biases_and_constraints_in_the_common_fields(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *TOKENS)
        params = {"logit_bias": {"7": 2.0}, "allowed_token_ids": [5, 6], "structured_outputs": {"regex": "a+"}}
        await relays.send_request(VLLM, {"token_ids": [1], "sampling_params": params})
        (requested,) = relays.received_requests
        assert requested["extra_args"]["sampling_options"] == {"logit_bias": {"7": 2.0}, "allowed_token_ids": [5, 6]}
        assert requested["sampling_options"]["guided_decoding"] == {"regex": "a+"}


@pytest.mark.parametrize(
    ("expected_message", "status"),
    [
        ((), 500),
        (({"token_ids": [1], "index": 0},), 500),
        (({"token_ids": [1], "index": 0, "finish_reason": "error: secret"},), 500),
        ((ValueError("secret"),), 400),
    ],
)
async def test_vllm_generate_invalid_worker_response_is_an_error(
    model_dir: Path, expected_message: tuple[Any, ...], status: int
) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *expected_message)
        answer = await relays.send_request(VLLM, {"token_ids": [1], "sampling_params": {}})
        assert answer.status == status
        assert "secret" not in answer.body.decode()


async def test_generate_routes_return_404_without_a_capable_model(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await relays.serve("m", ModelType.Chat, says(*TOKENS), directory=str(model_dir))
        vllm = await relays.send_request(VLLM, {"token_ids": [1], "sampling_params": {}})
        sglang = await relays.send_request(SGLANG, {"input_ids": [1], "stream": True})
        assert (vllm.status, sglang.status) == (404, 404)
        assert vllm.json["error"]["message"] == "no generate-capable model is registered"


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_sglang_frames_of_the_engine_are_forwarded_unchanged(model_dir: Path, method: str) -> None:
    frames = [{"output_ids": [n], "meta_info": {"id": "x", "finish_reason": None}} for n in (5, 6)]
    expected_message = [{"token_ids": [5], "index": 0, "engine_data": {"sglang_response": frame}} for frame in frames]
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *expected_message)
        answer = await relays.send_request(SGLANG, {"input_ids": [1, 2], "stream": True, "foo": 1}, method=method)
        assert answer.events == frames
        carried = relays.received_requests[0]["extra_args"]["sglang_tito"]
        assert (carried["foo"], carried["sampling_params"], carried["stream"]) == (1, None, True)


async def test_sglang_frames_are_created_for_an_engine_without_frames(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *TOKENS)
        body = {"input_ids": [1, 2], "stream": True, "rid": "r", "sampling_params": {"max_new_tokens": 4}}
        answer = await relays.send_request(SGLANG, body)
        meta = {"id": "r", "prompt_tokens": 2}
        assert answer.events == [
            {"output_ids": [5], "meta_info": {**meta, "finish_reason": None, "completion_tokens": 1}},
            {"output_ids": [6, 7], "meta_info": {**meta, "finish_reason": {"type": "stop"}, "completion_tokens": 3}},
        ]
        assert relays.received_requests[0]["stop_conditions"]["max_tokens"] == 4


def frame(ids: list[int], total: int, **more: Any) -> dict[str, Any]:
    meta = {"id": "x", "finish_reason": more.pop("finish", None), "completion_tokens": total, **more.pop("meta", {})}
    return {"output_ids": ids, "meta_info": meta, **more}


STOP = {"type": "stop", "matched": 2}


@pytest.mark.parametrize(
    "frames",
    [
        [frame([5], 1, text="a"), frame([6, 7], 3, text="bc", finish=STOP)],
        [frame([5], 1, text="a"), frame([5, 6, 7], 3, text="abc", finish=STOP)],
    ],
    ids=["only new tokens", "all tokens so far"],
)
async def test_sglang_generate_without_stream_joins_the_engines_frames(
    model_dir: Path, frames: list[dict[str, Any]]
) -> None:
    expected_message = [{"token_ids": [5], "index": 0, "engine_data": {"sglang_response": one}} for one in frames]
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *expected_message)
        answer = await relays.send_request(SGLANG, {"input_ids": [1, 2]})
        assert answer.json == frame([5, 6, 7], 3, text="abc", finish=STOP)
        assert relays.received_requests[0]["extra_args"]["sglang_tito"]["stream"] is True, (
            "the frontend joins the pieces"
        )


async def test_sglang_generate_without_stream_joins_log_probabilities(model_dir: Path) -> None:
    first = frame([5], 1, meta={"output_token_logprobs": [[-1.0, 5, None]], "input_token_logprobs": [[-2.0, 1, None]]})
    second = frame([6], 2, finish=STOP, meta={"output_token_logprobs": [[-0.5, 6, None]]})
    expected_message = [
        {"token_ids": [5], "index": 0, "engine_data": {"sglang_response": one}} for one in (first, second)
    ]
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *expected_message)
        meta = (await relays.send_request(SGLANG, {"input_ids": [1], "return_logprob": True})).json["meta_info"]
        assert meta["output_token_logprobs"] == [[-1.0, 5, None], [-0.5, 6, None]]
        assert meta["input_token_logprobs"] == [[-2.0, 1, None]]


async def test_sglang_generate_without_stream_writes_the_form_for_other_engines(model_dir: Path) -> None:
    expected_message = ({"token_ids": [8], "index": 1, "finish_reason": "length"}, *TOKENS)
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *expected_message)
        answer = await relays.send_request(SGLANG, {"input_ids": [1, 2], "rid": "r", "sampling_params": {"n": 2}})
        first, second = answer.json
        assert first["output_ids"] == [5, 6, 7]
        assert first["meta_info"] == {
            "id": "r",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 2,
            "completion_tokens": 3,
        }
        assert (second["output_ids"], second["meta_info"]["finish_reason"]) == ([8], {"type": "length"})


@pytest.mark.parametrize(
    "expected_message", [[frame([5], 1)], [{"output_ids": 3, "meta_info": {}}], [{"meta_info": {}}]]
)
async def test_sglang_generate_without_stream_refuses_frames_that_do_not_end(
    model_dir: Path, expected_message: list[dict[str, Any]]
) -> None:
    items = [{"token_ids": [5], "index": 0, "engine_data": {"sglang_response": one}} for one in expected_message]
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *items)
        assert (await relays.send_request(SGLANG, {"input_ids": [1]})).status == 500


async def test_sglang_stream_failure_has_the_sglang_error_format(model_dir: Path) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, TOKENS[0], RuntimeError("secret"))
        answer = await relays.send_request(SGLANG, {"input_ids": [1], "stream": True})
        assert answer.events[-1] == {"error": {"message": "Internal server error"}}


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"input_ids": None, "text": "hi"}, 400, "input_ids"),
        ({"input_ids": [[1], [2]]}, 400, "input_ids[0]"),
        ({"input_ids": []}, 400, "input_ids must contain at least one token ID."),
    ],
)
async def test_invalid_sglang_field_is_refused(
    model_dir: Path, fields: dict[str, Any], status: int, message: str
) -> None:
    async with open_relays(add) as relays:
        await serve(relays, model_dir, *TOKENS)
        answer = await relays.send_request(SGLANG, {"input_ids": [1], "stream": True, **fields})
        assert (answer.status, answer.json["object"], answer.json["code"]) == (status, "error", status)
        assert message in answer.json["message"]


async def test_variables_enable_and_move_the_generate_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_SGLANG_ENABLE_GENERATE")
    monkeypatch.setenv("DYN_HTTP_SVC_VLLM_GENERATE_PATH", "/elsewhere")
    async with open_relays(add) as relays:
        assert [json.dumps([one.method, one.path]) for one in relays.table.entries] == ['["POST", "/elsewhere"]']
