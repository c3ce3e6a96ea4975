"""Prompt count: number of tokens of a chat's prompt, from the same template and tokenizer as a response."""

from functools import partial
from typing import TYPE_CHECKING

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.openai import ChatCompletionRequest
from dynamo.serving.model_lookup import ModelAccess
from dynamo.serving.models import Models
from dynamo.serving.served_model import ServedModel
from dynamo.text.tokenizer.prefix_tokens import TooManyTokens

if TYPE_CHECKING:
    from dynamo.text.chat_template.bounds import Budget
    from dynamo.text.preprocessor import Preprocessor


def counted_model(models: Models, name: str, access: ModelAccess | None) -> ServedModel:
    """Return the model that serves chats under this name and whose tokenizer the frontend has.

    Raise the errors of `Models.find`, and `InvalidArgument`.
    """
    model = models.find(name, "Chat", access)
    if model.takes_text:
        raise InvalidArgument(
            f"model `{name}` is served from text: the frontend cannot count its tokens", param="model"
        )
    return model


async def count_prompt(preprocessor: "Preprocessor", chat: ChatCompletionRequest, body_bytes: int = 0) -> int:
    """Return the number of tokens of a chat's prompt, counted in a thread if it is long. Raise `InvalidArgument`."""
    return await preprocessor.rendered(chat, body_bytes, partial(_count, preprocessor, chat))


def _count(preprocessor: "Preprocessor", chat: ChatCompletionRequest, budget: "Budget") -> int:
    try:
        return len(preprocessor.tokenizer.encode(preprocessor.formatted_prompt(chat, budget)))
    except TooManyTokens as error:
        return error.count
