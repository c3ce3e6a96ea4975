"""Preparation of a decoded request: engine requests with their prompt tokens, image hashes and agent session."""

from collections.abc import Sequence

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.serving.request_headers import Headers, agent_context, cache_key_context, trigger_of
from dynamo.serving.served_model import ServedModel


async def prepared_of(
    model: ServedModel, request: ChatCompletionRequest | CompletionRequest, headers: Headers, body_bytes: int
) -> Sequence[PreprocessedRequest]:
    """Return the engine requests, one for each prompt. Raise `InvalidArgument`.

    `headers` are those of the request, `body_bytes` the size of its body: long ones are prepared in a thread.
    """
    prepared: Sequence[PreprocessedRequest]
    if isinstance(request, ChatCompletionRequest):
        prepared = [await model.preprocessor.chat_async(request, body_bytes)]
        await _name_images(model, prepared[0])
    else:
        prepared = await model.preprocessor.completion_async(request, body_bytes)
    chosen_worker(request, model)  # Refuse an unknown worker before anything is sent.
    trigger = trigger_of(request)
    context = agent_context(headers, trigger) or cache_key_context(request.prompt_cache_key, trigger)
    if context is not None:
        for one in prepared:
            one.agent_context = context
            one.image_cache_scope = context["session_id"]
    return prepared


def chosen_worker(request: ChatCompletionRequest | CompletionRequest, model: ServedModel) -> int | None:
    """Return the worker that the request names, None for any. Raise `InvalidArgument` for an unknown worker."""
    chosen = request.nvext.backend_instance_id if request.nvext is not None else None
    if chosen is not None and chosen not in model.client.instance_ids():
        raise InvalidArgument(
            f"backend_instance_id {chosen} is not a worker of model `{model.name}`", param="nvext.backend_instance_id"
        )
    return chosen


async def _name_images(model: ServedModel, prepared: PreprocessedRequest) -> None:
    """Hash images for the KV router, if the number of tokens per image is known."""
    if model.kv is not None and prepared.multi_modal_data is not msgspec.UNSET:
        images = model.preprocessor.images
        if images is not None:
            await images.add(prepared, model.kv.config.block_size)
