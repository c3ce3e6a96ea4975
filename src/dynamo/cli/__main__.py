"""Command line: dispatch of `dynamo COMMAND` to the module of the command, and the help page."""

import sys
import time

from dynamo import __version__
from dynamo.core.config import exit_on_config_error
from dynamo.core.errors import ConfigError

HELP = f"""\
dynamo {__version__}: serve a language model over the OpenAI API

  dynamo serve                        the bundled demo model on this machine's CPU, http://localhost:8000
  dynamo serve DIR                    a Llama, Qwen2 or Qwen3 checkpoint in Hugging Face layout
  dynamo serve DIR --workers 4        four engines behind one frontend
  dynamo serve --engine mocker        a simulated engine: real API, real timing, random tokens
  dynamo chat                         talk to the running server in this terminal
  dynamo top                          models and workers of the running server: rates, latencies, load, cache
  dynamo route explain                show why the KV router chose the workers of the last requests
  dynamo plan explain FILE            show why the planner changed the number of workers, or did not
  dynamo replay TRACE.jsonl           simulate a cluster under the load of a trace
  dynamo deploy validate FILE...      check Kubernetes manifests; other verbs apply them and show their state
  dynamo doctor                       check this machine: packages, GPUs, ports, discovery, settings; what to do
  dynamo troubleshoot                 find known causes of failures in the local graph, a cluster or a bundle

  dynamo COMMAND --help               its common options, their environment variables and defaults (also: dynamo help COMMAND)
  dynamo COMMAND --help-all           all of its options
  dynamo --version

The same processes can be started one by one, on one machine or on several that share a directory:

  python -m dynamo.frontend --discovery-backend file
  python -m dynamo.cpu --discovery-backend file --model-path DIR
  python -m dynamo.mocker --discovery-backend file --model-path DIR
"""
COMMANDS = ("serve", "chat", "top", "route", "plan", "replay", "deploy", "doctor", "troubleshoot")
STARTED = time.monotonic()


def main() -> None:
    """Run the `dynamo` command; exit with 0, with 1 after a failure, with 2 if an option is wrong."""
    try:
        exit_on_config_error(lambda: run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


def run(argv: list[str]) -> int:
    """Run one command. Raises `ConfigError` for an unknown one."""
    word, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if word == "help" and rest:
        word, rest = rest[0], [*rest[1:], "--help"]
    if word in {"--help", "-h", "help"}:
        print(HELP, end="")
        return 0
    if word in {"--version", "-V", "version"}:
        print(f"dynamo {__version__}")
        return 0
    if word == "serve":
        from dynamo.cli.serve import serve

        return serve(rest, STARTED)
    if word == "chat":
        from dynamo.cli.chat import chat

        return chat(rest)
    if word == "top":
        from dynamo.cli.top import top

        return top(rest)
    if word == "route":
        from dynamo.cli.route import route

        return route(rest)
    if word == "plan":
        from dynamo.cli.plan import plan

        return plan(rest)
    if word == "replay":
        from dynamo.cli.replay import replay

        return replay(rest)
    if word == "deploy":
        from dynamo.cli.deploy import deploy

        return deploy(rest)
    if word == "doctor":
        from dynamo.ops.doctor.command import doctor

        return doctor(rest)
    if word == "troubleshoot":
        from dynamo.ops.troubleshoot.command import troubleshoot

        return troubleshoot(rest)
    import difflib

    near = difflib.get_close_matches(word, [*COMMANDS, "--help", "--version"], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown command {word}{hint} (see dynamo --help)")


if __name__ == "__main__":
    main()
