"""Token counts of prompts."""

from typing import Any, cast

import pytest
from tests.scripted_engine.stack import NAME, open_stack

from dynamo.core.errors import InvalidArgument, NotFound
from dynamo.protocols.openai import ChatCompletionRequest, ChatMessage
from dynamo.serving.prompt_count import count_prompt, counted_model


@pytest.mark.parametrize("repeats", [1, 5000])
async def test_prompt_count_equals_the_tokens_sent_to_a_worker(repeats: int) -> None:
    chat = ChatCompletionRequest(model=NAME, messages=[ChatMessage("user", "hi there " * repeats)])
    async with open_stack() as stack:
        preprocessor = counted_model(stack.models, NAME, None).preprocessor
        count = await count_prompt(preprocessor, chat)
        assert count == len(preprocessor.tokenizer.encode(preprocessor.formatted_prompt(chat)))


async def test_prompt_count_of_an_unknown_model_is_not_found() -> None:
    async with open_stack() as stack:
        with pytest.raises(NotFound):
            counted_model(stack.models, "no-such-model", None)


def test_prompt_count_of_a_text_model_is_refused() -> None:
    class TextModels:
        takes_text = True

        def find(self, *_: object) -> "TextModels":
            return self

    with pytest.raises(InvalidArgument, match="served from text"):
        counted_model(cast(Any, TextModels()), "t", None)
