"""Tool calls in well-formed text, as our parsers and the released frontend read them.

The model behind the frontend repeats its prompt. Content is compared without white space: 1.6.1 keeps the space between
calls, and trims in some formats.
"""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, free_port, stack_environment
from tests.cluster.etcd import EtcdCluster
from tests.cluster.peers import require_peer
from tests.unit.parsers.reading import read

from dynamo.core.config import environ
from dynamo.parsers.base import tools_of
from dynamo.parsers.registry import tool_call_family

pytestmark = pytest.mark.conformance

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "sunny": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
    "note": {"type": ["string", "null"]},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES}},
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
VALUES = {
    "city": 'Oslo "S", 3 < 4',
    "days": 2,
    "ratio": 1.5,
    "sunny": True,
    "tags": ["a", "b c"],
    "place": {"lat": 59.9, "name": "Oslo"},
    "note": None,
}


def plain(value: Any) -> str:
    """Format a value for formats without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def as_json(name: str, values: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: values})


def tagged(block: str, call: str, parameter: str, line: str = "") -> Any:
    """Write calls as tags; `call` and `parameter` are pairs of an opening with a placeholder for the name, and a
    closing.
    """

    def write(name: str, values: dict[str, Any]) -> str:
        opener, closer = call.split("…")
        inner = "".join(
            parameter.split("…")[0].format(key, str(isinstance(value, str)).lower())
            + line + plain(value) + line + parameter.split("…")[1] + "\n"
            for key, value in values.items()
        )  # fmt: skip
        return f"{block.split('…')[0]}\n{opener.format(name)}\n{inner}{closer}\n{block.split('…')[1]}"

    return write


def glm(name: str, values: dict[str, Any]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{plain(one)}</arg_value>" for key, one in values.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def gemma(name: str, values: dict[str, Any]) -> str:
    def value(one: Any) -> str:
        match one:
            case str():
                return f'<|"|>{one}<|"|>'
            case dict():
                return "{" + ",".join(f"{key}:{value(item)}" for key, item in one.items()) + "}"
            case list():
                return "[" + ",".join(map(value, one)) + "]"
        return json.dumps(one)

    return f"<|tool_call>call:{name}{value(values)}<tool_call|>"


def kimi_k3(name: str, values: dict[str, Any]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    inner = "".join(
        f'<|open|>argument key="{key}" type="{kinds.get(type(value), "null")}"<|sep|>{plain(value)}'
        "<|close|>argument<|sep|>"
        for key, value in values.items()
    )
    return (
        f'<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{inner}'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    )


def minimax_m3(name: str, values: dict[str, Any]) -> str:
    def value(one: Any) -> str:
        match one:
            case dict():
                return "".join(f"<{key}>{value(item)}</{key}>" for key, item in one.items())
            case list():
                return "".join(f"<item>{value(item)}</item>" for item in one)
        return plain(one).replace("<", "\0")

    text = f'<tool_call>\n<invoke name="{name}">{value(values)}</invoke>\n</tool_call>'
    return text.replace("<", "]<]minimax[>[<").replace("\0", "<")


def pythonic(name: str, values: dict[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})]"


def dsml(block: str, space: str = "") -> Any:
    start, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return tagged(
        f"{start}{block}>…{end}{block}>",
        f'{start}invoke name="{{}}">…{end}invoke>',
        f'{start}parameter name="{{}}" string="{{}}">…{end}parameter>',
    )


def deepseek(call: str) -> Any:
    def write(name: str, values: dict[str, Any]) -> str:
        inner = call.format(name, json.dumps(values))
        return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

    return write


def kimi_k2(name: str, values: dict[str, Any]) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(values)}<|tool_call_end|><|tool_calls_section_end|>"
    )


def muse(name: str, values: dict[str, Any]) -> str:
    tags = tagged(
        "<atem:function_calls>…</atem:function_calls>",
        '<atem:invoke name="{}">…</atem:invoke>',
        '<atem:parameter name="{}">…</atem:parameter>',
    )
    return f"<|start|>assistant to={name}<|message|>{tags(name, values)}<|eom|>"


def hermes(name: str, values: dict[str, Any]) -> str:
    return f"<tool_call>\n{as_json(name, values)}\n</tool_call>"


def inkling(name: str, values: dict[str, Any]) -> str:
    return f"<|message_model|>{name}<|content_invoke_tool_json|>{as_json(name, values, 'args')}<|end_message|>"


QWEN = tagged("<tool_call>…</tool_call>", "<function={}>…</function>", "<parameter={}>…</parameter>", "\n")
MINIMAX = tagged(
    "<minimax:tool_call>…</minimax:tool_call>", '<invoke name="{}">…</invoke>', '<parameter name="{}">…</parameter>'
)

WRITERS: dict[str, Any] = {
    "hermes": hermes,
    "qwen25": hermes,
    "nemotron_deci": lambda name, values: f"<TOOLCALL>[{as_json(name, values)}]</TOOLCALL>",
    "llama3_json": lambda name, values: f"<|python_tag|>{as_json(name, values, 'parameters')}",
    "mistral": lambda name, values: f"[TOOL_CALLS][{as_json(name, values)}]",
    "jamba": lambda name, values: f"<tool_calls>[{as_json(name, values)}]</tool_calls>",
    "phi4": lambda name, values: f"functools[{as_json(name, values)}]",
    "pythonic": pythonic,
    "qwen3_coder": QWEN,
    "nemotron_nano": QWEN,
    "minimax_m2": MINIMAX,
    "minimax_m3": minimax_m3,
    "deepseek_v3": deepseek("function<｜tool▁sep｜>{}\n```json\n{}\n```"),
    "deepseek_v3_1": deepseek("{}<｜tool▁sep｜>{}"),
    "deepseek_v3_2": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "glm47": glm,
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "gemma4": gemma,
    "inkling": inkling,
    "muse": muse,
}
"""Families that the released frontend parses by default."""

WRITERS_OF_2: dict[str, Any] = {"qwen3": QWEN, "glm45": glm, "kimi_k25": kimi_k2, "deepseek_v41": dsml("calls", " ")}
"""Families that it parses only with `DYN_PARSER_VERSION=2`."""

LOSES_SPACES = {"pythonic"}
"""In content before a call the released frontend drops spaces between words."""


class Released:
    """Released frontend with models that repeat their prompt."""

    def __init__(self, folder: Path, etcd: EtcdCluster, names: list[str], version: str) -> None:
        variables = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd.endpoints, "DYN_PARSER_VERSION": version}
        environment = stack_environment(str(folder), environ()) | variables
        self.port = free_port()
        self.names = names
        worker = os.path.join(os.path.dirname(__file__), "peer_parsers_worker.py")
        listen = ["--http-host", HOST, "--http-port", str(self.port), "--router-mode", "round-robin"]
        python = peer_python()
        self._log = folder / f"log-{version}"
        self._processes = []
        for command in ([python, worker, model(folder), *names], [python, "-m", "dynamo.frontend", *listen]):
            with open(self._log, "ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )

    def wait(self) -> "Released":
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                listed = {model["id"] for model in self.send_request("GET", "/v1/models")["data"]}
                if listed >= set(self.names) and all("choices" in self.chat(name, "x") for name in self.names):
                    return self
            time.sleep(0.2)
        pytest.fail(f"the released frontend was not ready:\n{self._log.read_text()[-2000:]}", pytrace=False)

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def send_request(self, method: str, path: str, body: Any = None) -> Any:
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=20)) as connection:
            connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())

    def chat(self, name: str, text: str, tools: Any = TOOLS) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.send_request(
            "POST", "/v1/chat/completions", {"model": name, "messages": messages, "tools": tools, "max_tokens": 4000}
        )

    def read(self, name: str, text: str, tools: Any = TOOLS) -> tuple[list[str], list[tuple[str, Any]]]:
        """Return the words of the content, and the calls."""
        message = self.chat(name, text, tools)["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return (message["content"] or "").split(), [(one["name"], json.loads(one["arguments"])) for one in calls]


def model(folder: Path) -> str:
    """Write a model whose prompt is the text of the user, and whose tokenizer has no marker tokens."""
    path = str(folder / "model")
    if os.path.exists(path):
        return path
    shutil.copytree(bench_model(), path)
    config = json.loads(Path(path, "tokenizer_config.json").read_text())
    tokenizer = json.loads(Path(path, "tokenizer.json").read_text())
    markers = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["content"] not in markers]
    known = config.get("added_tokens_decoder", {})
    config["added_tokens_decoder"] = {key: one for key, one in known.items() if one["content"] not in markers}
    config["chat_template"] = TEMPLATE
    Path(path, "tokenizer_config.json").write_text(json.dumps(config))
    Path(path, "tokenizer.json").write_text(json.dumps(tokenizer))
    Path(path, "chat_template.jinja").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Discovery in etcd: a directory would need more watches than a machine allows."""
    require_peer()
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.wait()


@pytest.fixture(scope="module", params=["1", "2"])
def released(
    request: pytest.FixtureRequest, etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Released]:
    names = [*WRITERS] if request.param == "1" else [*WRITERS_OF_2]
    running = Released(tmp_path_factory.mktemp("released"), etcd, names, "auto" if request.param == "1" else "2")
    try:
        yield running.wait()
    finally:
        running.end()


def texts(name: str) -> Iterator[str]:
    """Return well-formed texts of a family."""
    write = (WRITERS | WRITERS_OF_2)[name]
    yield "Nothing to call: [1] {2} <3>."
    yield write("get_weather", {"city": "Oslo", "days": 2})
    yield write("get_weather", VALUES)
    yield write("now", {})
    if name not in LOSES_SPACES:
        yield "Let me look. " + write("get_weather", {"city": "Tromsø", "sunny": False})


NAMED_TYPES = {
    "float": "1.5", "int": "2", "bool": "true", "dict": '{"a": [1]}', "list": "[1]", "any": "3", "double": "2.5",
    "str": "5", "tuple": "[1]", "int64": "9", "float32": "3.5", "list[int]": "[4]", "Dict[str, int]": '{"c": 3}',
    "varchar": "6", "set": "[1]", "map": '{"b": 2}', "Any": "[1]", "long": "8",
}  # fmt: skip
"""Type names that are not of JSON Schema, each with a value's text."""
NOT_CONVERTED = {"glm47": {"any", "int64", "float32", "long"}}
"""Type names that the released parsers of some families do not support: they keep strings, ours converts."""


def test_parsers_convert_python_values_as_the_released_frontend(released: Released) -> None:
    differing = []
    for name in sorted({"qwen3_coder", "nemotron_nano", "minimax_m2", "glm47"} & {*released.names}):
        known = {key: text for key, text in NAMED_TYPES.items() if key not in NOT_CONVERTED.get(name, ())}
        properties = {f"p{number}": {"type": key} for number, key in enumerate(known)}
        parameters = {"type": "object", "properties": properties}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        text = WRITERS[name]("f", dict(zip(properties, known.values(), strict=True)))
        ours = read(tool_call_family(name).make(tools_of(tools)), [text])
        [(_, theirs)] = released.read(name, text, tools)[1]
        if json.loads(ours.calls[0][1]) != theirs:
            differing.append(f"{name}: ours {ours.calls[0][1]}, theirs {theirs}")
    assert not differing, "\n".join(differing)


def test_gemma_parser_converts_nulls_as_the_released_frontend(released: Released) -> None:
    if "gemma4" not in released.names:
        pytest.skip("this frontend serves no gemma4")
    text = "<|tool_call>call:now{a:nil,b:none,c:NULL,d:None,e:null,f:[nil,Null],g:TRUE}<tool_call|>"
    ours = read(tool_call_family("gemma4").make(tools_of(TOOLS)), [text])
    assert [json.loads(arguments) for _, arguments in ours.calls] == [released.read("gemma4", text)[1][0][1]]


def test_parsers_read_the_same_calls_as_the_released_frontend(released: Released) -> None:
    tools = tools_of(TOOLS)
    differing = []
    for name in released.names:
        for text in texts(name):
            ours = read(tool_call_family(name).make(tools), [text])
            found = ours.content.split(), [(called, json.loads(arguments)) for called, arguments in ours.calls]
            theirs = released.read(name, text)
            if found != theirs:
                differing.append(f"{name}: {text!r}\n  ours   {found}\n  theirs {theirs}")
    assert not differing, "\n".join(differing)
