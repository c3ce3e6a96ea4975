"""Routing: `dynamo route explain` and `dynamo route state` show a KV router's decisions and state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.cli.verbs import run_verb
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.http.client import ChatClient, environment_key
from dynamo.ops.graphs import DEFAULT_URL, server_url

HELP = """\
dynamo route: decisions and state of a running frontend's KV router (--router-mode kv)

  dynamo route explain                the last decision: every candidate with cached blocks, load and cost
  dynamo route explain REQUEST_ID     the decision of one request, by the response's id
  dynamo route state                  load and cached blocks of every worker

  --help after either command lists its options.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """Show the KV router's decisions: the candidates of each, cheapest first."""

    request_id: str | None = option(None, "request-id", None, "Id of a request; default: the last requests")
    url: str = option(
        DEFAULT_URL, "--url", "DYN_CHAT_URL", "URL of the server; the admin key in DYN_API_KEY is sent to it"
    )
    model: str | None = option(None, "--model", None, "Show only this model's decisions")
    last: int = option(1, "--last", None, "Number of decisions to show, newest first")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """Show the KV router's state of its workers."""

    url: str = option(
        DEFAULT_URL, "--url", "DYN_CHAT_URL", "URL of the server; the admin key in DYN_API_KEY is sent to it"
    )


def route(argv: Sequence[str]) -> int:
    """Run `dynamo route`. Return 1 if the request to the server fails."""
    return run_verb("dynamo route", HELP, {"explain": explain, "state": state}, argv)


def explain(argv: Sequence[str]) -> int:
    """Run `dynamo route explain`."""
    config = load(ExplainConfig, argv, prog="dynamo route explain")
    if config.last < 1:
        raise ConfigError(f"--last {config.last}: must be at least 1")
    found = ChatClient(server_url(config.url), key=environment_key()).decisions(
        request_id=config.request_id, model=config.model, limit=config.last
    )
    decisions = [(name_of(one), decision) for one in found for decision in one["decisions"]]
    if not decisions:
        print("No routing decisions yet." if found else "No model of this server uses --router-mode kv.")
        return 0
    print("\n\n".join(explained(model, decision) for model, decision in decisions))
    return 0


def state(argv: Sequence[str]) -> int:
    """Run `dynamo route state`."""
    config = load(StateConfig, argv, prog="dynamo route state")
    routers = ChatClient(server_url(config.url), key=environment_key()).router_state()
    if not routers:
        print("No model of this server uses --router-mode kv.")
    for one in routers:
        guess = ", cached blocks predicted from routed requests" if one["is_guessing"] else ""
        print(
            f"{name_of(one)}: policy {one['policy']}, {one['index_blocks']} blocks in the index, "
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
    """Return a model's name, with the kind of its workers if the model is disaggregated."""
    kind = one.get("worker_type", "aggregated")
    return str(one["model"]) if kind == "aggregated" else f"{one['model']} ({kind})"


def explained(model: str, decision: Mapping[str, Any]) -> str:
    """Format one decision as a table."""
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
        f"{decision['prompt_blocks']} complete blocks, policy {decision['policy']}"
    )
    columns = ("  worker", "cached", "prefill tokens", "blocks", "requests", "prefill", "saved", "decode", "cost")
    return f"{head}\n{table(columns, rows)}"


def worker(one: Mapping[str, Any]) -> str:
    """Return a worker's name: its id in hex, and its rank unless it is 0."""
    return f"{one['worker_id']:x}" + (f".{one['dp_rank']}" if one["dp_rank"] else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format aligned columns; all but the first are right-aligned."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )
