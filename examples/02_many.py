"""Holds ten conversations at once and shows how they interleave: python examples/02_many.py [URL]."""

import asyncio
import sys

from openai import AsyncOpenAI

QUESTIONS = [
    "What is a worker?",
    "What is a frontend?",
    "What is 12 + 30?",
    "What is a KV block?",
    "What is prefill?",
] * 2


async def converse(client: AsyncOpenAI, model: str, number: int, order: list[int]) -> str:
    """One answer; every piece of it leaves this conversation's number in `order`."""
    text = ""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTIONS[number]}],
        max_tokens=64,
        temperature=0,
        stream=True,
    )
    async for chunk in stream:
        if chunk.choices:
            order.append(number)
            text += chunk.choices[0].delta.content or ""
    return text


async def main(url: str) -> None:
    """Asks everything at once."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused")
    model = (await client.models.list()).data[0].id
    order: list[int] = []
    answers = await asyncio.gather(*(converse(client, model, number, order) for number in range(len(QUESTIONS))))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {answer}")
    print("order of arrival:", " ".join(map(str, order[:60])), "…")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"))
