"""`dynamo-run in=… out=…`: upstream's former command line, mapped onto `dynamo serve`, `dynamo chat` and the processes of a graph."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.cli.external import KINDS
from dynamo.core.config import environ, exit_on_config_error
from dynamo.core.errors import ConfigError, StartupError
from dynamo.core.parent import VARIABLE

USAGE = "usage: dynamo-run in=http|text|batch:FILE|dyn://NAMESPACE.COMPONENT.ENDPOINT out=cpu|mocker|vllm|sglang|trtllm|auto [MODEL] [flags]"
ENGINES = ("cpu", "mocker", *(one for one in KINDS if one != "openai_proxy"))
ALIASES = {"echo": "mocker", "echo_core": "mocker", "echo_full": "mocker", "mistralrs": "cpu", "llamacpp": "cpu"}
"""Engines of the former command that this project does not have, and their closest relative here."""
RENAMED = {"--model-config": "--model-path", "--num-nodes": "--nnodes"}
OWN_FLAGS = ("--http-port", "--http-host", "--router-mode", "--workers", "--prefill-workers", "--verbose")
READY_S, POLL_S = 3600.0, 0.2
END_S = 60.0
OUTPUT = "output.jsonl"


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
        if self.source.startswith("dyn://"):
            model = (
                ["--model" if self.target in {"vllm", "trtllm"} else "--model-path", self.model] if self.model else []
            )
            return ["-m", f"dynamo.{self.target}", "--endpoint", self.source, *model, *self.flags]
        return ["-m", "dynamo.frontend", *self.flags]


def parse(argv: Sequence[str]) -> FormerCommand:
    """Return a parsed command line. Raise `ConfigError`."""
    words = list(argv)
    source = next((word[3:] for word in words if word.startswith("in=")), "")
    target = next((word[4:] for word in words if word.startswith("out=")), "")
    rest = [RENAMED.get(word, word) for word in words if not word.startswith(("in=", "out="))]
    if not source or not target:
        raise ConfigError(f"in= and out= are required; {USAGE}")
    if source not in {"http", "text", "stdin"} and not source.startswith(("batch:", "dyn://")):
        raise ConfigError(f"in={source}: must be http, text, stdin, batch:FILE or dyn://…")
    target = ALIASES.get(target, target)
    is_remote = target == "auto" or target.startswith("dyn://")
    if not is_remote and target not in ENGINES:
        raise ConfigError(f"out={target}: must be {', '.join(ENGINES)} or auto")
    if is_remote and source != "http":
        raise ConfigError(f"in={source} out={target}: workers of other processes are served with in=http")
    model = rest.pop(0) if rest and not rest[0].startswith("-") else None
    return FormerCommand(source=source, target="auto" if is_remote else target, model=model, flags=tuple(rest))


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
        print(USAGE)
        return 0
    command = parse(argv)
    if command.source == "http" and command.target != "auto":
        return _replace_process(["-m", "dynamo.cli", "serve", *command.serve])
    if command.source == "http" or command.source.startswith("dyn://"):
        return _replace_process(command.process)
    return _with_server(command)


def _replace_process(arguments: Sequence[str]) -> int:
    """Become another program of this interpreter."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", *arguments])  # noqa: S606 -- a list of arguments, no shell


def _with_server(command: FormerCommand) -> int:
    """Start a server for one conversation or one file, and end it afterwards."""
    path = Path(command.source.removeprefix("batch:")) if command.source.startswith("batch:") else None
    prompts = [] if path is None else read_prompts(path)
    name = f"dynamo-run-{os.getpid()}"
    arguments = ["-m", "dynamo.cli", "serve", "--name", name, "--http-port", "0", *command.serve]
    server = subprocess.Popen(  # noqa: S603 -- a list of arguments, no shell
        [sys.executable, "-P", *arguments],
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**environ(), VARIABLE: str(os.getpid())},
    )
    try:
        url, model = _await_server(server, name)
        if path is not None:
            return _batch(url, model, path, prompts)
        from dynamo.cli.chat import chat

        return chat(["--url", url])
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
            result = chat_once(url, prefer=[model], prompt=text, max_tokens=256)
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
