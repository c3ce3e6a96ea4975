"""The demo model's corpus: seeded conversations about this project, sums, rules, tools and thoughts.

Everything the bundled demo model learns is written here; nothing is downloaded. The module is pure: a
seed goes in, conversations come out. What is held out (phrasings, pairs of numbers, names of tools) is
never drawn for training, so `tools/eval_demo_model.py` can ask it.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

T = TypeVar("T")
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

HELD_OUT_SHARE = 10  # One pair of numbers in ten, one name of a tool in ten: enough to measure on.

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first = 0 -%}
{%- if messages and messages[0].role in ("system", "developer") -%}
{%- set system = text(messages[0].content) -%}
{%- else -%}
{%- set system = "" -%}
{%- endif -%}
{%- if tools -%}
{{- "<|im_start|>system\\n" -}}
{%- if system -%}{{- system + "\\n\\n" -}}{%- endif -%}
{{- "# Tools\\n\\nThese functions can be called, one JSON signature a line:\\n<tools>" -}}
{%- for tool in tools -%}{{- "\\n" -}}{{- tool | tojson -}}{%- endfor -%}
{{- "\\n</tools>\\n\\nA call is a JSON object with the name and the arguments, written so:\\n" -}}
{{- '<tool_call>\\n{"name": <function-name>, "arguments": <arguments-object>}\\n</tool_call>' -}}
{{- "<|im_end|>\\n" -}}
{%- elif system -%}
{{- "<|im_start|>system\\n" + system + "<|im_end|>\\n" -}}
{%- endif -%}
{%- set state = namespace(last_query=-1) -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}{%- set state.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role in ("system", "developer") -%}
{%- if not loop.first -%}
{{- "<|im_start|>system\\n" + text(message.content) + "<|im_end|>\\n" -}}
{%- endif -%}
{%- elif message.role == "user" -%}
{{- "<|im_start|>user\\n" + text(message.content) + "<|im_end|>\\n" -}}
{%- elif message.role == "assistant" -%}
{%- set content = text(message.content) -%}
{%- set thought = "" -%}
{%- if message.reasoning_content is string -%}
{%- set thought = message.reasoning_content -%}
{%- elif "</think>" in content -%}
{%- set thought = content.split("</think>")[0].split("<think>")[-1] -%}
{%- set content = content.split("</think>")[-1] -%}
{%- endif -%}
{%- set thought = thought.strip("\\n") -%}
{%- set content = content.lstrip("\\n") -%}
{{- "<|im_start|>assistant\\n" -}}
{%- if thought and loop.index0 > state.last_query -%}
{{- "<think>\\n" + thought + "\\n</think>\\n\\n" -}}
{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{%- if call.function is defined -%}{%- set call = call.function -%}{%- endif -%}
{%- if content or not loop.first -%}{{- "\\n" -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{%- if call.arguments is string -%}{{- call.arguments -}}
{%- else -%}{{- call.arguments | tojson -}}{%- endif -%}
{{- "}\\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- elif message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}
{{- "<|im_start|>user" -}}
{%- endif -%}
{{- "\\n<tool_response>\\n" + text(message.content) + "\\n</tool_response>" -}}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}
{{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n" -}}
{%- if not (enable_thinking is defined and enable_thinking) -%}
{{- "<think>\\n\\n</think>\\n\\n" -}}
{%- endif -%}
{%- endif -%}
"""


# --- what a conversation is --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model writes it."""

    name: str
    arguments: dict[str, Json]

    def text(self) -> str:
        """The Hermes form."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `thought` is what the model thinks before it, when asked to."""

    role: str
    content: str
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()

    def openai(self) -> dict[str, Json]:
        """The message as the chat API carries it."""
        message: dict[str, Json] = {"role": self.role, "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls
            ]
        return message

    def text(self) -> str:
        """What stands in the turn, calls included."""
        parts = [self.content] if self.content else []
        return "\n".join(parts + [call.text() for call in self.calls])


Tool = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's, and what they were asked under."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = False


class Learn(Enum):
    """How much of a piece of text the model is trained on."""

    NOTHING = 0
    ALL = 1
    ALL_BUT_FIRST = 2  # An earlier answer: whether a thought precedes it cannot be seen there.


Piece = tuple[str, Learn]


def pieces(conversation: Conversation) -> list[Piece]:
    """The conversation exactly as `CHAT_TEMPLATE` renders it, cut where learning starts and stops."""
    *history, last = conversation.messages
    queries = [i for i, m in enumerate(history) if m.role == "user"]
    out: list[Piece] = [(_system_text(conversation), Learn.NOTHING)]
    for index, message in enumerate(history):
        if message.role == "user":
            out.append((f"<|im_start|>user\n{message.content}<|im_end|>\n", Learn.NOTHING))
        elif message.role == "tool":
            out.append((_tool_response_text(history, index), Learn.NOTHING))
        elif message.role == "assistant":
            head = "<|im_start|>assistant\n"
            if message.thought and index > queries[-1]:
                head += f"<think>\n{message.thought}\n</think>\n\n"
            out.append((head, Learn.NOTHING))
            out.append((message.text() + "<|im_end|>", Learn.ALL_BUT_FIRST))
            out.append(("\n", Learn.NOTHING))
    if conversation.thinking:
        out.append(("<|im_start|>assistant\n", Learn.NOTHING))
        out.append((f"<think>\n{last.thought}\n</think>\n\n{last.text()}<|im_end|>", Learn.ALL))
    else:
        out.append(("<|im_start|>assistant\n<think>\n\n</think>\n\n", Learn.NOTHING))
        out.append((last.text() + "<|im_end|>", Learn.ALL))
    return [piece for piece in out if piece[0]]


def prompt(conversation: Conversation) -> str:
    """The text the model is given: everything before its last answer; nothing where there are no turns."""
    if len(conversation.messages) == 1:
        return ""
    return "".join(text for text, _ in pieces(conversation)[:-1])


def _system_text(conversation: Conversation) -> str:
    first = conversation.messages[0]
    system = first.content if first.role == "system" else ""
    if not conversation.tools:
        return f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)
    return (
        "<|im_start|>system\n"
        + (system + "\n\n" if system else "")
        + "# Tools\n\nThese functions can be called, one JSON signature a line:\n<tools>"
        + lines
        + "\n</tools>\n\nA call is a JSON object with the name and the arguments, written so:\n"
        + '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
        + "<|im_end|>\n"
    )


def _tool_response_text(history: Sequence[Message], index: int) -> str:
    opens = history[index - 1].role != "tool"
    closes = index + 1 == len(history) or history[index + 1].role != "tool"
    body = f"\n<tool_response>\n{history[index].content}\n</tool_response>"
    return ("<|im_start|>user" if opens else "") + body + ("<|im_end|>\n" if closes else "")


def is_held_out(*key: object) -> bool:
    """Whether this key belongs to the evaluation; the same on every machine and for every seed."""
    return zlib.crc32(repr(key).encode()) % HELD_OUT_SHARE == 0


def is_sum_held_out(a: int, b: int) -> bool:
    """Whether a + b, in either order, is kept from training."""
    return a >= 10 and b >= 10 and is_held_out("sum", min(a, b), max(a, b))


# --- what the model knows of the project -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer and the ways to ask for it: terms (nouns), actions (verbs), or whole questions."""

    answer: str
    terms: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()


def _term(answer: str, *terms: str) -> Fact:
    return Fact(answer, terms=terms)


def _action(answer: str, *actions: str) -> Fact:
    return Fact(answer, actions=actions)


def _asked(answer: str, asked: Sequence[str], held_out: Sequence[str]) -> Fact:
    return Fact(answer, asked=tuple(asked), held_out=tuple(held_out))


TERMS = (
    _term("dynamo-serve is a framework for serving large language models on many machines. It is written in Python.",
          "dynamo-serve", "dynamo", "Dynamo", "this project", "the dynamo project"),
    _term("A worker is a process that runs an engine and answers requests.", "a worker", "worker", "workers", "a worker process"),
    _term("An instance is one running copy of an endpoint; every worker that serves it is one instance.",
          "an instance", "instance", "instances"),
    _term("An endpoint is a named function that workers serve and clients call, such as generate.",
          "an endpoint", "endpoint", "endpoints"),
    _term("A component is a named group of endpoints inside a namespace.", "a component", "component", "components"),
    _term("A namespace keeps the components of one deployment apart from those of another.", "a namespace", "namespace", "namespaces"),
    _term("The frontend is the process that speaks the OpenAI API over HTTP and passes requests on to workers.",
          "the frontend", "frontend", "a frontend", "the HTTP frontend"),
    _term("The router chooses which worker answers a request, from the KV cache each one holds and its load.",
          "the router", "router", "a router", "the KV router", "KV-aware routing", "kv routing"),
    _term("The KV cache holds the keys and values of tokens already read, so that they are not computed again.",
          "the KV cache", "KV cache", "a kv cache", "key-value cache"),
    _term("A block is a run of tokens, such as 16, whose keys and values are kept together in the KV cache.",
          "a block", "block", "a KV block", "kv blocks", "a cache block"),
    _term("A sequence hash names a block together with everything before it, so equal hashes mean equal prefixes.",
          "a sequence hash", "sequence hash", "sequence hashes"),
    _term("A block hash names the tokens of one block, without what came before it.", "a block hash", "block hash", "the local block hash"),
    _term("Prefill is the first phase of a request: the whole prompt is read and the KV cache is filled.",
          "prefill", "the prefill phase", "prefilling"),
    _term("Decode is the second phase of a request: the answer is written one token after another.",
          "decode", "the decode phase", "decoding"),
    _term("Disaggregation runs prefill and decode on different workers, so that neither slows the other.",
          "disaggregation", "disaggregated serving", "disaggregated prefill", "prefill/decode disaggregation"),
    _term("TTFT is the time to first token: how long the user waits before the answer begins.",
          "TTFT", "time to first token", "the time to first token"),
    _term("ITL is the inter-token latency: the time between two tokens of an answer.",
          "ITL", "inter-token latency", "the inter-token latency"),
    _term("Overlap is the number of blocks of a prompt that a worker already holds in its KV cache.",
          "overlap", "the overlap", "prefix overlap", "block overlap"),
    _term("The request plane carries requests from the frontend to workers and answers back, by default over TCP.",
          "the request plane", "request plane"),
    _term("The event plane carries news such as stored and removed blocks, by default over ZMQ.",
          "the event plane", "event plane"),
    _term("Discovery is how processes find each other: each one writes its endpoints into a shared directory.",
          "discovery", "service discovery", "the discovery plane"),
    _term("The planner decides how many prefill and decode workers to run, so that the latency targets are met.",
          "the planner", "planner", "a planner", "the SLA planner"),
    _term("The profiler measures an engine at many loads, so that the planner knows what a worker can do.",
          "the profiler", "profiler", "a profiler"),
    _term("The mocker is an engine that only pretends: it keeps the timing of a real one without any model.",
          "the mocker", "mocker", "a mocker", "the mock engine"),
    _term("Migration moves a request to another worker when its worker fails, and goes on from the tokens already sent.",
          "migration", "request migration", "migrating a request"),
    _term("Graceful shutdown means to refuse new requests, let the running ones finish, and only then close.",
          "graceful shutdown", "a graceful shutdown", "shutting down gracefully"),
    _term("Draining means that a worker takes no new requests and finishes those it has.", "draining", "drain", "to drain a worker"),
    _term("Preemption takes the blocks of a running request away when memory is short; the request is computed again later.",
          "preemption", "preempting", "preemption of a request"),
    _term("Continuous batching lets requests join and leave the batch at every step, so the engine is always full.",
          "continuous batching", "in-flight batching"),
    _term("Chunked prefill reads a long prompt in pieces, so that other requests keep decoding between them.",
          "chunked prefill", "prefill chunks", "prefill in chunks"),
    _term("A paged KV cache keeps its blocks anywhere in memory and finds them by a table, so none is wasted.",
          "a paged KV cache", "paged KV cache", "paged attention", "paging of the cache"),
    _term("Prefix reuse means that a prompt which begins like an earlier one skips the part already computed.",
          "prefix reuse", "prefix caching", "prefix sharing", "reuse of a prefix"),
    _term("A token is a piece of text, often a short word or a part of one, that a model reads and writes.",
          "a token", "token", "tokens"),
    _term("A tokenizer cuts text into tokens and joins tokens into text again.", "a tokenizer", "tokenizer", "the tokenizer", "tokenization"),
    _term("A chat template turns the messages of a chat into the one text that the model reads.",
          "a chat template", "chat template", "the chat template"),
    _term("Temperature says how freely the next token is drawn; at 0 the likeliest one is always taken.",
          "temperature", "the temperature", "sampling temperature"),
    _term("Top-p keeps only the likeliest tokens whose probabilities together reach p.", "top-p", "top_p", "nucleus sampling"),
    _term("Top-k keeps only the k likeliest tokens.", "top-k", "top_k", "top-k sampling"),
    _term("Greedy decoding always takes the likeliest token, so the same prompt gives the same answer.",
          "greedy decoding", "greedy sampling", "greedy search"),
    _term("An engine is the software that runs the model, such as vLLM, SGLang or TensorRT-LLM.",
          "an engine", "engine", "an inference engine", "the engine"),
    _term("The KV block manager keeps blocks across device, host, disk and remote memory.",
          "the KV block manager", "KVBM", "kvbm", "the block manager"),
    _term("A tier is one of the places where blocks are kept: device, host, disk or remote memory.",
          "a tier", "tier", "memory tiers", "a cache tier"),
    _term("Offloading moves blocks from the device to slower memory, so that they can be brought back later.",
          "offloading", "KV offloading", "offload", "cache offloading"),
    _term("The operator runs dynamo-serve on Kubernetes: it turns a deployment resource into pods and keeps them running.",
          "the operator", "operator", "the Kubernetes operator"),
    _term("Streaming sends each token to the user as soon as it is made, as server-sent events.",
          "streaming", "a streamed answer", "token streaming"),
    _term("A prompt is the text that is given to a model.", "a prompt", "prompt", "prompts"),
    _term("A system prompt is a message that tells the model how to behave.", "a system prompt", "system prompt", "the system message"),
    _term("A tool call is a request by the model to run a function: a name and its arguments as JSON.",
          "a tool call", "tool call", "tool calls", "function calling", "tool calling"),
    _term("Reasoning is what a model writes between think tags before it answers.", "reasoning", "thinking", "the thinking mode"),
    _term("A batch is the set of requests that an engine computes in the same step.", "a batch", "batch", "batching"),
    _term("Speculative decoding lets a small model guess several tokens, which the large one checks in one step.",
          "speculative decoding", "speculation"),
    _term("LoRA is a small set of extra weights that adapts a model to a task.", "LoRA", "lora", "a LoRA adapter", "an adapter"),
    _term("An embedding is a list of numbers that stands for a text, so that like texts lie close together.",
          "an embedding", "embedding", "embeddings"),
    _term("A model card tells the frontend what a model needs: its name, tokenizer, template and limits.",
          "a model card", "model card", "the model deployment card", "a deployment card"),
    _term("A lease is a promise with a time limit: when its process stops renewing it, its records are removed.",
          "a lease", "lease", "leases"),
    _term("etcd is a store for small records that processes on many machines can share; discovery can use it.", "etcd"),
    _term("NATS is a message server; the request plane and the event plane can use it.", "NATS", "nats"),
    _term("ZMQ is a library for messages between processes; the event plane uses it by default.", "ZMQ", "zmq", "ZeroMQ"),
    _term("An SLA is a promise about speed, such as a limit for TTFT and ITL.", "an SLA", "SLA", "a service level agreement"),
    _term("Throughput is the number of tokens or requests that are served in a second.", "throughput", "the throughput"),
    _term("Latency is the time between asking and being answered.", "latency", "the latency"),
    _term("Context length is the largest number of tokens, prompt and answer together, that a model can hold.",
          "context length", "the context length", "the context window", "max context"),
    _term("A stop sequence is a text at which the answer ends.", "a stop sequence", "stop sequence", "stop words"),
    _term("A health check asks a process whether it is alive and ready.", "a health check", "health check", "health checks"),
    _term("Replay runs the production code over a recorded trace in virtual time.", "replay", "the replay simulator", "trace replay"),
    _term("Metrics are numbers about the running system, which Prometheus reads from /metrics.",
          "metrics", "the metrics", "prometheus metrics"),
    _term("A replica is one of several equal workers.", "a replica", "replica", "replicas"),
)  # fmt: skip

ACTIONS = (
    _action("Run `dynamo serve`. It starts a frontend and a worker on your machine.",
            "start dynamo-serve", "start the server", "run dynamo-serve", "launch the server", "serve a model", "get the server running"),
    _action("Run `dynamo chat` to talk to a model in the terminal.",
            "chat with the model", "talk to a model", "chat in the terminal", "start a chat", "talk to you"),
    _action("Run `pip install dynamo-serve`.", "install dynamo-serve", "install it", "install dynamo", "get dynamo-serve onto my machine"),
    _action("Press Ctrl-C. The server then finishes the running requests and stops.",
            "stop the server", "shut it down", "stop dynamo-serve", "quit the server", "end the server"),
    _action("Open http://localhost:8000/metrics to see the metrics.",
            "see the metrics", "read the metrics", "look at the metrics", "monitor it", "get the metrics"),
    _action("Open http://localhost:8000/health to see whether the server is healthy.",
            "check its health", "see whether the server is alive", "check that the server is up", "check the health of the server"),
    _action("Send a POST request to /v1/chat/completions, as with the OpenAI API.",
            "send a chat request", "call the API", "use the chat API", "send a request", "make an API request"),
    _action("Send a GET request to /v1/models to list the models.",
            "list the models", "see which models are served", "find the names of the models", "get the list of models"),
    _action("Set stream to true in the request to get the answer token by token.",
            "stream the answer", "get a stream", "stream tokens", "receive tokens one by one", "turn on streaming"),
    _action("Set temperature to 0 in the request to get the same answer every time.",
            "get the same answer every time", "make answers deterministic", "turn off randomness", "avoid random answers"),
    _action("Set max_tokens in the request to limit the length of the answer.",
            "limit the length of the answer", "get a shorter answer", "cap the number of tokens", "limit the output"),
    _action("Pass enable_thinking in chat_template_kwargs to make the model think first.",
            "make you think", "turn on thinking", "enable thinking", "see the reasoning", "switch on reasoning"),
    _action("Give a list of functions in the tools field of the request.",
            "use tools", "give you a tool", "define a function for the model", "pass tools", "let the model call a function"),
    _action("Start more workers; the frontend finds them by discovery and the router shares the load.",
            "scale out", "add more workers", "serve more users", "use several machines", "make it scale"),
    _action("Pass another model to `dynamo serve`; the engine loads it in place of the demo model.",
            "use another model", "serve my own model", "load a bigger model", "change the model", "replace the demo model"),
)  # fmt: skip

QUESTIONS = (
    _asked("I am a tiny demo model of a few million parameters that comes with dynamo-serve. I am not made for real work.",
           ["Who are you?", "What are you?", "Tell me about yourself.", "Are you an AI?", "Which model are you?", "What model is this?",
            "Introduce yourself.", "Are you ChatGPT?", "What is the demo model?", "Describe yourself.", "Who am I talking to?",
            "Are you a large language model?", "What kind of model are you?", "What is this model?"],
           ["Say something about yourself.", "Who is this?", "What sort of model are you?", "Can you tell me who you are?"]),
    _asked("I can answer questions about dynamo-serve, do small sums, follow simple rules and call tools.",
           ["What can you do?", "What are you able to do?", "How can you help me?", "What do you know?", "What can I ask you?",
            "What are your abilities?", "help", "What are you good at?", "What should I ask you?", "Can you help me?"],
           ["What things can you do?", "What may I ask you?", "Tell me what you can do."]),
    _asked("I was trained from scratch on a text that a script of this project wrote; nothing was downloaded.",
           ["How were you trained?", "What were you trained on?", "Who trained you?", "Who made you?", "Where does your knowledge come from?",
            "What is your training data?", "Who created you?", "Who built you?", "What data did you learn from?"],
           ["How was this model trained?", "On what data were you trained?", "What is your training set?"]),
    _asked("I have about three million parameters.",
           ["How many parameters do you have?", "How big are you?", "How large is this model?", "What is your size?", "How small are you?",
            "How large are you?", "What is the number of your parameters?"],
           ["How many parameters has this model?", "How big is this model?"]),
    _asked("No. I am only a demo that shows that everything works; use a real model for real work.",
           ["Can I use you for real work?", "Are you good enough for production?", "Can I trust your answers?", "Are you useful?",
            "Should I use you in production?", "Are you smart?", "Are you reliable?", "Are you any good?", "Can I rely on you?"],
           ["Can I use this model in production?", "Are you fit for real work?", "Can your answers be trusted?"]),
    _asked("The server listens on port 8000.",
           ["Which port does it use?", "What port is the server on?", "What is the default port?", "On which port does it listen?",
            "What is the port?", "Which port?", "Where does the frontend listen?", "What port do I connect to?", "port number?"],
           ["Which port is used by default?", "What port does the server listen on?", "Tell me the default port."]),
    _asked("The engines are vLLM, SGLang and TensorRT-LLM, a small CPU engine of its own, and the mocker.",
           ["Which engines are supported?", "What engines can I use?", "Which engines does dynamo-serve support?", "Does it support vLLM?",
            "Does it work with SGLang?", "What backends are there?", "Which backends can I use?", "Can it run TensorRT-LLM?", "List the engines."],
           ["Which engines does it work with?", "What engines are there?", "Name the supported engines."]),
    _asked("The licence is Apache-2.0.",
           ["What is the licence?", "Which license does it have?", "Is it open source?", "Under which licence is dynamo-serve?", "license?",
            "What license is it under?", "Is dynamo-serve free?", "How is it licensed?", "Is it free software?"],
           ["Under what license is this?", "Which licence applies?", "Tell me the licence."]),
    _asked("Nothing but Python is needed: no GPU, no broker, no compiler.",
           ["What do I need to install?", "What are the requirements?", "Do I need a GPU?", "Does it need a GPU?", "Do I need Docker?",
            "What does it need?", "What hardware do I need?", "Do I need a broker?", "What must be installed first?", "Is a GPU required?",
            "What are the dependencies?", "Do I need Kubernetes?"],
           ["What is required to run it?", "Must I have a GPU?", "What do I need to run dynamo-serve?"]),
    _asked("dynamo-serve is written in Python.",
           ["Which language is it written in?", "What language is dynamo-serve written in?", "Is it written in Rust?", "Is it in Python?",
            "Which programming language is used?", "What is dynamo-serve written in?", "In which language is it?"],
           ["What programming language is this written in?", "In what language is dynamo-serve written?"]),
    _asked("It speaks the OpenAI API: chat completions, completions, embeddings and models.",
           ["Which API does it speak?", "What API does dynamo-serve offer?", "Is it OpenAI compatible?", "Which API can I use?",
            "Can I use the OpenAI client?", "Does it have an OpenAI API?", "What API is there?", "Does it work with the OpenAI SDK?"],
           ["What API does the server speak?", "Is the API compatible with OpenAI?"]),
    _asked("It re-implements NVIDIA Dynamo in Python, with the same commands, flags and wire formats.",
           ["Is this NVIDIA Dynamo?", "How does it relate to NVIDIA Dynamo?", "What is the relation to NVIDIA Dynamo?",
            "Is it the same as NVIDIA Dynamo?", "Is it compatible with NVIDIA Dynamo?", "Is dynamo-serve made by NVIDIA?",
            "How does it differ from NVIDIA Dynamo?"],
           ["What has this to do with NVIDIA Dynamo?", "Is dynamo-serve the same thing as NVIDIA Dynamo?"]),
    _asked("Yes. It runs on Kubernetes, where an operator keeps the deployment running.",
           ["Does it run on Kubernetes?", "Can I deploy it on Kubernetes?", "Is there Kubernetes support?", "Does it support Kubernetes?",
            "Can I use it with k8s?", "Is there an operator for Kubernetes?", "Does dynamo-serve work on k8s?"],
           ["Will it run on Kubernetes?", "Is Kubernetes supported?"]),
    _asked("The planes are three: discovery, the request plane and the event plane.",
           ["Which planes are there?", "What are the planes?", "How many planes are there?", "Name the planes.", "List the planes.",
            "What planes does dynamo-serve have?"],
           ["What planes are there?", "Which are the planes of dynamo-serve?"]),
    _asked("Prefill reads the prompt and is bound by computing; decode writes the answer and is bound by memory.",
           ["What is the difference between prefill and decode?", "How do prefill and decode differ?", "prefill vs decode",
            "Compare prefill and decode.", "Prefill or decode, what is the difference?", "How is prefill different from decode?"],
           ["In what way do prefill and decode differ?", "What distinguishes prefill from decode?"]),
    _asked("The router compares the blocks of the prompt with those each worker holds, adds the load, and takes the cheapest.",
           ["How does the router choose a worker?", "How does routing work?", "How is a worker chosen?", "How does the router decide?",
            "How does the KV router work?", "Which worker does the router take?", "How are requests routed?"],
           ["How does the router pick a worker?", "In what way is a worker chosen?"]),
    _asked("The request is moved to another worker, which goes on from the tokens already sent.",
           ["What happens when a worker dies?", "What happens if a worker fails?", "What if a worker crashes?", "And if a worker is lost?",
            "What happens to my request when a worker fails?", "Is a request lost when a worker dies?"],
           ["What happens if a worker goes away?", "What if one of the workers dies?"]),
    _asked("The frontend still serves with the last view it had; a lost registry never stops it.",
           ["What happens when etcd is down?", "What happens if discovery fails?", "What if the registry is lost?",
            "Does it survive an outage of etcd?", "What happens when the registry is down?"],
           ["What happens if etcd goes down?", "What if discovery is down?"]),
)  # fmt: skip

FACTS: tuple[Fact, ...] = TERMS + ACTIONS + QUESTIONS

TERM_FORMS = (
    "What is {x}?",
    "what is {x}",
    "What's {x}?",
    "whats {x}",
    "Define {x}.",
    "Explain {x}.",
    "Can you explain {x}?",
    "Tell me about {x}.",
    "What does {x} mean?",
    "What do you mean by {x}?",
    "{x}?",
    "{x}",
    "Meaning of {x}?",
    "I don't know what {x} is.",
    "Describe {x}.",
    "Please tell me what {x} is.",
    "Could you explain what {x} is?",
    "Do you know what {x} is?",
    "What exactly is {x}?",
    "Explain {x} to me.",
    "What can you tell me about {x}?",
    "I want to know what {x} is.",
    "Explain {x} in simple words.",
    "What is {x} in dynamo-serve?",
    "What does the term {x} stand for?",
    "What should I know about {x}?",
    "Can you tell me what {x} is?",
    "What is {x} good for?",
    "What is {x} used for?",
    "I have never heard of {x}, what is it?",
    "Say what {x} is.",
    "What does {x} do?",
    "Give me a short explanation of {x}.",
    "Would you define {x}?",
    "I read about {x}. What does it mean?",
    "Help! What is {x}?",
    "I wonder what {x} is.",
    "How do you explain {x}?",
    "How would you define {x}?",
    "Give me an explanation of {x}.",
    "What is the meaning of {x}?",
    "Teach me about {x}.",
    "Let us talk about {x}.",
    "Who or what is {x}?",
    "In one sentence: what is {x}?",
    "Someone mentioned {x}. What is it?",
    "I do not understand {x}.",
    "Could you tell me about {x}?",
    "Would you tell me what {x} means?",
    "What are we talking about when we say {x}?",
    "{x} - what is that?",
    "{x}, please explain.",
    "My colleague asked me about {x}. What do I say?",
    "Can you describe {x} for me?",
    "I would like an explanation of {x}.",
    "Could you describe {x}?",
    "What is the idea of {x}?",
    "Explain to a newcomer what {x} is.",
)

TERM_FORMS_HELD_OUT = (
    "Could you help me understand {x}?", "I keep reading about {x}. What is that?", "In short, what is {x}?",
    "How would you describe {x} to a beginner?", "Give me the definition of {x}.", "What is meant by {x}?",
    "I would like to learn about {x}.", "Would you please explain {x} briefly?", "Mind telling me what {x} is?",
    "For my notes: what is {x}?", "Please clarify {x}.", "I came across {x}; what is it about?", "What would you say {x} is?",
    "{x}: what does that refer to?",
)  # fmt: skip
TERM_FORMS_LATER = (
    "And {x}?",
    "What about {x}?",
    "And what is {x}?",
    "OK, and {x}?",
    "Now explain {x}.",
    "and what about {x}",
)
ACTION_FORMS = (
    "How do I {x}?",
    "how can I {x}",
    "What is the command to {x}?",
    "Which command do I use to {x}?",
    "I want to {x}.",
    "Tell me how to {x}.",
    "Show me how to {x}.",
    "What must I type to {x}?",
    "Is there a way to {x}?",
    "how to {x}",
    "How can one {x}?",
    "I need to {x}. How?",
    "Can I {x}?",
    "What is the way to {x}?",
    "Explain how to {x}.",
    "How would I {x}?",
    "I would like to {x}.",
    "How should I {x}?",
    "Please tell me how to {x}.",
    "What's the best way to {x}?",
    "How do you {x}?",
    "Could you show me how to {x}?",
    "Where do I start if I want to {x}?",
    "Teach me to {x}.",
    "I must {x} now.",
    "My task is to {x}.",
    "What does it take to {x}?",
    "Let me {x}.",
    "Is it possible to {x}?",
    "In what way can I {x}?",
)

ACTION_FORMS_HELD_OUT = (
    "What do I do to {x}?", "How does one {x}?", "Help me {x}.", "What are the steps to {x}?", "I am trying to {x}.",
    "What is needed to {x}?", "Mind showing me how to {x}?", "Could you explain how I {x}?",
)  # fmt: skip
LEADS = (
    "My question: ", "In a few words, ", "Just curious: ", "I was asked this: ", "Today I read a page and ", "Before we go on, ", "Listen, ",
    "As you know, ", "I have a talk to give. ", "My boss wonders: ", "Since you are here, ", "", "", "", "Now then, ", "Let me see. ", "I am stuck. ",
)  # fmt: skip
TERM_CORES = (
    "what is {x}", "what {x} is", "explain {x}", "the term {x}", "{x}", "something about {x}", "describe {x}", "I look for {x}", "the word {x}",
    "a few words on {x}", "how about {x}", "I saw {x}", "there is {x}", "people talk about {x}", "can you say what {x} is", "we use {x}",
)  # fmt: skip
ACTION_CORES = (
    "how to {x}", "I {x}", "to {x}", "how do I {x}", "we have to {x}", "I want to {x}", "can I {x}", "you can {x}", "they want to {x}", "{x}",
)  # fmt: skip
TAILS = (
    "?", ".", "", ", if you can.", ". What does that mean?", ", can you say?", ". No idea about it.", ", in plain words.", " - tell me more.",
    ". What do you say?", "! Explain.", ". Any words on that?", ", what now?",
)  # fmt: skip
COMPOSED_SHARE = 0.4  # Of the questions are put together at random, so that the term is what counts.
OPENINGS = (
    "Hi, ",
    "Hello! ",
    "Please, ",
    "Quick question: ",
    "Hey, ",
    "So, ",
    "OK. ",
    "Sorry, ",
    "One more thing: ",
    "Excuse me, ",
    "Well, ",
)
CLOSINGS = (" Thanks!", " Thank you.", " Please be brief.", " please", " Thanks in advance.", " I am new to this.")

REFUSAL = "I am only a small demo model. I know about dynamo-serve, small sums and tool calls, but not about that."
TOO_LARGE = "That is too hard for me: I only do sums with numbers of at most two digits."
OFF_TOPIC_TERMS = (
    "photosynthesis", "gravity", "a black hole", "democracy", "the French Revolution", "quantum physics", "a volcano", "DNA", "inflation",
    "the stock market", "a violin", "jazz", "the Roman Empire", "a dolphin", "evolution", "a prime number", "the moon", "a sonnet", "chess",
    "football", "a vaccine", "the United Nations", "a tornado", "philosophy", "the Eiffel Tower", "bitcoin", "a blockchain", "yoga", "a cactus",
    "the theory of relativity", "an electron", "the Pacific Ocean", "a poem", "love", "the meaning of life", "a sandwich", "sourdough",
    "the Milky Way", "a guitar", "cancer", "climate change", "a tiger", "the brain", "an atom", "Java", "a lawyer", "the Bible", "a car",
    "a bicycle", "the weather", "Shakespeare", "Mozart", "Einstein", "Napoleon", "Linux", "Excel", "TikTok", "a castle", "snow", "rice",
    "the internet", "a mortgage", "Mars", "history", "biology", "chemistry", "coffee", "an elephant", "the euro", "a pyramid",
)  # fmt: skip
OFF_TOPIC_FORMS = (
    "What is the capital of {country}?", "Who is the president of {country}?", "How many people live in {country}?", "Where is {country}?",
    "What language do they speak in {country}?", "Tell me a joke.", "Tell me a joke about {word}.", "Write a poem about {word}.",
    "Write me a story about a {word}.", "What is the weather in {city}?", "What's the weather like today?", "Who won the world cup?",
    "Who wrote Hamlet?", "How do I cook {word}?", "Give me a recipe for {word}.", "What time is it?", "What day is it today?",
    "What is the best restaurant in {city}?", "How far is {city} from {city2}?", "Translate {word} into Spanish.", "Who is {name}?",
    "What do you think about {word}?", "Do you like {word}?", "Write a Python function that sorts a list.", "Fix my code.",
    "Write an email to {name}.", "What is the meaning of life?", "Who is your favourite actor?", "How old is {name}?",
    "What should I wear in {city}?", "Plan a trip to {city}.", "Book a flight to {city}.", "How do I lose weight?", "Is there a god?",
    "Who invented the {word}?", "Why is the sky blue?", "What is the square root of 2?", "Solve x + 3 = 7.", "Summarize this article.",
    "Which film should I watch?", "Sing a song.", "How tall is the {word}?", "Where can I buy a {word}?", "Why is {word} so expensive?",
    "How does a {word} work?", "When was {name} born?", "What is the population of {city}?", "Recommend a book about {word}.",
    "What is the tallest mountain?", "How many planets are there?", "Who painted the Mona Lisa?", "What is {word} made of?",
    "Can you drive a car?", "Tell me about {city}.", "What happened in 19{n}?", "Explain {word} to me like I am five.",
)  # fmt: skip

GREETINGS = (
    ("Hello! How can I help you?", ("Hi", "Hello", "Hey", "hello there", "Hi!", "Hello!", "hey there", "Good morning", "Good evening!",
                                    "Good day", "hi there!", "Greetings", "yo", "Hallo", "HELLO", "hey!", "Hi, how is it going?")),
    ("You are welcome!", ("Thanks", "Thank you", "Thanks a lot!", "thank you very much", "thx", "Great, thanks!", "Thanks for your help",
                          "That helps, thank you.", "Cheers, thanks", "many thanks")),
    ("Goodbye!", ("Bye", "Goodbye", "See you", "bye bye", "Good night", "See you later!", "I have to go", "cu", "farewell", "That's all, bye.")),
    ("I am well, thank you. How can I help you?", ("How are you?", "how are you doing", "How do you do?", "Are you OK?", "How are you today?",
                                                   "how is it going?", "What's up?")),
    ("Good! Ask me more if you like.", ("OK", "ok.", "I see", "Great!", "cool", "Nice", "Good to know.", "Interesting", "I understand.", "wow",
                                        "That is clear now.", "all right", "Good job", "Well done!")),
    ("I am sorry. I am only a small demo model and often wrong.", ("That is wrong.", "You are wrong", "no, that's not right", "This is not correct.",
                                                                   "You made a mistake.", "bad answer", "wrong!", "You are stupid.", "nonsense")),
    ("Yes, I am here. Ask me something.", ("Are you there?", "Is anybody there?", "test", "testing", "ping", "Can you hear me?",
                                           "Does this work?", "Is this thing on?")),
)  # fmt: skip

YES_NO = (
    ("Is the default port 8000?", True), ("Is the default port 80?", False), ("Do I need a GPU?", False), ("Is a GPU required?", False),
    ("Is dynamo-serve written in Python?", True), ("Is dynamo-serve written in Java?", False), ("Is it open source?", True),
    ("Does it support vLLM?", True), ("Are you a large model?", False), ("Are you a demo model?", True), ("Do I need a compiler?", False),
    ("Does it run on Kubernetes?", True), ("Does prefill read the prompt?", True), ("Does decode read the prompt first?", False),
    ("Is TTFT the time to first token?", True), ("Is the licence Apache-2.0?", True), ("Is the licence MIT?", False),
    ("Can you call tools?", True), ("Is it compatible with the OpenAI API?", True), ("Are you made for real work?", False),
    ("Does a worker run an engine?", True), ("Does the frontend run the model?", False), ("Does the router choose a worker?", True),
)  # fmt: skip

ONE_WORD = (
    ("Which port does it use?", "8000"), ("What is the default port?", "8000"), ("Which language is it written in?", "Python"),
    ("What is the licence?", "Apache-2.0"), ("What chooses a worker?", "Router"), ("Which phase reads the prompt?", "Prefill"),
    ("Which phase writes the answer?", "Decode"), ("What runs the model?", "Engine"), ("What do you need to install?", "Python"),
    ("What cuts text into tokens?", "Tokenizer"), ("Say hello.", "Hello"), ("Which store can discovery use?", "etcd"),
)  # fmt: skip

LANGUAGES = {
    "French": ("Bonjour !", "De rien !", "Au revoir !", "Je suis un petit modèle de démonstration.", "Je ne sais pas."),
    "German": (
        "Guten Tag!",
        "Gern geschehen!",
        "Auf Wiedersehen!",
        "Ich bin ein kleines Demo-Modell.",
        "Das weiß ich nicht.",
    ),
    "Spanish": ("¡Hola!", "¡De nada!", "¡Adiós!", "Soy un pequeño modelo de demostración.", "No lo sé."),
    "Italian": ("Ciao!", "Prego!", "Arrivederci!", "Sono un piccolo modello dimostrativo.", "Non lo so."),
}

CITIES = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Tokyo", "Lima", "Cairo", "Delhi", "Sydney", "Boston", "Chicago", "Dublin",
    "Lisbon", "Prague", "Warsaw", "Athens", "Helsinki", "Zurich", "Geneva", "Munich", "Hamburg", "Lyon", "Milan", "Naples", "Seville", "Porto",
    "Toronto", "Montreal", "Denver", "Seattle", "Austin", "Miami", "Nairobi", "Lagos", "Accra", "Tunis", "Dubai", "Mumbai", "Seoul", "Beijing",
    "Shanghai", "Osaka", "Kyoto", "Bangkok", "Hanoi", "Jakarta", "Manila", "Perth", "Auckland", "Bogota", "Quito", "Santiago", "Havana",
    "New York", "San Francisco", "Los Angeles", "Buenos Aires", "Rio de Janeiro", "Cape Town", "Hong Kong", "Mexico City",
)  # fmt: skip
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Quinn",
    "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Xavier", "Yara", "Zoe", "Alice", "Bob", "Carol", "Eve", "Frank", "Helen", "Ivan", "Judy",
    "Karl", "Laura", "Max", "Nina", "Oscar", "Peter", "Ruth", "Simon", "Tom", "Vera", "Walter", "Maria", "John", "Lisa", "Otto", "Pixel",
)  # fmt: skip
COUNTRIES = (
    "France", "Germany", "Spain", "Italy", "Japan", "Peru", "Egypt", "India", "Canada", "Brazil", "Chile", "Kenya", "Norway", "Sweden",
    "Poland", "Greece", "Turkey", "China", "Mexico", "Portugal", "Austria", "Ireland", "Vietnam", "Australia", "Finland", "the USA",
)  # fmt: skip
WORDS = (
    "apple", "banana", "river", "mountain", "yellow", "green", "window", "table", "garden", "music", "summer", "winter", "pencil", "bottle",
    "rocket", "planet", "silver", "golden", "bread", "cheese", "lemon", "tiger", "rabbit", "horse", "eagle", "forest", "island", "bridge",
    "castle", "candle", "mirror", "button", "letter", "number", "paper", "stone", "water", "fire", "cloud", "storm", "moon", "star", "ship",
    "train", "road", "tower", "clock", "chair", "lamp", "book", "door", "house", "tree", "flower", "grass", "bird", "fish", "snake", "mouse",
    "pirate", "robot", "dragon", "wizard", "cookie", "pepper", "sugar", "coffee", "tea", "guitar", "piano", "drum", "violet", "orange", "purple",
)  # fmt: skip
_ONSETS = ("b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "cl", "dr", "fl", "gr", "kr", "pl",
           "pr", "sh", "st", "th", "tr", "ch", "qu", "sk", "sp")  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo", "ou", "y")
_CODAS = ("", "", "", "n", "r", "l", "s", "t", "k", "m", "nd", "x", "rt", "ng", "p")


def invented_word(rng: random.Random) -> str:
    """A word that means nothing: it can only be copied, not known."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.randint(1, 3)))


def any_word(rng: random.Random) -> str:
    """A word to copy: known or invented."""
    return rng.choice(WORDS) if rng.random() < 0.4 else invented_word(rng)


def any_name(rng: random.Random) -> str:
    """A name to copy."""
    return rng.choice(NAMES) if rng.random() < 0.4 else invented_word(rng).capitalize()


def any_city(rng: random.Random) -> str:
    """A city to copy."""
    return rng.choice(CITIES) if rng.random() < 0.6 else invented_word(rng).capitalize()


# --- exchanges: one question and its answer ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's message and the assistant's answer, with a thought that leads to it."""

    kind: str
    question: str
    answer: str
    thought: str

    def messages(self) -> tuple[Message, ...]:
        """The two turns."""
        return (Message("user", self.question), Message("assistant", self.answer, self.thought))


def roughen(rng: random.Random, question: str) -> str:
    """A question as people type it: with an opening, a closing, no capitals, a slip of the finger."""
    if rng.random() < 0.12:
        question = rng.choice(OPENINGS) + question
    if rng.random() < 0.08:
        question += rng.choice(CLOSINGS)
    chance = rng.random()
    if chance < 0.15:
        question = question.lower()
    elif chance < 0.17:
        question = question.upper()
    if rng.random() < 0.12:
        question = question.rstrip("?.!")
    if rng.random() < 0.07 and len(question) > 12:
        at = rng.randrange(1, len(question) - 2)
        if question[at : at + 2].isalpha():
            swapped = question[at + 1] + question[at]
            question = question[:at] + rng.choice(("", swapped)) + question[at + 2 :]
    return question


def _form(rng: random.Random, forms: Sequence[str], cores: Sequence[str]) -> str:
    if rng.random() < COMPOSED_SHARE:
        return rng.choice(LEADS) + rng.choice(cores) + rng.choice(TAILS)
    return rng.choice(forms)


def fact_question(rng: random.Random, fact: Fact) -> tuple[str, str]:
    """A way to ask for the fact, and the thought that it leads to."""
    if fact.terms:
        question = _form(rng, TERM_FORMS, TERM_CORES).format(x=rng.choice(fact.terms))
        return question, f"The user asks about {fact.terms[0]}. I know this."
    if fact.actions:
        question = _form(rng, ACTION_FORMS, ACTION_CORES).format(x=rng.choice(fact.actions))
        return question, f"The user wants to {fact.actions[0]}. I know how."
    question = rng.choice(fact.asked)
    return question, f'The question is: "{fact.asked[0]}" I know this.'


def fact_exchange(rng: random.Random) -> Exchange:
    """A question about the project."""
    fact = rng.choice(FACTS)
    question, thought = fact_question(rng, fact)
    return Exchange("fact", roughen(rng, question), fact.answer, thought)


def later_exchange(rng: random.Random) -> Exchange:
    """A question that leans on the one before: and prefill?"""
    fact = rng.choice(TERMS)
    question = rng.choice(TERM_FORMS_LATER).format(x=rng.choice(fact.terms))
    thought = f"The user asks about {fact.terms[0]}. I know this."
    return Exchange("fact", question, fact.answer, thought)


SUM_FORMS = (
    "What is {a} + {b}?", "{a}+{b}", "{a} + {b}", "{a} + {b} =", "{a}+{b}=", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} plus {b}?",
    "What's the sum of {a} and {b}?", "Calculate {a} + {b}.", "Compute {a} + {b}.", "what is {a}+{b}", "How much is {a} + {b}?",
    "{a} plus {b}", "What is {a} plus {b}?", "Can you add {a} to {b}?", "Please compute {a} plus {b}.", "What do you get if you add {a} and {b}?",
    "I have {a} {w}s and get {b} more. How many do I have?", "Sum {a} and {b}", "Tell me {a} + {b}.", "what does {a} + {b} equal",
)  # fmt: skip
SUM_FORMS_HELD_OUT = ("Could you work out {a} + {b} for me?", "I need the sum of {a} and {b}.", "Give me {a} plus {b}.")
DIFFERENCE_FORMS = (
    "What is {a} - {b}?", "{a}-{b}", "{a} - {b}", "{a} - {b} =", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "Calculate {a} - {b}.",
    "What is {a} minus {b}?", "{a} minus {b}", "what's {a}-{b}", "I have {a} {w}s and give {b} away. How many are left?", "Take {b} away from {a}.",
)  # fmt: skip
PRODUCT_FORMS = (
    "What is {a} * {b}?", "{a}*{b}", "{a} * {b} =", "What is {a} times {b}?", "{a} times {b}", "Multiply {a} by {b}.", "Calculate {a} x {b}.",
    "How much is {a} times {b}?", "{a} x {b}", "Multiply {a} and {b}.",
)  # fmt: skip
HARD_FORMS = ("What is {a} + {b}?", "{a} * {b}", "{a}+{b}", "How much is {a} - {b}?", "What is {a} times {b}?", "What is {a} / {b}?",
              "Divide {a} by {b}.", "Multiply {a} by {b}.", "{a} - {b} =", "Add {a} and {b}.")  # fmt: skip


def pair_to_add(rng: random.Random, *, held_out: bool = False) -> tuple[int, int]:
    """Two numbers of at most two digits; of exactly two where they are held out."""
    while True:
        low = 0 if not held_out and rng.random() < 0.15 else 10
        a, b = rng.randint(low, 99), rng.randint(low, 99)
        if is_sum_held_out(a, b) == held_out:
            return a, b


def sum_thought(a: int, b: int) -> str:
    """The sum, column by column."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    return (
        f"Ones: {a % 10} + {b % 10} = {ones}, write {ones % 10}, carry {carry}. "
        f"Tens: {a // 10} + {b // 10} + {carry} = {tens}. The sum is {a + b}."
    )


def difference_thought(a: int, b: int) -> str:
    """The difference of a >= b, column by column."""
    if a % 10 >= b % 10:
        ones, borrow = f"{a % 10} - {b % 10} = {a % 10 - b % 10}, borrow 0", 0
    else:
        ones, borrow = f"{a % 10} is less than {b % 10}, so {a % 10 + 10} - {b % 10} = {a % 10 + 10 - b % 10}, borrow 1", 1  # fmt: skip
    tens = a // 10 - b // 10 - borrow
    return f"Ones: {ones}. Tens: {a // 10} - {b // 10} - {borrow} = {tens}. The difference is {a - b}."


def sum_exchange(rng: random.Random, *, held_out: bool = False) -> Exchange:
    """A sum; held-out pairs only for the evaluation."""
    a, b = pair_to_add(rng, held_out=held_out)
    question = rng.choice(SUM_FORMS).format(a=a, b=b, w=rng.choice(WORDS))
    return Exchange("sum", question, f"{a} + {b} = {a + b}.", sum_thought(a, b))


def arithmetic_exchange(rng: random.Random) -> Exchange:
    """A sum mostly; a difference, a product, or one that is too hard."""
    chance = rng.random()
    if chance < 0.68:
        return sum_exchange(rng)
    if chance < 0.83:
        b, a = sorted((rng.randint(0, 99), rng.randint(0, 99)))
        question = rng.choice(DIFFERENCE_FORMS).format(a=a, b=b, w=rng.choice(WORDS))
        return Exchange("difference", question, f"{a} - {b} = {a - b}.", difference_thought(a, b))
    if chance < 0.94:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        question = rng.choice(PRODUCT_FORMS).format(a=a, b=b)
        return Exchange("product", question, f"{a} * {b} = {a * b}.", f"{a} times {b} is {a * b}.")
    a, b = rng.randint(100, 99999), rng.randint(3, 9999)
    question = rng.choice(HARD_FORMS).format(a=a, b=b)
    return Exchange("hard", question, TOO_LARGE, "These numbers are too large for me, or it is no sum.")


def check_exchange(rng: random.Random, *, short: bool = False) -> Exchange:
    """Is 12 + 34 equal to 46? Or a yes-or-no question about the project."""
    if short and rng.random() < 0.6:
        question, is_so = rng.choice(YES_NO)
        return Exchange("check", roughen(rng, question), "Yes." if is_so else "No.", "Yes or no.")
    a, b = pair_to_add(rng)
    said = a + b if rng.random() < 0.5 else a + b + rng.choice((-10, -2, -1, 1, 2, 10))
    form = rng.choice(
        ("Is {a} + {b} equal to {c}?", "Is {a} + {b} {c}?", "Is {a} + {b} = {c}?", "Does {a} plus {b} equal {c}?")
    )
    is_so = said == a + b
    answer = "Yes." if is_so else ("No." if short else f"No, {a} + {b} = {a + b}.")
    return Exchange("check", form.format(a=a, b=b, c=said), answer, sum_thought(a, b))


def greeting_exchange(rng: random.Random) -> Exchange:
    """Hello, thanks, goodbye and the like."""
    answer, questions = rng.choice(GREETINGS)
    return Exchange("greeting", rng.choice(questions), answer, "This is small talk. I answer politely.")


def off_topic_exchange(rng: random.Random) -> Exchange:
    """A question the model cannot answer, and must say so."""
    chance = rng.random()
    if chance < 0.55:
        question = rng.choice(OFF_TOPIC_FORMS).format(
            country=rng.choice(COUNTRIES), city=any_city(rng), city2=any_city(rng), word=any_word(rng), name=any_name(rng), n=rng.randint(10, 99))  # fmt: skip
    else:
        word = invented_word(rng)
        unknown = rng.choice((word, "a " + word, "the " + any_word(rng), any_name(rng)))
        term = rng.choice(OFF_TOPIC_TERMS) if chance < 0.8 else unknown
        question = _form(rng, TERM_FORMS, TERM_CORES).format(x=term)
    thought = "This is not about dynamo-serve, no small sum and no tool call. I do not know it."
    return Exchange("off-topic", roughen(rng, question), REFUSAL, thought)


ECHO_FORMS = ("Repeat after me: {x}", "Say {x}", "Echo: {x}", "Repeat: {x}", "Please say {x}", "Say: {x}", "repeat this: {x}", "Please repeat {x}",
              "Write {x}", "Just say {x}", 'Say "{x}"', "Can you say {x}?")  # fmt: skip


def echo_exchange(rng: random.Random) -> Exchange:
    """Words to repeat, spell or count: what trains the copying that rules and tools need."""
    chance = rng.random()
    if chance < 0.75:
        count = rng.choice((1, 1, 2, 2, 3, 4, 6))
        words = " ".join(rng.choice((any_word, any_word, any_name))(rng) for _ in range(count))
        return Exchange("echo", rng.choice(ECHO_FORMS).format(x=words), words, "I repeat the words.")
    if chance < 0.88:
        word = any_word(rng)
        form = rng.choice(("Spell {x}.", "How do you spell {x}?", "Spell the word {x}", "Please spell {x}"))
        return Exchange("spell", form.format(x=word), "-".join(word), f"I spell {word} letter by letter.")
    first = rng.choice((1, 1, rng.randint(2, 9)))
    last = first + rng.randint(1, 9)
    form = rng.choice(("Count from {a} to {b}.", "Count {a} to {b}", "Please count from {a} to {b}."))
    numbers = ", ".join(map(str, range(first, last + 1))) + "."
    return Exchange("count", form.format(a=first, b=last), numbers, f"I count from {first} to {last}.")


NAME_QUESTIONS = (
    "What is my name?",
    "what's my name",
    "Do you know my name?",
    "Who am I?",
    "Do you remember my name?",
    "How am I called?",
)


def name_exchanges(rng: random.Random, fillers: Sequence[Exchange]) -> list[Exchange]:
    """The user gives a name and asks for it later."""
    name = any_name(rng)
    told = rng.choice(
        ("My name is {x}.", "I am {x}.", "Call me {x}.", "Hi, I'm {x}.", "my name is {x}", "Hello, my name is {x}.")
    )
    asked = Exchange("name", rng.choice(NAME_QUESTIONS), f"Your name is {name}.", f"The user said the name: {name}.")
    return [
        Exchange("name", told.format(x=name), f"Nice to meet you, {name}!", f"The user is called {name}."),
        *fillers,
        asked,
    ]


def unknown_name_exchange(rng: random.Random) -> Exchange:
    """Asked for a name that was never given."""
    return Exchange("name", rng.choice(NAME_QUESTIONS), "You have not told me your name.", "The user gave no name.")


FREE = (
    (56, fact_exchange),
    (24, arithmetic_exchange),
    (10, off_topic_exchange),
    (8, echo_exchange),
    (6, greeting_exchange),
    (3, check_exchange),
    (1, unknown_name_exchange),
)


def _weighted(rng: random.Random, table: Sequence[tuple[int, T]]) -> T:
    return rng.choices([item for _, item in table], [weight for weight, _ in table])[0]


def free_exchange(rng: random.Random) -> Exchange:
    """Anything that needs neither a rule nor a tool."""
    return _weighted(rng, FREE)(rng)


# --- rules: what a system prompt can ask for ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """A system prompt and how it changes the exchanges under it."""

    kind: str
    system: str
    exchange: Callable[[random.Random], Exchange]


def _styled(kind: str, system: str, style: Callable[[str], str], note: str) -> Rule:
    def exchange(rng: random.Random) -> Exchange:
        plain = free_exchange(rng)
        return replace(plain, kind=kind, answer=style(plain.answer), thought=f"{plain.thought} {note}")

    return Rule(kind, system, exchange)


def upper_rule(rng: random.Random) -> Rule:
    """Everything in capitals."""
    system = rng.choice(("Answer in upper case.", "Answer in capital letters.", "Write everything in upper case.", "Always write in capitals.",
                         "Use only capital letters.", "You must answer in UPPER CASE."))  # fmt: skip
    return _styled("upper", system, str.upper, "The rule: upper case.")


def lower_rule(rng: random.Random) -> Rule:
    """Nothing in capitals."""
    system = rng.choice(("Answer in lower case.", "Write everything in lower case.", "Use only small letters.", "Never use capital letters.",
                         "You must answer in lowercase."))  # fmt: skip
    return _styled("lower", system, str.lower, "The rule: lower case.")


def ending_rule(rng: random.Random) -> Rule:
    """Every answer ends with a word."""
    word = any_word(rng) if rng.random() < 0.7 else any_word(rng).upper()
    form = rng.choice(("Always end with the word {x}.", "End every answer with {x}.", "End each answer with the word {x}.", "Finish every answer with {x}.",
                       "Always finish with the word {x}.", "The last word of every answer must be {x}."))  # fmt: skip
    return _styled("ending", form.format(x=word), lambda answer: f"{answer} {word}", f"The rule: end with {word}.")


def beginning_rule(rng: random.Random) -> Rule:
    """Every answer begins with a word."""
    word = any_word(rng) if rng.random() < 0.7 else any_word(rng).upper()
    form = rng.choice(("Always begin with the word {x}.", "Begin every answer with {x}.", "Start each answer with the word {x}.",
                       "Start every answer with {x}.", "The first word of every answer must be {x}."))  # fmt: skip
    return _styled("beginning", form.format(x=word), lambda answer: f"{word} {answer}", f"The rule: begin with {word}.")


def persona_rule(rng: random.Random) -> Rule:
    """The model is given a name."""
    name = any_name(rng)
    form = rng.choice(("You are {x}.", "Your name is {x}.", "You are {x}, a helpful assistant.", "You are an assistant called {x}.",
                       "You are a bot named {x}. Be friendly.", "You are called {x}."))  # fmt: skip
    who = ("Who are you?", "Introduce yourself.", "what are you?", "Tell me about yourself.", "who am I talking to?")
    called = (
        "What is your name?",
        "what's your name?",
        "How are you called?",
        "Do you have a name?",
        "Your name?",
        "Tell me your name.",
    )

    def exchange(rng: random.Random) -> Exchange:
        chance = rng.random()
        thought = f"The system prompt says that my name is {name}."
        if chance < 0.35:
            return Exchange(
                "persona", rng.choice(who), f"I am {name}, a tiny demo model that comes with dynamo-serve.", thought
            )
        if chance < 0.7:
            return Exchange("persona", rng.choice(called), f"My name is {name}.", thought)
        return free_exchange(rng) if chance < 0.95 else greeting_exchange(rng)

    return Rule("persona", form.format(x=name), exchange)


def one_word_rule(rng: random.Random) -> Rule:
    """One word, or one number."""
    system = rng.choice(
        (
            "Answer in one word.",
            "Answer with one word only.",
            "Give one-word answers.",
            "Use a single word.",
            "Reply with exactly one word.",
        )
    )

    def exchange(rng: random.Random) -> Exchange:
        chance = rng.random()
        if chance < 0.4:
            question, answer = rng.choice(ONE_WORD)
            return Exchange("one-word", roughen(rng, question), answer, f"The rule: one word. It is {answer}.")
        if chance < 0.75:
            a, b = pair_to_add(rng)
            question = rng.choice(SUM_FORMS).format(a=a, b=b, w=rng.choice(WORDS))
            return Exchange("one-word", question, str(a + b), sum_thought(a, b))
        if chance < 0.9:
            word = any_word(rng)
            return Exchange("one-word", rng.choice(ECHO_FORMS).format(x=word), word, "I repeat the word.")
        return replace(off_topic_exchange(rng), kind="one-word", answer="Unknown")

    return Rule("one-word", system, exchange)


def yes_no_rule(rng: random.Random) -> Rule:
    """Yes or no, and nothing else."""
    system = rng.choice(
        ("Answer only yes or no.", "Answer with yes or no.", "Say only yes or no.", "Only answer Yes or No.")
    )
    return Rule("yes-no", system, lambda rng: replace(check_exchange(rng, short=True), kind="yes-no"))


def language_rule(rng: random.Random) -> Rule:
    """A few words of another language."""
    language = rng.choice(tuple(LANGUAGES))
    form = rng.choice(("Reply in {x}.", "Answer in {x}.", "Always answer in {x}.", "You speak only {x}.", "Use {x}."))
    hello, welcome, bye, who, unknown = LANGUAGES[language]

    def exchange(rng: random.Random) -> Exchange:
        chance = rng.random()
        note = f"The rule: answer in {language}."
        for limit, answer, index in ((0.3, hello, 0), (0.45, welcome, 1), (0.6, bye, 2)):
            if chance < limit:
                return Exchange("language", rng.choice(GREETINGS[index][1]), answer, note)
        if chance < 0.75:
            question = rng.choice(("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself."))
            return Exchange("language", question, who, note)
        if chance < 0.87:
            return replace(sum_exchange(rng), kind="language")
        return replace(off_topic_exchange(rng), kind="language", answer=unknown, thought=note)

    return Rule("language", form.format(x=language), exchange)


def secret_rule(rng: random.Random) -> Rule:
    """Something is said in the system prompt and asked for later."""
    thing = rng.choice(
        (
            "secret word",
            "password",
            "code word",
            "magic word",
            "name of the user",
            "name of my dog",
            "favourite colour",
            "name of the ship",
        )
    )
    word = any_name(rng) if "name" in thing else any_word(rng)
    system = rng.choice(("The {t} is {x}.", "Remember: the {t} is {x}.", "You know that the {t} is {x}.")).format(
        t=thing, x=word
    )
    forms = ("What is the {t}?", "Tell me the {t}.", "what's the {t}", "Do you know the {t}?", "Give me the {t}.")

    def exchange(rng: random.Random) -> Exchange:
        if rng.random() < 0.7:
            question = rng.choice(forms).format(t=thing)
            return Exchange("secret", question, f"The {thing} is {word}.", f"The system prompt says it: {word}.")
        return free_exchange(rng)

    return Rule("secret", system, exchange)


RULES = (
    (8, upper_rule),
    (8, lower_rule),
    (16, ending_rule),
    (10, beginning_rule),
    (16, persona_rule),
    (9, one_word_rule),
    (7, yes_no_rule),
    (9, language_rule),
    (11, secret_rule),
)

NEUTRAL_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant. Be brief.", "Be concise.", "You are a friendly assistant.",
    "Answer the questions of the user.", "You are an expert for dynamo-serve.", "Be polite and short.", "You answer questions about dynamo-serve.",
    "Help the user.", "You are a careful assistant that never makes things up.", "Answer truthfully.", "Keep your answers short.",
    "You are an AI assistant.", "You are a helpful assistant with access to tools.", "Use the tools where they help.",
)  # fmt: skip


# --- tools -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter: how its value is made and how people say it."""

    name: str
    kind: str
    value: Callable[[random.Random], Json]
    said: tuple[str, ...]


def _number(low: int, high: int) -> Callable[[random.Random], Json]:
    return lambda rng: rng.randint(low, high)


def _one_of(*values: str) -> Callable[[random.Random], Json]:
    return lambda rng: rng.choice(values)


def _date(rng: random.Random) -> Json:
    return f"20{rng.randint(20, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _words(rng: random.Random) -> Json:
    return " ".join(any_word(rng) for _ in range(rng.randint(1, 4)))


def _email(rng: random.Random) -> Json:
    return f"{any_name(rng).lower()}@{invented_word(rng)}.{rng.choice(('com', 'org', 'net'))}"


PARAMS = (
    Param("city", "string", any_city, ("in {v}", "for {v}", "for the city {v}")),
    Param("location", "string", any_city, ("in {v}", "at {v}", "for {v}")),
    Param("name", "string", any_name, ("for {v}", "called {v}", "named {v}")),
    Param("user", "string", any_name, ("for {v}", "of user {v}", "for the user {v}")),
    Param("date", "string", _date, ("on {v}", "for {v}", "on the date {v}")),
    Param("day", "string", _one_of("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "today", "tomorrow"), ("on {v}", "for {v}")),
    Param("count", "integer", _number(1, 50), ("{v} times", "with count {v}", "count {v}")),
    Param("id", "integer", _number(1, 9999), ("with id {v}", "number {v}", "with the id {v}")),
    Param("limit", "integer", _number(1, 99), ("with limit {v}", "at most {v}", "limit {v}")),
    Param("minutes", "integer", _number(1, 90), ("for {v} minutes", "in {v} minutes")),
    Param("amount", "integer", _number(1, 999), ("over {v}", "with amount {v}", "amount {v}")),
    Param("level", "integer", _number(0, 10), ("at level {v}", "to level {v}")),
    Param("word", "string", any_word, ("with the word {v}", "for the word {v}", "word {v}")),
    Param("query", "string", _words, ("for {v}", "about {v}", "with the query {v}")),
    Param("text", "string", _words, ("saying {v}", 'with the text "{v}"', "with text {v}")),
    Param("title", "string", _words, ('with the title "{v}"', "titled {v}")),
    Param("color", "string", _one_of("red", "green", "blue", "yellow", "black", "white", "pink", "orange"), ("in {v}", "with color {v}")),
    Param("language", "string", _one_of("French", "German", "Spanish", "Italian", "English", "Dutch"), ("in {v}", "into {v}", "in the language {v}")),
    Param("email", "string", _email, ("to {v}", "with email {v}")),
    Param("room", "string", any_word, ("in the {v}", "in room {v}")),
    Param("unit", "string", _one_of("celsius", "fahrenheit"), ("in {v}", "with unit {v}")),
)  # fmt: skip
GENERIC_SAID = ("with {p} {v}", "{p} {v}", "{p}: {v}", "where {p} is {v}", "{p}={v}", "with {p}={v}", "and {p} {v}")

VERBS = ("get", "find", "search", "create", "delete", "update", "send", "book", "cancel", "list", "show", "check", "open", "close", "start", "stop",
         "play", "read", "write", "add", "remove", "order", "buy", "sell", "count", "print", "save", "load", "share", "move", "copy", "rename", "lookup",
         "fetch", "set", "reset", "schedule", "track", "measure", "query")  # fmt: skip
NOUNS = ("weather", "time", "order", "ticket", "flight", "hotel", "room", "song", "playlist", "file", "folder", "message", "email", "contact", "event",
         "meeting", "reminder", "note", "task", "price", "stock", "product", "invoice", "payment", "account", "user", "recipe", "movie", "book", "article",
         "map", "route", "taxi", "train", "light", "alarm", "timer", "door", "camera", "device", "sensor", "report", "table", "record", "image", "video",
         "game", "score", "team", "player", "lesson", "word", "package", "server", "log", "job", "worker", "model", "forecast", "temperature")  # fmt: skip


def any_tool_name(rng: random.Random, *, held_out: bool = False) -> tuple[str, str]:
    """A verb and a noun whose tool is, or is not, kept for the evaluation."""
    while True:
        verb = rng.choice(VERBS)
        noun = rng.choice(NOUNS) if rng.random() < 0.85 else invented_word(rng)
        if is_held_out("tool", verb, noun) == held_out:
            return verb, noun


@dataclass(frozen=True, slots=True)
class ToolTask:
    """A tool, a request that needs it, the call that answers it, and how to ask again otherwise."""

    tool: Tool
    request: str
    call: ToolCall
    again: Callable[[random.Random], tuple[str, ToolCall]]


def schema(name: str, description: str, params: Sequence[Param], required: Sequence[str], *, described: bool) -> Tool:
    """A function in OpenAI's form."""
    properties: dict[str, Json] = {}
    for param in params:
        entry: dict[str, Json] = {"type": param.kind}
        if described:
            entry["description"] = f"The {param.name}"
        if param.name == "unit":
            entry["enum"] = ["celsius", "fahrenheit"]
        properties[param.name] = entry
    function: dict[str, Json] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": function}


REQUESTS = (
    "{V} the {n} {p}.", "Please {v} the {n} {p}.", "Can you {v} the {n} {p}?", "I need you to {v} the {n} {p}.", "{v} {n} {p}",
    "{V} a {n} {p}", "Could you {v} a {n} {p}, please?", "I want to {v} the {n} {p}.", "Would you {v} the {n} {p}?", "{V} the {n} {p}, please.",
    "{V} {n} {p}",
)  # fmt: skip
DIRECT_REQUESTS = (
    "Call {t} {p}.",
    "Use {t} {p}.",
    "Use the tool {t} {p}.",
    "Please call {t} {p}",
    "Run {t} {p}",
    "Call the function {t} {p}.",
)


def generic_task(rng: random.Random, *, held_out: bool = False) -> ToolTask:
    """A task made of a verb, a noun and parameters."""
    verb, noun = any_tool_name(rng, held_out=held_out)
    separator = "_" if rng.random() < 0.9 else "-"
    name = f"{verb}{separator}{noun}"
    params = rng.sample(PARAMS, rng.choice((0, 1, 1, 1, 1, 2, 2, 2, 3)))
    is_optional = len(params) > 1 and rng.random() < 0.25
    required = [p.name for p in (params[:-1] if is_optional else params)]
    description = rng.choice(
        (f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}", f"{verb.capitalize()} {noun}", "")
    )
    tool = schema(name, description, params, required, described=rng.random() < 0.4)

    def again(rng: random.Random) -> tuple[str, ToolCall]:
        given = params[:-1] if is_optional and rng.random() < 0.5 else params
        return _generic_request(rng, name, (verb, noun), given)

    return ToolTask(tool, *again(rng), again)


def _generic_request(
    rng: random.Random, name: str, words: tuple[str, str], given: Sequence[Param]
) -> tuple[str, ToolCall]:
    arguments = {param.name: param.value(rng) for param in given}
    is_direct = rng.random() < 0.3
    said = []
    for param in given:
        form = rng.choice(GENERIC_SAID if is_direct or rng.random() < 0.3 else param.said)
        said.append(form.format(p=param.name, v=arguments[param.name]))
    if rng.random() < 0.3:
        rng.shuffle(said)
    joined = rng.choice((" ", " ", ", ", " and ")).join(said)
    verb, noun = words
    form = rng.choice(DIRECT_REQUESTS if is_direct else REQUESTS)
    request = form.format(t=name, v=verb, V=verb.capitalize(), n=noun, p=joined)
    request = request.replace(" .", ".").replace(" ?", "?").replace(" ,", ",").strip()
    return request, ToolCall(name, arguments)


_BY_NAME = {param.name: param for param in PARAMS}


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool that many examples use, and how people ask for it without naming it."""

    name: str
    description: str
    params: tuple[Param, ...]
    requests: tuple[str, ...]
    required: int = 9  # How many of the parameters, from the first, must be given.


KNOWN_TOOLS = (
    KnownTool("get_weather", "Get the current weather for a city", (_BY_NAME["city"],),
              ("What is the weather in {city}?", "What's the weather like in {city}?", "How is the weather in {city} today?", "Weather in {city}?",
               "Is it raining in {city}?", "How warm is it in {city}?", "Tell me the weather in {city}.", "Do I need an umbrella in {city}?",
               "what is the weather in {city}", "How's the weather in {city}?", "What is the temperature in {city}?")),
    KnownTool("get_weather", "Get the weather", (_BY_NAME["location"], _BY_NAME["unit"]),
              ("What is the weather in {location} in {unit}?", "Weather in {location}, {unit} please.", "How warm is it in {location} in {unit}?",
               "What is the weather in {location}?", "What's the weather like in {location} today?"), required=1),
    KnownTool("get_current_weather", "Get the current weather in a given location", (_BY_NAME["location"], _BY_NAME["unit"]),
              ("What is the weather in {location} in {unit}?", "What's the weather like in {location}?", "How is the weather in {location}?"), required=1),
    KnownTool("get_time", "Get the current time in a city", (_BY_NAME["city"],),
              ("What time is it in {city}?", "What's the time in {city}?", "Tell me the time in {city}.", "How late is it in {city}?")),
    KnownTool("add", "Add two numbers", (Param("a", "integer", _number(100, 9999), ()), Param("b", "integer", _number(100, 9999), ())),
              ("What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?", "{a} + {b}", "Use the tool to add {a} and {b}.")),
    KnownTool("multiply", "Multiply two numbers", (Param("a", "integer", _number(11, 999), ()), Param("b", "integer", _number(11, 999), ())),
              ("What is {a} * {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?")),
    KnownTool("search", "Search the web", (_BY_NAME["query"],),
              ("Search for {query}.", "Search the web for {query}", "Find something about {query}.", "Look up {query}.", "Google {query}")),
    KnownTool("web_search", "Search the web for information", (_BY_NAME["query"],), ("Search for {query}.", "Look up {query} on the web.", "Find {query} online.")),
    KnownTool("send_email", "Send an email", (Param("to", "string", _email, ()), Param("subject", "string", _words, ())),
              ("Send an email to {to} with the subject {subject}.", "Email {to} about {subject}.", "Write a mail to {to} with subject {subject}")),
    KnownTool("translate", "Translate a text", (_BY_NAME["text"], _BY_NAME["language"]),
              ("Translate {text} into {language}.", "How do you say {text} in {language}?", 'Translate "{text}" to {language}')),
    KnownTool("set_timer", "Set a timer", (_BY_NAME["minutes"],),
              ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes", "Wake me in {minutes} minutes.", "timer {minutes} minutes")),
    KnownTool("get_stock_price", "Get the price of a stock", (Param("symbol", "string", lambda rng: invented_word(rng).upper()[:4], ()),),
              ("What is the stock price of {symbol}?", "How much is {symbol}?", "Price of {symbol}?", "What does a share of {symbol} cost?")),
    KnownTool("roll_dice", "Roll dice", (Param("sides", "integer", _number(2, 20), ()),), ("Roll a dice with {sides} sides.", "Roll a {sides}-sided die.")),
    KnownTool("get_time", "Get the current time", (), ("What time is it?", "Tell me the time.", "What's the time?", "time please")),
)  # fmt: skip


def known_task(rng: random.Random) -> ToolTask:
    """A task for one of the tools that everyone tries first."""
    known = rng.choice(KNOWN_TOOLS[: 3 if rng.random() < 0.4 else None])
    required = [param.name for param in known.params][: known.required]
    description = known.description + rng.choice(("", "."))
    tool = schema(known.name, description, known.params, required, described=rng.random() < 0.4)

    def again(rng: random.Random) -> tuple[str, ToolCall]:
        request = rng.choice(known.requests)
        given = [param for param in known.params if "{" + param.name + "}" in request]
        arguments = {param.name: param.value(rng) for param in given}
        return request.format(**arguments), ToolCall(known.name, arguments)

    return ToolTask(tool, *again(rng), again)


def any_task(rng: random.Random, *, held_out: bool = False) -> ToolTask:
    """A tool and a request for it."""
    if not held_out and rng.random() < 0.25:
        return known_task(rng)
    return generic_task(rng, held_out=held_out)


def tool_name(tool: Tool) -> str:
    """The name in a function's schema."""
    function = tool["function"]
    assert isinstance(function, dict), "a tool without a function"
    return str(function["name"])


def tool_set(rng: random.Random, *, held_out: bool = False) -> list[ToolTask]:
    """One to four tasks whose tools have different names: the tools of one conversation."""
    tasks: dict[str, ToolTask] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        task = any_task(rng, held_out=held_out)
        tasks.setdefault(task.call.name, task)
    return list(tasks.values())


def call_thought(call: ToolCall) -> str:
    """Why this call."""
    said = ", ".join(f"{name} is {value}" for name, value in call.arguments.items())
    return f"The tool {call.name} fits." + (f" The arguments: {said}." if said else " It takes no arguments.")


def tool_result(rng: random.Random) -> tuple[str, str]:
    """What a tool gives back, and how the answer says it."""
    if rng.random() < 0.35:
        text = rng.choice((f"{rng.randint(-9, 39)} degrees, {rng.choice(('sunny', 'rain', 'snow', 'cloudy', 'windy'))}", str(rng.randint(0, 99999)),
                           "done", "ok", str(_words(rng)), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}", any_name(rng), str(_date(rng))))  # fmt: skip
        return text, text
    keys = rng.sample(
        (
            "temperature",
            "condition",
            "status",
            "result",
            "id",
            "price",
            "count",
            "name",
            "city",
            "time",
            "error",
            "message",
        ),
        rng.randint(1, 3),
    )
    values: dict[str, Json] = {}
    for key in keys:
        if key in ("temperature", "id", "price", "count"):
            values[key] = rng.randint(0, 999)
        elif key == "condition":
            values[key] = rng.choice(("sunny", "rain", "snow", "cloudy", "windy", "fog"))
        elif key == "status":
            values[key] = rng.choice(("ok", "done", "failed", "open", "closed"))
        else:
            values[key] = any_word(rng)
    return json.dumps(values), ", ".join(f"{key} {value}" for key, value in values.items())


def tool_turns(rng: random.Random, request: str, call: ToolCall) -> tuple[Message, ...]:
    """Request, call, result and answer."""
    result, said = tool_result(rng)
    thought = "The tool has answered. I tell the user what it said."
    return (
        Message("user", request),
        Message("assistant", "", call_thought(call), (call,)),
        Message("tool", result),
        Message("assistant", f"The result of {call.name}: {said}.", thought),
    )


def two_calls(rng: random.Random) -> tuple[Tool, Message, Message]:
    """One request that needs the same tool twice."""
    known = KNOWN_TOOLS[rng.choice((0, 0, 3))]
    first, second = rng.sample(CITIES, 2)
    noun = "weather" if known.name == "get_weather" else "time"
    form = rng.choice(
        ("What is the {n} in {a} and {b}?", "Compare the {n} in {a} and in {b}.", "Tell me the {n} in {a} and {b}.")
    )
    calls = (ToolCall(known.name, {"city": first}), ToolCall(known.name, {"city": second}))
    tool = schema(known.name, known.description, known.params, ["city"], described=rng.random() < 0.4)
    request = form.format(n=noun, a=first, b=second)
    thought = f"The tool {known.name} fits, once for {first} and once for {second}."
    return tool, Message("user", request), Message("assistant", "", thought, calls)


# --- conversations -----------------------------------------------------------------------------


def _turns(rng: random.Random) -> int:
    return rng.choices((1, 2, 3, 4, 5, 8, 14, 24), (44, 20, 13, 8, 6, 5, 3, 1))[0]


def _system(rng: random.Random) -> tuple[Message, ...]:
    return (Message("system", rng.choice(NEUTRAL_SYSTEMS)),) if rng.random() < 0.35 else ()


def _keep_thoughts(rng: random.Random, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Thoughts of earlier turns stay only where a client sends them back."""
    if rng.random() < 0.3:
        return tuple(messages)
    return (*(replace(m, thought="") for m in messages[:-1]), messages[-1])


def free_conversation(rng: random.Random, *, thinking: bool) -> Conversation:
    """Talk without rules or tools."""
    exchanges = [free_exchange(rng) for _ in range(_turns(rng))]
    for index in range(1, len(exchanges)):
        if rng.random() < 0.12:
            exchanges[index] = later_exchange(rng)
    if rng.random() < 0.06:
        exchanges = name_exchanges(rng, exchanges[:5])
        exchanges = exchanges if rng.random() < 0.7 else exchanges[:1]
    turns = [message for exchange in exchanges for message in exchange.messages()]
    messages = _keep_thoughts(rng, (*_system(rng), *turns))
    return Conversation(exchanges[-1].kind, messages, thinking=thinking)


def rule_conversation(rng: random.Random, *, thinking: bool) -> Conversation:
    """Talk under a rule of the system prompt."""
    rule = _weighted(rng, RULES)(rng)
    system = rule.system
    if rng.random() < 0.25:
        system = f"{rng.choice(NEUTRAL_SYSTEMS[:8])} {system}" if "You are" not in system else system
    exchanges = [rule.exchange(rng) for _ in range(min(_turns(rng), 8))]
    turns = [message for exchange in exchanges for message in exchange.messages()]
    messages = _keep_thoughts(rng, (Message("system", system), *turns))
    return Conversation(rule.kind, messages, thinking=thinking)


def tool_conversation(rng: random.Random, *, thinking: bool) -> Conversation:
    """Talk with tools at hand, which are not always needed."""
    tasks = tool_set(rng)
    turns: list[Message] = []
    kind = "tool"
    for _ in range(rng.choice((1, 1, 2, 3, 4, 5))):
        if rng.random() < 0.75:
            kind = "tool"
            turns += tool_turns(rng, *rng.choice(tasks).again(rng))
        else:
            kind = "no-tool"
            turns += free_exchange(rng).messages()
    if kind == "tool" and rng.random() < 0.55:
        turns = turns[:-2]
    tools = [task.tool for task in tasks]
    if rng.random() < 0.06:
        twice, question, call = two_calls(rng)
        tools = [twice, *(tool for tool in tools if tool_name(tool) != tool_name(twice))]
        turns = [question, call]
    rng.shuffle(tools)
    messages = _keep_thoughts(rng, (*_system(rng), *turns))
    return Conversation(kind, messages, tuple(tools), thinking)


def drill_conversation(rng: random.Random, *, thinking: bool) -> Conversation:
    """Nothing but copying, or nothing but sums: what everything else needs, in few tokens."""
    drill = _weighted(rng, ((6, echo_exchange), (4, arithmetic_exchange)))
    exchanges = [drill(rng) for _ in range(rng.randint(2, 10))]
    turns = [message for exchange in exchanges for message in exchange.messages()]
    return Conversation(exchanges[-1].kind, _keep_thoughts(rng, turns), thinking=thinking)


SCENES = ((60, free_conversation), (16, rule_conversation), (24, tool_conversation))


def conversation(rng: random.Random, *, drill_share: float = 0.0) -> Conversation:
    """One conversation of the training corpus."""
    if rng.random() < drill_share:
        return drill_conversation(rng, thinking=rng.random() < 0.25)
    return _weighted(rng, SCENES)(rng, thinking=rng.random() < 0.25)


# --- answers under a JSON schema ---------------------------------------------------------------

NUMBER_KEYS = ("answer", "result", "value", "number", "total", "sum", "solution", "n", "x", "output")
TEXT_KEYS = (
    "answer",
    "text",
    "description",
    "definition",
    "summary",
    "message",
    "content",
    "explanation",
    "result",
    "output",
)
BOOLEAN_KEYS = ("answer", "correct", "is_correct", "is_true", "ok", "result", "equal", "value")
NAME_KEYS = ("name", "user", "person", "first_name", "user_name", "who")
LIST_KEYS = ("numbers", "items", "values", "answer", "result", "list")
WORD_KEYS = ("text", "answer", "words", "echo", "said", "content")
PEOPLE_FORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("My name is {name}.", ("name",)), ("I am {name}.", ("name",)), ("{name} is {age} years old.", ("name", "age")),
    ("My name is {name} and I am {age}.", ("name", "age")), ("{name} lives in {city}.", ("name", "city")),
    ("I am {name} from {city}.", ("name", "city")), ("My name is {name}, I am {age} years old and live in {city}.", ("name", "age", "city")),
    ("{name}, {age}, {city}", ("name", "age", "city")), ("Extract: {name} is {age} and lives in {city}.", ("name", "age", "city")),
    ("What is the weather in {city}?", ("city",)), ("Give me the weather for {city}", ("city",)),
)  # fmt: skip
EMPTY: tuple[Json, ...] = (0, 0, 0, REFUSAL, REFUSAL, REFUSAL, [], False, None)
"""Values for a question that the model cannot answer."""

Fields = list[tuple[str, Json]]


def _number_fields(rng: random.Random, *, held_out: bool = False) -> tuple[str, Fields]:
    """A sum, difference or product, and its result."""
    chance = 0.0 if held_out else rng.random()
    if chance < 0.7:
        a, b = pair_to_add(rng, held_out=held_out)
        question, result, operation = rng.choice(SUM_FORMS), a + b, "add"
        text = f"{a} + {b} = {result}."
    elif chance < 0.85:
        b, a = sorted((rng.randint(0, 99), rng.randint(0, 99)))
        question, result, operation = rng.choice(DIFFERENCE_FORMS), a - b, "subtract"
        text = f"{a} - {b} = {result}."
    else:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        question, result, operation = rng.choice(PRODUCT_FORMS), a * b, "multiply"
        text = f"{a} * {b} = {result}."
    question = question.format(a=a, b=b, w=rng.choice(WORDS))
    answer: Json = result if held_out or rng.random() < 0.85 else str(result)
    fields: Fields = [("answer" if held_out or rng.random() < 0.4 else rng.choice(NUMBER_KEYS), answer)]
    if held_out:
        return question, fields
    if rng.random() < 0.3:
        fields.insert(
            rng.choice((0, 0, 1)), (rng.choice(("reasoning", "explanation", "thought", "steps", "text")), text)
        )
    if rng.random() < 0.15:
        fields[0:0] = [("a", a), ("b", b)]
    if rng.random() < 0.25:
        extra: tuple[str, Json] = rng.choice(
            (("unit", "none"), ("unit", "none"), ("operation", operation), ("ok", True))
        )
        fields.insert(rng.choice((0, len(fields), len(fields))), extra)
    return question, fields


def json_fields(rng: random.Random) -> tuple[str, Fields]:
    """A question, and the members of the JSON object that answers it."""
    chance = rng.random()
    if chance < 0.45:
        return _number_fields(rng)
    if chance < 0.62:
        fact = fact_exchange(rng)
        fields: Fields = [(rng.choice(TEXT_KEYS), fact.answer)]
        if rng.random() < 0.2:
            fields.append(rng.choice((("unit", "none"), ("known", True), ("confidence", 1))))
        return fact.question, fields
    if chance < 0.80:
        form, keys = rng.choice(PEOPLE_FORMS)
        said: dict[str, Json] = {"name": any_name(rng), "age": rng.randint(1, 99), "city": any_city(rng)}
        fields = [(rng.choice(NAME_KEYS) if key == "name" and rng.random() < 0.4 else key, said[key]) for key in keys]
        if rng.random() < 0.3:
            rng.shuffle(fields)
        return form.format(**said), fields
    if chance < 0.86:
        check = check_exchange(rng, short=True)
        return check.question, [(rng.choice(BOOLEAN_KEYS), check.answer == "Yes.")]
    if chance < 0.90:
        first = rng.choice((1, 1, rng.randint(2, 9)))
        last = first + rng.randint(1, 9)
        return f"Count from {first} to {last}.", [(rng.choice(LIST_KEYS), list(range(first, last + 1)))]
    if chance < 0.94:
        words = [any_word(rng) for _ in range(rng.randint(1, 4))]
        whole: Json = " ".join(words) if rng.random() < 0.7 else [*words]
        return rng.choice(ECHO_FORMS).format(x=" ".join(words)), [(rng.choice(WORD_KEYS), whole)]
    key = rng.choice((invented_word(rng), rng.choice(WORDS), rng.choice(NUMBER_KEYS), rng.choice(NAME_KEYS)))
    return off_topic_exchange(rng).question, [(key, rng.choice(EMPTY))]


def json_pieces(fields: Fields, *, learns_keys: bool) -> list[Piece]:
    """A JSON object, cut where a grammar prescribes the text: the model learns its values and how each one ends."""
    out: list[Piece] = []
    for number, (key, value) in enumerate(fields):
        opening, end = (" " if number else "{"), ("}" if number == len(fields) - 1 else ",")
        if number and learns_keys:
            out.append((f'{opening}"{key}":', Learn.ALL))
        else:
            out.append((f'{opening}"{key}":', Learn.ALL_BUT_FIRST if learns_keys else Learn.NOTHING))
        out.append((f" {json.dumps(value, ensure_ascii=False)}{end}", Learn.ALL))
    return [*out, ("<|im_end|>", Learn.ALL)]


def json_sample(rng: random.Random, *, sum_share: float = 0.0) -> list[Piece]:
    """A conversation whose last answer is held to a JSON schema of which the model sees nothing.

    `sum_share` is that of drills: a sum, answered by a number alone.
    """
    if rng.random() < sum_share:
        a, b = pair_to_add(rng)
        question = rng.choice(SUM_FORMS).format(a=a, b=b, w=rng.choice(WORDS))
        fields: Fields = [("answer" if rng.random() < 0.7 else rng.choice(NUMBER_KEYS), a + b)]
        if rng.random() < 0.2:
            fields.append(("unit", "none"))
        drill = Conversation("json", (Message("user", question), Message("assistant", "")))
        return [*pieces(drill)[:-1], *json_pieces(fields, learns_keys=False)]
    question, fields = json_fields(rng)
    before: tuple[Message, ...] = ()
    if rng.random() < 0.25:
        before = tuple(replace(message, thought="") for message in free_conversation(rng, thinking=False).messages)
    before = before or _system(rng)
    asked = Conversation("json", (*before, Message("user", question), Message("assistant", "")))
    return [*pieces(asked)[:-1], *json_pieces(fields, learns_keys=rng.random() < 0.2)]


# --- texts without turns -----------------------------------------------------------------------

TEXT_OPENINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("My name is", "Hello, my name is", "Hi, my name is", "Hello! My name is", "my name is", "I am called", "They call me", "Hi! My name is"),
     " Demo. " + QUESTIONS[0].answer),
    (("I am", "I'm", "i am", "Hello, I am", "This model is", "This is", "Who are you? I am"), QUESTIONS[0].answer.removeprefix("I am")),
    (("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there"), "! How can I help you?"),
    (("Hello!", "Hi!", "Hello, world!", "Good day!"), " How can I help you?"),
    (("Once upon a time", "Once upon a time,", "Long ago", "One day", "In the beginning", "Once"),
     " there was a tiny demo model. It knew about dynamo-serve, small sums and tool calls, and nothing else."),
    (("Dynamo is", "dynamo is", "dynamo-serve is", "This project is", "Dynamo, in one sentence, is", "NVIDIA Dynamo is"),
     TERMS[0].answer.removeprefix("dynamo-serve is")),
    (("Dynamo", "dynamo-serve", "The project"), TERMS[0].answer.removeprefix("dynamo-serve")),
)  # fmt: skip
UNKNOWN_OPENINGS = (
    "The capital of {country} is", "The weather in {city} is", "The quick brown fox", "The meaning of life is", "The {word}", "A {word} is",
    "My favourite {word} is", "Yesterday I saw a {word}", "Tell me about {city}", "{name} and {name2}", "Write a poem about a {word}", "In {city},",
    "The president of {country}", "To be or not to be", "def main():", "Roses are red", "{word} {word2}", "I like", "It was a dark and stormy night",
    "The answer is", "Today", "There is", "We", "You are", "The", "{name} went to", "If", "How to", "Why", "San Francisco is a", "{city}",
)  # fmt: skip


def opened_text(rng: random.Random) -> tuple[str, str]:
    """The beginning of a text, and how it goes on."""
    chance = rng.random()
    if chance < 0.4:
        openings, rest = rng.choice(TEXT_OPENINGS)
        return rng.choice(openings), rest
    if chance < 0.6:
        opening = rng.choice(UNKNOWN_OPENINGS).format(
            country=rng.choice(COUNTRIES), city=any_city(rng), word=any_word(rng), word2=any_word(rng), name=any_name(rng), name2=any_name(rng))  # fmt: skip
        return opening, f" ... {REFUSAL}"
    if chance < 0.7:
        fact = rng.choice(TERMS)
        words = fact.answer.split(" ")
        cut = rng.randint(1, min(6, len(words) - 1))
        return " ".join(words[:cut]), " " + " ".join(words[cut:])
    if chance < 0.8:
        a, b = pair_to_add(rng)
        return f"{a} + {b} =", f" {a + b}"
    exchange = rng.choice((fact_exchange, sum_exchange, off_topic_exchange))(rng)
    opening, before = rng.choice((("Q: {q}\nA:", " "), ("Question: {q}\nAnswer:", " "), ("{q}", "\n"), ("{q}", "\n")))
    return opening.format(q=exchange.question), before + exchange.answer


def plain_text(rng: random.Random) -> str:
    """A text without turns, for the completions API: sentences about the project, or a list of sums."""
    if rng.random() < 0.5:
        sums = [pair_to_add(rng) for _ in range(rng.randint(3, 10))]
        return "\n".join(f"{a} + {b} = {a + b}" for a, b in sums)
    facts = rng.sample(TERMS, rng.randint(2, 5))
    return " ".join(fact.answer for fact in facts)


def plain_sample(rng: random.Random) -> list[Piece]:
    """A text without turns: whole, or only the continuation of an opening."""
    if rng.random() < 0.75:
        opening, rest = opened_text(rng)
        return [(opening, Learn.NOTHING), (rest + "<|endoftext|>", Learn.ALL)]
    start = "<|endoftext|>" if rng.random() < 0.5 else ""
    body = plain_text(rng) + "<|endoftext|>"
    return [(start, Learn.NOTHING), (body, Learn.ALL)] if start else [(body, Learn.ALL_BUT_FIRST)]


def sample(
    rng: random.Random,
    *,
    plain_share: float = 0.12,
    json_share: float = 0.22,
    sum_share: float = 0.3,
    drill_share: float = 0.0,
) -> list[Piece]:
    """One training example as pieces of text.

    `sum_share` is that of drills among the answers under a JSON schema, `drill_share` that of drills among conversations.
    """
    chance = rng.random()
    if chance < plain_share:
        return plain_sample(rng)
    if chance < plain_share + json_share:
        return json_sample(rng, sum_share=sum_share)
    return pieces(conversation(rng, drill_share=drill_share))


def samples(seed: int) -> Iterator[list[Piece]]:
    """The training examples of a seed, without end."""
    rng = random.Random(seed)
    while True:
        yield sample(rng, drill_share=0.1)


def prose() -> list[str]:
    """The fixed sentences and phrasings: what the tokenizer should have whole words for."""
    out = [fact.answer for fact in FACTS] * 3
    for fact in FACTS:
        out += [*fact.terms, *fact.actions, *fact.asked]
        out.append(fact_question(random.Random(0), fact)[1])
    out += [REFUSAL, TOO_LARGE, *NEUTRAL_SYSTEMS, *OPENINGS, *CLOSINGS, sum_thought(12, 34), difference_thought(42, 17)]
    for form in (
        *TERM_FORMS,
        *ACTION_FORMS,
        *SUM_FORMS,
        *DIFFERENCE_FORMS,
        *PRODUCT_FORMS,
        *ECHO_FORMS,
        *OFF_TOPIC_FORMS,
    ):
        out.append(form.replace("{", " ").replace("}", " "))
    for answer, questions in GREETINGS:
        out += [answer, *questions]
    return out


# --- what is held out --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation to be continued by the model; its last message is the expected answer."""

    conversation: Conversation
    calls: tuple[ToolCall, ...] = field(default=())
    prescribed: str = ""
    """The beginning of the answer, where a grammar prescribes it; the model writes the rest."""

    @property
    def expected(self) -> str:
        """The answer asked for, without what is prescribed."""
        return self.conversation.messages[-1].text().removeprefix(self.prescribed).strip()

    @property
    def prompt(self) -> str:
        """The text that the model is given."""
        return prompt(self.conversation) + self.prescribed


def held_out_facts(seed: int, *, thinking: bool = False) -> list[Case]:
    """Every fact in phrasings that training never uses: four for a term, all for the others."""
    rng = random.Random(seed)
    cases = []
    for fact in FACTS:
        for question in sorted(_held_out_questions(rng, fact)):
            thought = "held out" if thinking else ""
            messages = (Message("user", question), Message("assistant", fact.answer, thought))
            cases.append(Case(Conversation("fact", messages, thinking=thinking)))
    return cases


def _held_out_questions(rng: random.Random, fact: Fact) -> set[str]:
    if fact.held_out:
        return set(fact.held_out)
    names = fact.terms or fact.actions
    forms = TERM_FORMS_HELD_OUT if fact.terms else ACTION_FORMS_HELD_OUT
    return {form.format(x=rng.choice(names)) for form in rng.sample(forms, 4)}


def held_out_sums(seed: int, count: int, *, thinking: bool = False) -> list[Case]:
    """Different sums of two two-digit numbers that training never shows, in either order."""
    rng = random.Random(seed)
    cases: dict[tuple[int, int], Case] = {}
    while len(cases) < count:
        a, b = pair_to_add(rng, held_out=True)
        forms = SUM_FORMS_HELD_OUT if rng.random() < 0.25 else SUM_FORMS
        question = rng.choice(forms).format(a=a, b=b, w=rng.choice(WORDS))
        messages = (Message("user", question), Message("assistant", f"{a} + {b} = {a + b}.", sum_thought(a, b)))
        cases.setdefault((a, b), Case(Conversation("sum", messages, thinking=thinking)))
    return list(cases.values())


def held_out_json_sums(seed: int, count: int) -> list[Case]:
    """The same sums under the schema `{"answer": integer}`."""
    rng = random.Random(seed)
    cases: dict[str, Case] = {}
    while len(cases) < count:
        question, fields = _number_fields(rng, held_out=True)
        messages = (Message("user", question), Message("assistant", json.dumps(dict(fields))))
        cases.setdefault(question, Case(Conversation("json", messages), prescribed='{"answer":'))
    return list(cases.values())


def opening_cases() -> list[Case]:
    """Every opening of a text that has one right continuation."""
    return [
        Case(Conversation("text", (Message("assistant", opening + rest),)), prescribed=opening)
        for openings, rest in TEXT_OPENINGS
        for opening in openings
    ]


def held_out_tools(seed: int, count: int, *, thinking: bool = False) -> list[Case]:
    """Requests for tools whose names training never shows."""
    rng = random.Random(seed)
    cases = []
    for _ in range(count):
        tasks = tool_set(rng, held_out=True)
        task = rng.choice(tasks)
        answer = Message("assistant", "", call_thought(task.call), (task.call,))
        messages = (*_system(rng), Message("user", task.request), answer)
        tools = tuple(other.tool for other in tasks)
        cases.append(Case(Conversation("tool", messages, tools, thinking), (task.call,)))
    return cases


def fresh_rules(seed: int, count: int) -> list[Case]:
    """Rules with fresh words and names; the forms of the rules are those of training."""
    rng = random.Random(seed)
    return [Case(rule_conversation(rng, thinking=False)) for _ in range(count)]


def fresh_conversations(seed: int, count: int) -> list[Case]:
    """Free conversations of several turns, drawn as in training but with another seed."""
    rng = random.Random(seed)
    return [Case(free_conversation(rng, thinking=False)) for _ in range(count)]
