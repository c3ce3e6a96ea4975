"""`dynamo-run in=… out=…`: upstream's former command line, mapped onto `dynamo serve`, `dynamo chat` and the processes of a graph."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.cli.external import KINDS
from dynamo.cli.machine import reserve_port
from dynamo.core.config import environ, exit_on_config_error
from dynamo.core.errors import ConfigError, DynamoException, StartupError
from dynamo.core.parent import VARIABLE
from dynamo.core.progress import activity

HELP = """\
dynamo-run: upstream's former command line, as commands of today

usage: dynamo-run [in=INPUT] [out=ENGINE] [MODEL] [flags]

  in=text                  chat in this terminal (default)
  in=stdin                 one prompt: the standard input up to its end
  in=batch:FILE            a prompt in each line of FILE, {"text": "..."}; responses go to output.jsonl in its directory
  in=http                  serve the OpenAI API; the same as dynamo serve
  in=dyn://NS.COMP.ENDP    one worker of this endpoint, for a frontend elsewhere

  out=cpu                  the embedded engine; without MODEL its demo model (default)
  out=mocker               a simulated engine with random tokens
  out=vllm|sglang|trtllm   this engine, with its own flags
  out=auto                 workers of other processes, found by discovery (also out=dyn)

The flags are those of dynamo serve, of the engine, or, with out=auto, of python -m dynamo.frontend.

  dynamo-run DIR                                  chat with a checkpoint
  dynamo-run in=http out=mocker --http-port 8000  serve a simulated engine
  dynamo-run in=dyn://dynamo.backend.generate out=cpu DIR
  dynamo-run in=text out=auto                     chat with that worker
"""
ENGINES = ("cpu", "mocker", *(one for one in KINDS if one != "openai_proxy"))
ALIASES = {"echo": "mocker", "echo_core": "mocker", "echo_full": "mocker", "mistralrs": "cpu", "llamacpp": "cpu"}
"""Engines of the former command that this project does not have, and their closest relative here."""
RENAMED = {"--model-config": "--model-path", "--num-nodes": "--nnodes"}
OWN_FLAGS = ("--http-port", "--http-host", "--router-mode", "--workers", "--prefill-workers", "--verbose")
READY_S, POLL_S = 3600.0, 0.2
END_S = 60.0
HEALTH_TIMEOUT_S = 2.0
TOKENS_MAX = 256
"""Output tokens of a prompt of a file, and of the simulated engine, which ends no response by itself."""
OUTPUT = "output.jsonl"
DYN = "dyn://"
ENDPOINT = "dyn://NAMESPACE.COMPONENT.ENDPOINT"
LOCALHOST = "127.0.0.1"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerCommand:
    """A parsed command line of `dynamo-run`."""

    source: str
    target: str
    model: str | None
    flags: tuple[str, ...]

    @property
    def serve(self) -> list[str]:
        """Return the arguments of `dynamo serve`. Flags that it does not know are the engine's."""
        own, others = split_flags(self.flags)
        words = [*([self.model] if self.model else []), "--engine", self.target, *own]
        if self.target in KINDS:
            return [*words, *(["--", *others] if others else [])]
        return [*words, *others]

    @property
    def process(self) -> list[str]:
        """Return the arguments of Python for one process: a worker of an endpoint, or a frontend that finds workers."""
        if self.source.startswith(DYN):
            model = (
                ["--model" if self.target in {"vllm", "trtllm"} else "--model-path", self.model] if self.model else []
            )
            return ["-m", f"dynamo.{self.target}", "--endpoint", self.source, *model, *self.flags]
        return ["-m", "dynamo.frontend", *self.flags]


def parse(argv: Sequence[str]) -> FormerCommand:
    """Return a parsed command line. Raise `ConfigError`."""
    words = list(argv)
    source = next((word[3:] for word in words if word.startswith("in=")), "text")
    given = next((word[4:] for word in words if word.startswith("out=")), "cpu")
    rest = [RENAMED.get(word, word) for word in words if not word.startswith(("in=", "out="))]
    if source not in {"http", "text", "stdin"} and not source.startswith(("batch:", DYN)):
        raise ConfigError(f"in={source}: must be http, text, stdin, batch:FILE or {ENDPOINT}")
    if source.startswith(DYN) and not is_endpoint(source):
        raise ConfigError(f"in={source}: expected {ENDPOINT}")
    target = "auto" if given == "dyn" or given.startswith(DYN) else ALIASES.get(given, given)
    if target != "auto" and target not in ENGINES:
        raise ConfigError(f"out={given}: must be {', '.join(ENGINES)} or auto")
    if target == "auto" and source.startswith(DYN):
        raise ConfigError(f"in={source} out={given}: a worker needs an engine; out must be {', '.join(ENGINES)}")
    model = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if target == "auto" and model is not None:
        raise ConfigError(f"out={given} {model}: the workers have models of their own; expected no MODEL")
    return FormerCommand(source=source, target=target, model=model, flags=tuple(rest))


def is_endpoint(text: str) -> bool:
    """Return whether a text is `dyn://` with a namespace, a component and an endpoint."""
    parts = text.removeprefix(DYN).split(".")
    return len(parts) >= 3 and all(parts)


def split_flags(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of `dynamo serve`, each with its value, and the others."""
    own: list[str] = []
    others: list[str] = []
    at = 0
    while at < len(flags):
        word = flags[at]
        name, equals, _ = word.partition("=")
        takes_value = not equals and name != "--verbose" and at + 1 < len(flags) and not flags[at + 1].startswith("-")
        chosen = own if name in OWN_FLAGS else others
        chosen += flags[at : at + 1 + takes_value]
        at += 1 + takes_value
    return own, others


def run(argv: Sequence[str]) -> int:
    """Run `dynamo-run`; return the exit status."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(HELP, end="")
        return 0
    command = parse(argv)
    if command.source == "http" and command.target != "auto":
        return _replace_process(["-m", "dynamo.cli", "serve", *command.serve])
    if command.source == "http" or command.source.startswith(DYN):
        return _replace_process(command.process)
    try:
        return _with_server(command)
    except KeyboardInterrupt:
        return INTERRUPTED


def _replace_process(arguments: Sequence[str]) -> int:
    """Become another program of this interpreter."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", *arguments])  # noqa: S606 -- a list of arguments, no shell


def _with_server(command: FormerCommand) -> int:
    """Start a server for one conversation, one prompt or one file, and end it afterwards."""
    path = Path(command.source.removeprefix("batch:")) if command.source.startswith("batch:") else None
    prompts = [] if path is None else read_prompts(path)
    prompt = sys.stdin.read().strip() if command.source == "stdin" else ""
    if command.source == "stdin" and not prompt:
        raise ConfigError("in=stdin: the standard input has no prompt")
    name = f"dynamo-run-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        arguments, url = ["-m", "dynamo.cli", "serve", "--name", name, "--http-port", "0", *command.serve], ""
        if command.target == "auto":
            reserved = stack.enter_context(contextlib.closing(reserve_port(LOCALHOST, 0)))
            url = f"http://{LOCALHOST}:{reserved.getsockname()[1]}"
            address = ["--http-host", LOCALHOST, "--http-port", url.rpartition(":")[2]]
            arguments = [*command.process, *address]
        server = stack.enter_context(_server(arguments))
        with activity(f"starting {command.model or command.target}") as show:
            if url:
                show("waiting for a worker of this discovery")
                model = _await_model(server, url)
            else:
                url, model = _await_server(server, name)
        limits = {"max_tokens": TOKENS_MAX} if path is not None or command.target == "mocker" else {}
        if path is not None:
            return _batch(url, model, path, prompts)
        if prompt:
            return _complete(url, model, prompt, limits)
        from dynamo.cli.chat import chat

        return chat(["--url", url, *(f"--max-tokens={value}" for value in limits.values())])


@contextlib.contextmanager
def _server(arguments: Sequence[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a server for the block. Ctrl-C does not reach it: it interrupts a response, and the server ends with the block."""
    server = subprocess.Popen(  # noqa: S603 -- a list of arguments, no shell
        [sys.executable, "-P", *arguments],
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**environ(), VARIABLE: str(os.getpid())},
        process_group=0,
    )
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _await_server(server: "subprocess.Popen[bytes]", name: str) -> tuple[str, str]:
    """Return URL and model of the server once it serves. Raise `StartupError` if it ends."""
    from dynamo.ops.graphs import GraphState, find_graphs

    deadline = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < deadline:
        for graph in find_graphs():
            if graph.record.name == name and graph.is_running and graph.record.state is GraphState.SERVING:
                return graph.record.url, graph.record.model
        time.sleep(POLL_S)
    raise StartupError(f"dynamo serve ended with status {server.poll()} before it was ready")


def _await_model(server: "subprocess.Popen[bytes]", url: str) -> str:
    """Return the first model that a frontend finds. Raise `StartupError` if the frontend ends."""
    from dynamo.http.client import ChatClient, environment_key

    client = ChatClient(url, HEALTH_TIMEOUT_S, key=environment_key())
    deadline = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(DynamoException):
            if models := client.models():
                return models[0]
        time.sleep(POLL_S)
    raise StartupError(f"the frontend ended with status {server.poll()} before it found a worker")


def _complete(url: str, model: str, prompt: str, limits: Mapping[str, int]) -> int:
    """Stream the response to one prompt to the standard output. Raise `StartupError` if the request fails."""
    from dynamo.http.client import ChatClient, environment_key

    client = ChatClient(url, key=environment_key())
    try:
        for delta in client.chat(model, [{"role": "user", "content": prompt}], limits):
            print(delta.content, end="", flush=True)
    except DynamoException as error:
        raise StartupError(str(error)) from None
    print()
    return 0


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a JSONL file, an object with `text` in each line. Raise `ConfigError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"in=batch:{path}: {getattr(error, 'strerror', None) or error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(str(json.loads(line)["text"]))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"in=batch:{path}: line {number}: expected a JSON object with a field text") from None
    return prompts


def _batch(url: str, model: str, path: Path, texts: Sequence[str]) -> int:
    """Answer each prompt into `output.jsonl` in the directory of its file; return 1 for an error."""
    from dynamo.ops.router_health import chat_once

    failures = 0
    with open(path.parent / OUTPUT, "w", encoding="utf-8") as output:
        for text in texts:
            result = chat_once(url, prefer=[model], prompt=text, max_tokens=TOKENS_MAX)
            failures += not result.is_success
            choices = result.response.get("choices") or [{}]
            response = (choices[0].get("message") or {}).get("content")
            output.write(json.dumps({"text": text, "response": response, "error": result.error or None}) + "\n")
    print(f"{len(texts)} requests, {failures} errors: {path.parent / OUTPUT}")
    return int(bool(failures))


def main() -> None:
    """Run `dynamo-run`; exit with its status."""
    exit_on_config_error(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
