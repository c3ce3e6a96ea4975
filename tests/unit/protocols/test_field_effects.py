"""No field of a request is ignored silently: each is read by the code that serves it, or listed with its effect."""

import ast
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dynamo
from dynamo.api.anthropic import convert as anthropic_convert
from dynamo.api.responses import convert as responses_convert
from dynamo.core.errors import DynamoException, HttpError, InvalidArgument
from dynamo.protocols.anthropic import decode_messages
from dynamo.protocols.embeddings import decode_pooling
from dynamo.protocols.field_effects import EFFECTS, ENDPOINTS, HONOURED, Effect, effect_of, types_within
from dynamo.protocols.openai import decode_chat
from dynamo.protocols.response_items import decode_items
from dynamo.protocols.response_requests import decode_response_request

SOURCE = Path(dynamo.__file__).parent
SELF = SOURCE / "protocols" / "field_effects.py"
TYPES = list(dict.fromkeys(kind for root in ENDPOINTS.values() for kind in types_within(root)))


class Reads(ast.NodeVisitor):
    """The names that a module reads: attributes, keywords of patterns, and names of fields in its tables."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.protocols: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None and node.module.startswith("dynamo.protocols."):
            self.protocols.add(node.module.rpartition(".")[2])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.attr)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.names.update(node.kwd_attrs)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self.names.add(node.value)


@cache
def modules() -> dict[Path, Reads]:
    found: dict[Path, Reads] = {}
    for path in SOURCE.rglob("*.py"):
        if path != SELF:
            found[path] = Reads()
            found[path].visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def readers(protocol: str) -> Iterator[Reads]:
    """Return the modules that use a protocol's types; `nvext` is a part of OpenAI's requests."""
    holders = {protocol, "openai"} if protocol == "nvext" else {protocol}
    for path, reads in modules().items():
        if holders & reads.protocols or path == SOURCE / "protocols" / f"{protocol}.py":
            yield reads


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
def test_every_request_field_is_read_or_listed_with_its_effect(kind: type[msgspec.Struct]) -> None:
    protocol = kind.__module__.rpartition(".")[2]
    read = set().union(*(one.names for one in readers(protocol)))
    silent = [
        field.name
        for field in msgspec.structs.fields(kind)
        if effect_of(kind, field.name) is HONOURED and field.name not in read
    ]
    assert not silent, f"honour {silent} of {kind.__name__}, refuse them, or list them in protocols/field_effects.py"


def test_every_listed_field_exists() -> None:
    wrong = [
        f"{kind.__name__}.{name}" for kind, listed in EFFECTS.items() for name in listed if name not in fields(kind)
    ]
    assert not wrong


def fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


# ---- refused --------------------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "hi"}]


def chat(body: dict[str, Any]) -> None:
    decode_chat(json.dumps({"model": "m", "messages": USER} | body).encode())


def response(body: dict[str, Any]) -> None:
    request = decode_response_request(json.dumps({"model": "m", "input": "hi"} | body).encode())
    assert request.input is not None
    responses_convert.to_chat(request, decode_items(request.input))  # type: ignore[arg-type]


def message(body: dict[str, Any]) -> None:
    request = decode_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": USER} | body).encode())
    anthropic_convert.to_chat(request)


def pooling(body: dict[str, Any]) -> None:
    decode_pooling(json.dumps({"model": "m", "input": "a"} | body).encode())


def tool(**more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "parameters": {}, **more}]}


def custom(**more: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {}, **more}]}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any]]] = {
    "ChatCompletionRequest.function_call": (chat, {"function_call": "auto"}),
    "ChatCompletionRequest.functions": (chat, {"functions": [{"name": "f"}]}),
    "ChatCompletionRequest.audio": (chat, {"audio": {"voice": "alloy"}}),
    "ChatCompletionRequest.modalities": (chat, {"modalities": ["audio"]}),
    "ChatCompletionRequest.web_search_options": (chat, {"web_search_options": {}}),
    "ChatMessage.function_call": (
        chat,
        {"messages": [*USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
    ),
    "ResponsesPromptFields.conversation": (response, {"conversation": "c"}),
    "ResponsesPromptFields.personality": (response, {"personality": "p"}),
    "ResponseRequest.background": (response, {"background": True}),
    "ResponseRequest.max_tool_calls": (response, {"max_tool_calls": 1}),
    "ResponseRequest.prompt": (response, {"prompt": {"id": "p"}}),
    "ResponseRequest.context_management": (response, {"context_management": [{"type": "compaction"}]}),
    "ResponseRequest.moderation": (response, {"moderation": {}}),
    "ResponseRequest.image": (response, {"image": {}}),
    "ResponseRequest.access_programs": (response, {"access_programs": []}),
    "FunctionTool.defer_loading": (response, tool(defer_loading=True)),
    "FunctionTool.allowed_callers": (response, tool(allowed_callers=["other"])),
    "FunctionTool.output_schema": (response, tool(output_schema={})),
    "FunctionTool.is_async": (response, tool(**{"async": True})),
    "ReasoningOptions.context": (response, {"reasoning": {"context": "all_turns"}}),
    "ReasoningOptions.mode": (response, {"reasoning": {"mode": "pro"}}),
    "InputImage.file_id": (
        response,
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
    ),
    "AnthropicPromptFields.mcp_servers": (message, {"mcp_servers": [{}]}),
    "AnthropicPromptFields.context_management": (message, {"context_management": {"edits": [{"type": "other"}]}}),
    "MessagesRequest.container": (message, {"container": "c"}),
    "MessagesRequest.diagnostics": (message, {"diagnostics": {}}),
    "MessagesRequest.inference_geo": (message, {"inference_geo": "eu"}),
    "DocumentBlock.citations": (
        message,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"type": "text", "data": "d"}, "citations": {"enabled": True}}
                    ],
                }
            ]
        },
    ),
    "CustomTool.defer_loading": (message, custom(defer_loading=True)),
    "CustomTool.allowed_callers": (message, custom(allowed_callers=["other"])),
    "PoolingRequest.dimensions": (pooling, {"dimensions": 3}),
}
OTHER_MODULES = {"ImageRequest.stream"}
"""Refused by a route, and tested with it."""


def test_every_refused_field_has_a_test_request() -> None:
    listed = {
        f"{kind.__name__}.{name}"
        for kind, known in EFFECTS.items()
        for name, one in known.items()
        if one.effect is Effect.REFUSED
    }
    assert listed == set(REFUSED) | OTHER_MODULES


@pytest.mark.parametrize("name", REFUSED)
def test_refused_field_is_named_in_its_error(name: str) -> None:
    request_path, body = REFUSED[name]
    request_path({})
    with pytest.raises(DynamoException) as raised:
        request_path(body)
    assert isinstance(raised.value, InvalidArgument) or (
        isinstance(raised.value, HttpError) and raised.value.code == 501
    )
    field = name.partition(".")[2].removeprefix("is_")
    assert field in f"{getattr(raised.value, 'param', '')} {raised.value}"
