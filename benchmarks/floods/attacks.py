"""Attacks of `floods` on chats and completions: requests as large, as deep or as numerous in their parts as a client can make them.

`floods.endpoints` has those on other endpoints, `floods.connections` those below HTTP requests.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from benchmarks.floods.send import Shot, request_bytes, send
from benchmarks.stacks import MODEL_NAME

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MEGA = 1 << 20
USER = '{"role":"user","content":"hello"}'
LOGPROBS = '"n":128,"stream":true,"logprobs":true,"top_logprobs":20'
WORDS = "the quick brown fox jumps over the lazy dog and runs through fields of barley "


class AnyAttack(Protocol):
    """What the benchmark repeats."""

    @property
    def name(self) -> str:
        """Name in the results."""

    @property
    def clients(self) -> int:
        """Clients that make it at the same time."""

    def prepare(self) -> Shot:
        """Return a function that makes the attack once; this may take a second."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One request: its path and the function that writes its body, which may take a second."""

    name: str
    path: str
    body: Callable[[], bytes] = bytes
    method: str = "POST"
    clients: int = 1
    """Clients that send it at the same time."""

    def prepare(self) -> Shot:
        """Return a function that sends the request once."""
        request = request_bytes(self.method, self.path, self.body())
        return lambda port: send(port, request)


def chat(members: str = "", messages: str = USER, tokens: int = 2, model: str = MODEL_NAME) -> bytes:
    """Return a chat with these messages and members, both JSON."""
    rest = f",{members}" if members else ""
    return f'{{"model":"{model}","max_tokens":{tokens},"messages":[{messages}]{rest}}}'.encode()


def completion(members: str) -> bytes:
    """Return a text completion with these members, which are JSON."""
    return f'{{"model":"{MODEL_NAME}","max_tokens":2,{members}}}'.encode()


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def schema(properties: int) -> str:
    inner = ",".join(f'"field_{number}":{{"type":"string"}}' for number in range(properties))
    return f'{{"type":"object","properties":{{{inner}}}}}'


def form(inner: str) -> str:
    return f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{inner}}}}}'


def tool(description: str = "", parameters: str = '{"type":"object"}', name: str = "look", more: str = "") -> str:
    return (
        f'{{"type":"function","function":{{"name":"{name}","description":"{description}",'
        f'"parameters":{parameters}{more}}}}}'
    )


def listed(values: Iterator[str]) -> str:
    return "[" + ",".join(values) + "]"


def ids(count: int, start: int = 300) -> str:
    return listed(str(start + number % 1000) for number in range(count))


def text(chars: int) -> str:
    return (WORDS * (chars // len(WORDS) + 1))[:chars]


def many_messages(count: int) -> str:
    pair = '{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}'
    return ",".join([pair] * (count // 2))


def large_requests() -> Iterator[Attack]:
    """Yield the attacks, the writers not yet called."""
    yield Attack("10,000 messages", CHAT, lambda: chat(messages=many_messages(10_000)))
    yield Attack("100,000 messages", CHAT, lambda: chat(messages=many_messages(100_000)))
    yield Attack("1,000,000 messages", CHAT, lambda: chat(messages=many_messages(1_000_000)))
    parts = '{"type":"text","text":"a"}'
    yield Attack(
        "16,000 parts",
        CHAT,
        lambda: chat(messages=f'{{"role":"user","content":[{",".join([parts] * 16_000)}]}}'),
    )
    yield Attack("a message of 15 MB", CHAT, lambda: chat(messages=message(text(15 * MEGA))))
    yield Attack("a message of 15 MB without spaces", CHAT, lambda: chat(messages=message("a" * (15 * MEGA))))
    yield Attack("a message of 1 MB of escapes", CHAT, lambda: chat(messages=message("\\u00e9" * (MEGA // 6))))
    yield Attack("a message of 100 MB", CHAT, lambda: chat(messages=message("a" * (100 * MEGA))))
    yield Attack("a stop string of 1 MB", CHAT, lambda: chat(f'"stop":"{"a" * MEGA}"'))
    yield Attack("32 stop strings of 4 KB", CHAT, lambda: chat(f'"stop":{stops(32, 4096)}', tokens=64))
    yield Attack("100,000 stop strings", CHAT, lambda: chat(f'"stop":{stops(100_000, 8)}'))
    yield Attack("1,000,000 token ids", COMPLETIONS, lambda: completion(f'"prompt":{ids(1_000_000)}'))
    yield Attack("2,000,000 token ids", COMPLETIONS, lambda: completion(f'"prompt":{ids(2_000_000)}'))
    yield Attack("1,000,000 ids in nvext", CHAT, lambda: chat(f'"nvext":{{"token_data":{ids(1_000_000)}}}'))
    yield Attack("128 prompts of 8,000 ids", COMPLETIONS, lambda: completion(f'"prompt":{batch(128, 8000)}'))
    yield Attack("128 choices of 60,000 ids", COMPLETIONS, lambda: completion(f'"n":128,"prompt":{ids(60_000)}'))
    yield Attack("1,000,000 choices", COMPLETIONS, lambda: completion('"n":1000000,"best_of":1000000,"prompt":"a"'))
    yield Attack("128 streamed choices", CHAT, lambda: chat('"n":128,"stream":true', tokens=64))
    yield Attack("128 streamed choices with log-probabilities", CHAT, lambda: chat(LOGPROBS, tokens=64))
    echo = '"echo":true,"n":128,"prompt":'
    yield Attack("128 echoes of 15 MB", COMPLETIONS, lambda: completion(f'{echo}"{text(15 * MEGA)}"'))
    yield Attack("128 echoes of 100,000 ids", COMPLETIONS, lambda: completion(f"{echo}{ids(100_000)}"))
    yield Attack("100,000 stop ids", CHAT, lambda: chat(f'"stop_token_ids":{ids(100_000)}'))
    yield Attack("a tool description of 1 MB", CHAT, lambda: chat(f'"tools":[{tool(text(MEGA - 1))}]'))
    yield Attack("a tool description of 100 MB", CHAT, lambda: chat(f'"tools":[{tool("a" * (100 * MEGA))}]'))
    yield Attack("100 tools of 1 MB", CHAT, lambda: chat(f'"tools":{tools(100, MEGA - 1)}'))
    yield Attack("2,048 tools", CHAT, lambda: chat(f'"tools":{tools(2048, 200)},"tool_choice":"required"'))
    yield Attack("a strict tool of 100,000 properties", CHAT, lambda: chat(f'"tools":[{_strict(100_000)}]'))
    yield Attack("a strict tool, all required", CHAT, lambda: chat(f'"tools":[{_required(4000)}]'))
    yield Attack("a strict tool of 20,000, all required", CHAT, lambda: chat(f'"tools":[{_required(20_000)}]'))
    yield Attack("a schema of 8,000 properties", CHAT, lambda: chat(form(schema(8000))))
    yield Attack("a schema of 100,000 properties", CHAT, lambda: chat(form(schema(100_000))))
    yield Attack("a schema with an enum of 20,000", CHAT, lambda: chat(form(_enum(20_000))))
    yield Attack("a schema with an enum of 1,000,000", CHAT, lambda: chat(form(_enum(1_000_000))))
    yield Attack("a schema 1,000 deep", CHAT, lambda: chat(form(nested(1000))))
    yield Attack("JSON 100,000 deep", CHAT, lambda: chat(f'"metadata":{nested(100_000)}'))
    yield Attack("1,000,000 lists", CHAT, lambda: chat(f'"metadata":{listed(iter(["[]"] * 1_000_000))}'))
    yield Attack("100,000 biases", CHAT, lambda: chat(f'"logit_bias":{biases(100_000)}'))
    yield Attack("1,000,000 biases", CHAT, lambda: chat(f'"logit_bias":{biases(1_000_000)}'))
    yield Attack("100,000 unknown fields", CHAT, lambda: chat(_unknown(100_000)))
    yield Attack("a model name of 50 MB", CHAT, lambda: chat(model="a" * (50 * MEGA)))
    yield Attack("a user name of 100 MB", CHAT, lambda: chat(f'"user":"{"a" * (100 * MEGA)}"'))
    yield Attack("template arguments of 20 MB", CHAT, lambda: chat(f'"chat_template_kwargs":{_arguments()}'))
    yield Attack("tool calls of 15 MB", CHAT, lambda: chat(messages=_calls(15 * MEGA)))
    yield Attack("a data URL of 100 MB", CHAT, lambda: chat(messages=image(100 * MEGA)))
    yield Attack("4,096 guided choices", CHAT, lambda: chat(f'"guided_choice":{stops(4096, 15)}'))
    yield Attack("a body of 250 MB", CHAT, lambda: chat(messages=message("a" * (250 * MEGA))))
    yield Attack("a body of 190 MB that is not JSON", CHAT, lambda: b"[" * (190 * MEGA))


def message(content: str) -> str:
    return f'{{"role":"user","content":"{content}"}}'


def stops(count: int, chars: int) -> str:
    return listed(json.dumps(f"{number:08d}".ljust(chars, "a")[:chars]) for number in range(count))


def batch(prompts: int, count: int) -> str:
    """Return prompts of so many token ids each."""
    return listed(iter([ids(count)] * prompts))


def tools(count: int, chars: int) -> str:
    return listed(tool(text(chars), name=f"tool_{number}") for number in range(count))


def _strict(properties: int) -> str:
    return tool(parameters=schema(properties)[:-1] + ',"additionalProperties":false}', more=',"strict":true')


def _required(properties: int) -> str:
    names = listed(f'"field_{number}"' for number in range(properties))
    inner = f'{schema(properties)[:-1]},"additionalProperties":false,"required":{names}}}'
    return tool(parameters=inner, more=',"strict":true')


def _enum(members: int) -> str:
    return f'{{"type":"string","enum":{listed(str(number) for number in range(members))}}}'


def biases(count: int) -> str:
    return "{" + ",".join(f'"{number}":1.5' for number in range(count)) + "}"


def _unknown(count: int) -> str:
    return ",".join(f'"unknown_{number}":1' for number in range(count))


def _arguments() -> str:
    return f'{{"notes":"{text(20 * MEGA)}"}}'


def _calls(chars: int) -> str:
    arguments = json.dumps(json.dumps({"text": text(chars)}))
    call = f'{{"id":"call_1","type":"function","function":{{"name":"look","arguments":{arguments}}}}}'
    return (
        f'{USER},{{"role":"assistant","tool_calls":[{call}]}},{{"role":"tool","tool_call_id":"call_1","content":"x"}}'
    )


def image(chars: int) -> str:
    url = f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{"A" * chars}"}}}}'
    return f'{{"role":"user","content":[{url},{{"type":"text","text":"what is it"}}]}}'
