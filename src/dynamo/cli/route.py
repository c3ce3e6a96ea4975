"""Routing: `dynamo route explain` shows why a running frontend's KV router chose as it did, `dynamo route state` what it sees."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.cli.announcement import DEFAULT_URL
from dynamo.cli.client import Client, environment_key
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, DynamoException

HELP = """\
dynamo route: what the KV router of a running frontend (--router-mode kv) knows

  dynamo route explain                the last decision: every candidate, what it holds, its load, its cost
  dynamo route explain REQUEST_ID     that request's, by the response's id
  dynamo route state                  load and cache of every worker

  --help after either lists the options.
"""
COMMANDS = ("explain", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """Shows why the KV router chose: the candidates of a decision, the cheapest first."""

    request_id: str | None = option(None, "request-id", None, "The request; without it, the last ones")
    url: str = option(DEFAULT_URL, "--url", "DYN_CHAT_URL", "The server; the admin key in DYN_API_KEY is sent to it")
    model: str | None = option(None, "--model", None, "Only this model's decisions")
    last: int = option(1, "--last", None, "How many decisions, newest first")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """Shows what the KV router sees of its workers."""

    url: str = option(DEFAULT_URL, "--url", "DYN_CHAT_URL", "The server; the admin key in DYN_API_KEY is sent to it")


def route(argv: Sequence[str]) -> int:
    """`dynamo route`. Status 1 when the server cannot be asked."""
    word, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if word in {"--help", "-h", "help"}:
        print(HELP, end="")
        return 0
    if word not in COMMANDS:
        raise ConfigError(f"unknown command dynamo route {word}: expected {' or '.join(COMMANDS)}")
    try:
        return explain(rest) if word == "explain" else state(rest)
    except ConfigError:
        raise
    except DynamoException as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def explain(argv: Sequence[str]) -> int:
    """`dynamo route explain`."""
    config = load(ExplainConfig, argv, prog="dynamo route explain")
    if config.last < 1:
        raise ConfigError(f"--last {config.last}: expected 1 or more")
    found = Client(config.url, key=environment_key()).decisions(
        request_id=config.request_id, model=config.model, limit=config.last
    )
    decisions = [(name_of(one), decision) for one in found for decision in one["decisions"]]
    if not decisions:
        print("The KV router has decided nothing yet." if found else "No model here is routed by --router-mode kv.")
        return 0
    print("\n\n".join(explained(model, decision) for model, decision in decisions))
    return 0


def state(argv: Sequence[str]) -> int:
    """`dynamo route state`."""
    config = load(StateConfig, argv, prog="dynamo route state")
    routers = Client(config.url, key=environment_key()).router_state()
    if not routers:
        print("No model here is routed by --router-mode kv.")
    for one in routers:
        guess = ", caches guessed from what workers were given" if one["is_guessing"] else ""
        print(
            f"{name_of(one)}: policy {one['policy']}, {one['index_blocks']} blocks known, "
            f"{one['waiting_requests']} waiting{guess}"
        )
        rows = [
            (
                worker(rank),
                str(rank["active_requests"]),
                f"{rank['active_prefill_tokens']:g}",
                f"{rank['active_blocks']:g}",
                str(rank["held_blocks"]),
            )
            for rank in one["ranks"]
        ]
        print(table(("worker", "requests", "prefill tokens", "active blocks", "blocks held"), rows))
    return 0


def name_of(one: Mapping[str, Any]) -> str:
    """A model's name, and which of its workers are chosen where they do not do the same."""
    kind = one.get("worker_type", "aggregated")
    return str(one["model"]) if kind == "aggregated" else f"{one['model']} ({kind})"


def explained(model: str, decision: Mapping[str, Any]) -> str:
    """One decision as a table."""
    rows = []
    for one in decision["candidates"]:
        chosen = (one["worker_id"], one["dp_rank"]) == (decision["worker_id"], decision["dp_rank"])
        tiers = ("device", "host", "disk", "shared") if one.get("shared") else ("device", "host", "disk")
        held = "+".join(str(one[tier]) for tier in tiers)
        rows.append(
            (
                ("→ " if chosen else "  ") + worker(one),
                held,
                f"{one['active_prefill_tokens']:g}",
                f"{one['active_blocks']:g}",
                str(one["active_requests"]),
                f"{one['prefill']:.2f}",
                f"{one['saved']:.2f}",
                f"{one['decode']:.2f}",
                one["filtered"] or f"{one['cost']:.4g}",
            )
        )
    head = (
        f"{model}: request {decision['request_id']}, {decision['prompt_tokens']} tokens, "
        f"{decision['prompt_blocks']} whole blocks, policy {decision['policy']}"
    )
    columns = ("  worker", "held", "prefill tokens", "blocks", "requests", "prefill", "saved", "decode", "cost")
    return f"{head}\n{table(columns, rows)}"


def worker(one: Mapping[str, Any]) -> str:
    """A worker's name: its id in hex, and its rank where it is not the only one."""
    return f"{one['worker_id']:x}" + (f".{one['dp_rank']}" if one["dp_rank"] else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; all but the first to the right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )
