"""Fitting: the chat of a response's items, without the oldest ones if `truncation` is `auto` and they are too many."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynamo.api.responses.convert import to_chat, without_oldest
from dynamo.protocols.openai import ChatCompletionRequest
from dynamo.protocols.response_items import StoredItem
from dynamo.protocols.response_requests import ResponsesPromptFields
from dynamo.serving.prompt_count import count_prompt

if TYPE_CHECKING:
    from dynamo.text.preprocessor import Preprocessor

ITEMS_HERE_MAX = 256  # More items are converted in a thread.


async def fitting_chat(
    request: ResponsesPromptFields,
    items: list[StoredItem],
    answer_tokens: int,
    preprocessor_of: "Callable[[str], Preprocessor]",
) -> ChatCompletionRequest:
    """Return the chat of the conversation's items, which leaves room for `answer_tokens`. Raise `InvalidArgument`.

    `preprocessor_of` returns the preprocessor of a model; it is called, and its errors are raised, with `truncation: auto` only.
    """
    chat = to_chat(request, items) if len(items) <= ITEMS_HERE_MAX else await asyncio.to_thread(to_chat, request, items)
    if request.truncation != "auto":
        return chat
    preprocessor = preprocessor_of(chat.model)
    input_tokens_max = preprocessor.context_length - min(answer_tokens, preprocessor.context_length // 2)
    if not preprocessor.context_length or await count_prompt(preprocessor, chat) <= input_tokens_max:
        return chat
    fewest, most = 1, len(items) - 1
    while fewest < most:
        middle = (fewest + most) // 2
        if await count_prompt(preprocessor, to_chat(request, without_oldest(items, middle))) <= input_tokens_max:
            most = middle
        else:
            fewest = middle + 1
    return to_chat(request, without_oldest(items, most))
