"""Lets the model call a function and answer with what it returned: python examples/04_tools.py [QUESTION] [URL]."""

import json
import sys

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> dict[str, object]:
    """Return the weather of a city."""
    return {"city": city, "condition": "sunny", "temperature": 21}


question = sys.argv[1] if len(sys.argv) > 1 else "What is the weather in Paris?"
url = sys.argv[2] if len(sys.argv) > 2 else "http://localhost:8000"

client = OpenAI(base_url=f"{url}/v1", api_key="unused")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": question}]
reply = (
    client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], temperature=0).choices[0].message
)
messages.append(reply.model_dump(exclude_none=True))
for call in reply.tool_calls or []:
    result = get_weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {json.dumps(result)}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
if reply.tool_calls:
    reply = (
        client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], temperature=0)
        .choices[0]
        .message
    )
print(reply.content)
