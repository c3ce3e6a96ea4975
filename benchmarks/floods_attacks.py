"""Attacks of `floods`: single requests that are as large, as deep or as numerous in their parts as a client can make them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.stacks import MODEL_NAME

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MEGA = 1 << 20
USER = '{"role":"user","content":"hello"}'
WORDS = "the quick brown fox jumps over the lazy dog and runs through fields of barley "


@dataclass(frozen=True, slots=True)
class Attack:
    """One request: its path and the function that writes its body, which may take a second."""

    name: str
    path: str
    body: Callable[[], bytes]


def chat(members: str = "", messages: str = USER, tokens: int = 2, model: str = MODEL_NAME) -> bytes:
    """Return a chat with these messages and members, both JSON."""
    rest = f",{members}" if members else ""
    return f'{{"model":"{model}","max_tokens":{tokens},"messages":[{messages}]{rest}}}'.encode()


def completion(members: str) -> bytes:
    """Return a text completion with these members, which are JSON."""
    return f'{{"model":"{MODEL_NAME}","max_tokens":2,{members}}}'.encode()


def _nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def _schema(properties: int) -> str:
    inner = ",".join(f'"field_{number}":{{"type":"string"}}' for number in range(properties))
    return f'{{"type":"object","properties":{{{inner}}}}}'


def _form(schema: str) -> str:
    return f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'


def _tool(description: str = "", parameters: str = '{"type":"object"}', name: str = "look", more: str = "") -> str:
    return (
        f'{{"type":"function","function":{{"name":"{name}","description":"{description}",'
        f'"parameters":{parameters}{more}}}}}'
    )


def _listed(values: Iterator[str]) -> str:
    return "[" + ",".join(values) + "]"


def _ids(count: int, start: int = 300) -> str:
    return _listed(str(start + number % 1000) for number in range(count))


def _text(chars: int) -> str:
    return (WORDS * (chars // len(WORDS) + 1))[:chars]


def _many_messages(count: int) -> str:
    pair = '{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}'
    return ",".join([pair] * (count // 2))


def attacks() -> Iterator[Attack]:
    """Yield every attack, the writers not yet called."""
    yield Attack("10,000 messages", CHAT, lambda: chat(messages=_many_messages(10_000)))
    yield Attack("100,000 messages", CHAT, lambda: chat(messages=_many_messages(100_000)))
    yield Attack("1,000,000 messages", CHAT, lambda: chat(messages=_many_messages(1_000_000)))
    parts = '{"type":"text","text":"a"}'
    yield Attack(
        "16,000 parts",
        CHAT,
        lambda: chat(messages=f'{{"role":"user","content":[{",".join([parts] * 16_000)}]}}'),
    )
    yield Attack("a message of 15 MB", CHAT, lambda: chat(messages=_message(_text(15 * MEGA))))
    yield Attack("a message of 15 MB without spaces", CHAT, lambda: chat(messages=_message("a" * (15 * MEGA))))
    yield Attack("a message of 1 MB of escapes", CHAT, lambda: chat(messages=_message("\\u00e9" * (MEGA // 6))))
    yield Attack("a message of 100 MB", CHAT, lambda: chat(messages=_message("a" * (100 * MEGA))))
    yield Attack("a stop string of 1 MB", CHAT, lambda: chat(f'"stop":"{"a" * MEGA}"'))
    yield Attack("32 stop strings of 4 KB", CHAT, lambda: chat(f'"stop":{_stops(32, 4096)}', tokens=64))
    yield Attack("100,000 stop strings", CHAT, lambda: chat(f'"stop":{_stops(100_000, 8)}'))
    yield Attack("1,000,000 token ids", COMPLETIONS, lambda: completion(f'"prompt":{_ids(1_000_000)}'))
    yield Attack("2,000,000 token ids", COMPLETIONS, lambda: completion(f'"prompt":{_ids(2_000_000)}'))
    yield Attack("1,000,000 ids in nvext", CHAT, lambda: chat(f'"nvext":{{"token_data":{_ids(1_000_000)}}}'))
    yield Attack("128 prompts of 8,000 ids", COMPLETIONS, lambda: completion(f'"prompt":{_batch(128, 8000)}'))
    yield Attack("128 choices of 60,000 ids", COMPLETIONS, lambda: completion(f'"n":128,"prompt":{_ids(60_000)}'))
    yield Attack("100,000 stop ids", CHAT, lambda: chat(f'"stop_token_ids":{_ids(100_000)}'))
    yield Attack("a tool description of 1 MB", CHAT, lambda: chat(f'"tools":[{_tool(_text(MEGA - 1))}]'))
    yield Attack("a tool description of 100 MB", CHAT, lambda: chat(f'"tools":[{_tool("a" * (100 * MEGA))}]'))
    yield Attack("100 tools of 1 MB", CHAT, lambda: chat(f'"tools":{_tools(100, MEGA - 1)}'))
    yield Attack("2,048 tools", CHAT, lambda: chat(f'"tools":{_tools(2048, 200)},"tool_choice":"required"'))
    yield Attack("a strict tool of 100,000 properties", CHAT, lambda: chat(f'"tools":[{_strict(100_000)}]'))
    yield Attack("a strict tool, all required", CHAT, lambda: chat(f'"tools":[{_required(4000)}]'))
    yield Attack("a strict tool of 20,000, all required", CHAT, lambda: chat(f'"tools":[{_required(20_000)}]'))
    yield Attack("a schema of 8,000 properties", CHAT, lambda: chat(_form(_schema(8000))))
    yield Attack("a schema of 100,000 properties", CHAT, lambda: chat(_form(_schema(100_000))))
    yield Attack("a schema with an enum of 20,000", CHAT, lambda: chat(_form(_enum(20_000))))
    yield Attack("a schema with an enum of 1,000,000", CHAT, lambda: chat(_form(_enum(1_000_000))))
    yield Attack("a schema 1,000 deep", CHAT, lambda: chat(_form(_nested(1000))))
    yield Attack("JSON 100,000 deep", CHAT, lambda: chat(f'"metadata":{_nested(100_000)}'))
    yield Attack("1,000,000 lists", CHAT, lambda: chat(f'"metadata":{_listed(iter(["[]"] * 1_000_000))}'))
    yield Attack("100,000 biases", CHAT, lambda: chat(f'"logit_bias":{_biases(100_000)}'))
    yield Attack("1,000,000 biases", CHAT, lambda: chat(f'"logit_bias":{_biases(1_000_000)}'))
    yield Attack("100,000 unknown fields", CHAT, lambda: chat(_unknown(100_000)))
    yield Attack("a model name of 50 MB", CHAT, lambda: chat(model="a" * (50 * MEGA)))
    yield Attack("a user name of 100 MB", CHAT, lambda: chat(f'"user":"{"a" * (100 * MEGA)}"'))
    yield Attack("template arguments of 20 MB", CHAT, lambda: chat(f'"chat_template_kwargs":{_arguments()}'))
    yield Attack("tool calls of 15 MB", CHAT, lambda: chat(messages=_calls(15 * MEGA)))
    yield Attack("a data URL of 100 MB", CHAT, lambda: chat(messages=_image(100 * MEGA)))
    yield Attack("4,096 guided choices", CHAT, lambda: chat(f'"guided_choice":{_stops(4096, 15)}'))
    yield Attack("a body of 250 MB", CHAT, lambda: chat(messages=_message("a" * (250 * MEGA))))
    yield Attack("a body of 190 MB that is not JSON", CHAT, lambda: b"[" * (190 * MEGA))
    yield Attack("2,000 embeddings", EMBEDDINGS, lambda: _input(_stops(2000, 400)))
    yield Attack("a response of 15 MB", RESPONSES, lambda: _input(f'"{_text(15 * MEGA)}"'))
    yield Attack("10,000 response items", RESPONSES, lambda: _items(10_000))
    yield Attack("10,000 Anthropic messages", MESSAGES, lambda: chat(messages=_many_messages(10_000) + "," + USER))


def _message(content: str) -> str:
    return f'{{"role":"user","content":"{content}"}}'


def _stops(count: int, chars: int) -> str:
    return _listed(json.dumps(f"{number:08d}".ljust(chars, "a")[:chars]) for number in range(count))


def _batch(prompts: int, ids: int) -> str:
    return _listed(iter([_ids(ids)] * prompts))


def _tools(count: int, chars: int) -> str:
    return _listed(_tool(_text(chars), name=f"tool_{number}") for number in range(count))


def _strict(properties: int) -> str:
    return _tool(parameters=_schema(properties)[:-1] + ',"additionalProperties":false}', more=',"strict":true')


def _required(properties: int) -> str:
    names = _listed(f'"field_{number}"' for number in range(properties))
    schema = f'{_schema(properties)[:-1]},"additionalProperties":false,"required":{names}}}'
    return _tool(parameters=schema, more=',"strict":true')


def _enum(members: int) -> str:
    return f'{{"type":"string","enum":{_listed(str(number) for number in range(members))}}}'


def _biases(count: int) -> str:
    return "{" + ",".join(f'"{number}":1.5' for number in range(count)) + "}"


def _unknown(count: int) -> str:
    return ",".join(f'"unknown_{number}":1' for number in range(count))


def _arguments() -> str:
    return f'{{"notes":"{_text(20 * MEGA)}"}}'


def _calls(chars: int) -> str:
    arguments = json.dumps(json.dumps({"text": _text(chars)}))
    call = f'{{"id":"call_1","type":"function","function":{{"name":"look","arguments":{arguments}}}}}'
    return (
        f'{USER},{{"role":"assistant","tool_calls":[{call}]}},{{"role":"tool","tool_call_id":"call_1","content":"x"}}'
    )


def _image(chars: int) -> str:
    url = f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{"A" * chars}"}}}}'
    return f'{{"role":"user","content":[{url},{{"type":"text","text":"what is it"}}]}}'


def _items(count: int) -> bytes:
    item = '{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}'
    return _input(_listed(iter([item] * count)))


def _input(value: str) -> bytes:
    return f'{{"model":"{MODEL_NAME}","input":{value}}}'.encode()
