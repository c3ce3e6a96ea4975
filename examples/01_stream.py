"""Streams one answer with the openai SDK: python examples/01_stream.py [QUESTION] [URL]."""

import sys

from openai import OpenAI

question = sys.argv[1] if len(sys.argv) > 1 else "What is Dynamo?"
url = sys.argv[2] if len(sys.argv) > 2 else "http://localhost:8000"

client = OpenAI(base_url=f"{url}/v1", api_key="unused")
model = client.models.list().data[0].id
for chunk in client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": question}], max_tokens=128, temperature=0, stream=True
):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
