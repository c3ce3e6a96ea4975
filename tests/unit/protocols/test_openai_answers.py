"""Responses are written field by field as upstream writes them."""

import msgspec

from dynamo.protocols import openai_answers as answers
from dynamo.protocols.engine import CompletionUsage


def test_chat_completion_encoding_equals_that_of_upstream() -> None:
    usage = CompletionUsage(prompt_tokens=10, completion_tokens=2, total_tokens=12)
    choice = answers.ChatChoice(index=0, message=answers.ResponseMessage(content="hi"), finish_reason="length")
    answer = answers.ChatCompletion(id="chatcmpl-1", choices=[choice], created=5, model="m", usage=usage)
    assert msgspec.json.encode(answer).decode() == (
        '{"id":"chatcmpl-1","choices":[{"index":0,"message":{"content":"hi","refusal":null,"role":"assistant"},'
        '"finish_reason":"length","logprobs":null}],"created":5,"model":"m","object":"chat.completion",'
        '"usage":{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12}}'
    )


def test_chat_chunk_encoding_equals_that_of_upstream() -> None:
    choice = answers.ChunkChoice(index=0, delta=answers.ChoiceDelta(content="hi", role="assistant"))
    chunk = answers.ChatCompletionChunk(id="chatcmpl-1", choices=[choice], created=5, model="m")
    assert msgspec.json.encode(chunk).decode() == (
        '{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"hi","role":"assistant"},"finish_reason":null,'
        '"logprobs":null}],"created":5,"model":"m","object":"chat.completion.chunk"}'
    )


def test_text_completion_encoding_equals_that_of_upstream() -> None:
    choice = answers.TextChoice(text="hi", index=0, finish_reason="stop")
    answer = answers.TextCompletion(id="cmpl-1", choices=[choice], created=5, model="m")
    assert msgspec.json.encode(answer).decode() == (
        '{"id":"cmpl-1","choices":[{"text":"hi","index":0,"finish_reason":"stop","logprobs":null}],"created":5,'
        '"model":"m","system_fingerprint":null,"object":"text_completion","usage":null}'
    )


def test_model_list_encoding_equals_that_of_upstream() -> None:
    models = answers.ModelList(data=[answers.ModelObject(id="m", created=5, context_window=9)])
    assert msgspec.json.decode(msgspec.json.encode(models)) == {
        "object": "list",
        "data": [{"id": "m", "object": "model", "created": 5, "owned_by": "nvidia", "context_window": 9}],
    }
