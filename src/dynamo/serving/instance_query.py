"""Instance queries: the `query_instance_id:` annotation requests a request's workers and its tokens.

Nothing is sent to a worker, and the KV router does not count the request. The response has one choice without content,
no finish reason and no usage.
"""

import time
from typing import TYPE_CHECKING, Any

from dynamo.core.codec import json_encode
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.routing.prefill_plan import prefill_routing_request
from dynamo.serving.answers import StreamAnswer, UnaryAnswer
from dynamo.serving.endpoints import CHAT, Surface
from dynamo.serving.served_model import ServedModel

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision

QUERY_PREFIX = "query_instance_id:"
"""Without the colon, the annotation requests the worker id of a generated response (`extras`)."""


def is_instance_query(request: ChatCompletionRequest | CompletionRequest, model: ServedModel, surface: Surface) -> bool:
    """Return whether a request is only a query. Without a KV router there is no choice of worker to report."""
    nvext = request.nvext
    if nvext is None or not surface.has_extras or model.current.kv is None:
        return False
    return any(note.startswith(QUERY_PREFIX) for note in nvext.annotations or ())


async def answer_query(
    answer: StreamAnswer | UnaryAnswer, model: ServedModel, surface: Surface, request: PreprocessedRequest
) -> None:
    """Write the response to a query. Raise the errors of the router."""
    state = answer.state
    decision = await model.preview(request, state.request_id, state.metadata)
    prefill_sets = [one for one in model.current.prefill_sets if one.kv is not None] if model.is_decode else []
    prefill = decision
    if prefill_sets:
        prefill = await prefill_sets[0].preview(prefill_routing_request(request), state.request_id, state.metadata)
    is_stream = isinstance(answer, StreamAnswer)
    body = {
        "id": surface.response_id(state.request_id),
        **_form(surface, is_stream=is_stream),
        "created": int(time.time()),
        "model": model.name,
        "nvext": {"worker_id": _worker_ids(prefill, decision), "token_ids": request.token_ids},
    }
    answer.finish_with(lambda: answer.write_alone(json_encode(body)))


def _worker_ids(prefill: "Decision", decode: "Decision") -> dict[str, int]:
    return {
        "prefill_worker_id": prefill.worker_id,
        "prefill_dp_rank": prefill.dp_rank,
        "decode_worker_id": decode.worker_id,
        "decode_dp_rank": decode.dp_rank,
    }


def _form(surface: Surface, *, is_stream: bool) -> dict[str, Any]:
    """Return the fields of the endpoint's empty response."""
    if surface.endpoint != CHAT.endpoint:
        return {
            "choices": [{"text": "", "index": 0}],
            "system_fingerprint": None,
            "object": "text_completion",
            "usage": None,
        }
    end = {"finish_reason": None, "logprobs": None}
    if is_stream:
        return {"choices": [{"index": 0, "delta": {"role": "assistant"}, **end}], "object": "chat.completion.chunk"}
    message = {"content": None, "refusal": None, "role": "assistant"}
    return {"choices": [{"index": 0, "message": message, **end}], "object": "chat.completion"}
