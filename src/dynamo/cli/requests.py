"""Requests: `dynamo requests` shows the last requests of a running frontend, or of request trace files, with what made them slow."""

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from dynamo.cli.request_lines import detail, explained, heading, line
from dynamo.console.request_causes import Cause
from dynamo.console.request_views import RequestSelection, RequestView, view_of
from dynamo.console.worker_paces import WorkerPaces
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.http.client import ChatClient, environment_key
from dynamo.ops.graphs import DEFAULT_URL, server_url
from dynamo.serving.request_facts import RequestFacts

if TYPE_CHECKING:
    from dynamo.serving.request_trace.rows import RequestEnd

LIMIT_MAX = 500
RESPONSE_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|msg)[-_]")
"""What the id of a response has before that of its request."""
SLOW_MS = 1000
"""Least duration of a slow request for --follow, which cannot sort."""
POLLED = 200
"""Requests of one poll with `--follow`; more than that between two polls are not shown."""
SEEN_MAX = 5000
"""Ids of printed requests that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsConfig:
    """Show the last requests of a running frontend, or of trace files, and what made them slow."""

    request_id: str | None = option(None, "id", None, "Request, or the beginning of its id: shows its stages")
    url: str = option(
        DEFAULT_URL, "--url", "DYN_CHAT_URL", "URL of the server; the admin key in DYN_API_KEY is sent to it"
    )
    follow: bool = option(False, "--follow", None, "Print requests as they end, until an interrupt")
    slow: bool = option(False, "--slow", None, "The slowest requests first, each with the cause")
    failed: bool = option(False, "--failed", None, "Only requests that failed, each with the reason")
    running: bool = option(False, "--running", None, "Only requests in flight")
    slower_than: int = option(
        0, "--slower-than", None, "Least duration in ms; 1000 with --follow --slow if unset", metavar="MS"
    )
    cause: str | None = option(
        None, "--cause", None, "Only one cause, such as prefill or slow-worker", choices=tuple(Cause), metavar="CAUSE"
    )
    model: str | None = option(None, "--model", None, "Only requests of this model")
    limit: int = option(20, "--limit", None, "Number of requests, 1 to 500")
    interval: float = option(1.0, "--interval", None, "Seconds between two polls of --follow, at least 0.2")
    trace: list[str] = option([], "--trace", None, "Files of a request trace instead of a running server")
    as_json: bool = option(False, "--json", None, "One JSON object in each line")

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value outside of its range, and for options that exclude each other."""
        if not 1 <= self.limit <= LIMIT_MAX:
            raise ConfigError(f"--limit {self.limit}: must be 1 to {LIMIT_MAX}")
        if self.interval < 0.2:
            raise ConfigError(f"--interval {self.interval:g}: must be at least 0.2")
        if self.slower_than < 0:
            raise ConfigError(f"--slower-than {self.slower_than}: must be at least 0")
        if self.failed + self.running + self.slow > 1 and not (self.failed + self.slow == 2 and self.follow):
            raise ConfigError("--slow, --failed and --running exclude each other, except --follow --slow --failed")
        if self.trace and (self.follow or self.failed or self.running):
            raise ConfigError("--trace: excludes --follow, --failed and --running; a trace has requests that ended")

    @property
    def selection(self) -> RequestSelection:
        """Return the requests that the options select."""
        state = "slow" if self.slow else "failed" if self.failed else "running" if self.running else ""
        return RequestSelection(
            state=state,
            model=self.model or "",
            cause=self.cause or "",
            slower_than_ms=self.slower_than,
            limit=self.limit,
        )


def requests(argv: Sequence[str]) -> int:
    """Run `dynamo requests`. Return 1 if the server does not respond or a named request is not kept."""
    config = load(RequestsConfig, argv, prog="dynamo requests")
    try:
        if config.follow:
            return follow(ChatClient(server_url(config.url), key=environment_key()), config)
        if config.request_id is not None:
            return one(config)
        found = traced(config.trace, config.selection) if config.trace else selected_views(config)
        show(found, config)
    except KeyboardInterrupt:
        return 0
    except ConfigError:
        raise
    except DynamoException as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def selected_views(config: RequestsConfig) -> list[RequestView]:
    """Return the selected requests of the server."""
    return from_server(ChatClient(server_url(config.url), key=environment_key()), config.selection)


def from_server(client: ChatClient, selection: RequestSelection) -> list[RequestView]:
    """Return the selected requests of a server. Raise `ConfigError` for one without a console."""
    query: dict[str, Any] = {"slower_than_ms": int(selection.slower_than_ms)}
    query |= {name: getattr(selection, name) for name in ("state", "model", "cause", "limit")}
    return msgspec.convert(client.requests(**query), list[RequestView])


def show(found: Sequence[RequestView], config: RequestsConfig) -> None:
    """Print requests, with their causes where the user looks for them."""
    if config.as_json:
        for view in found:
            print(json.dumps(msgspec.to_builtins(view)))
        return
    if not found:
        print("no request matches")
        return
    print(heading())
    has_reasons = config.slow or config.failed or config.cause is not None
    for view in found:
        print(explained(view) if has_reasons else line(view))
    if not has_reasons:
        print("\ndynamo requests ID shows the stages of one; --slow explains the slowest.")


def one(config: RequestsConfig) -> int:
    """Print one request by its id, the id of its response, or their beginning."""
    wanted = RESPONSE_PREFIX.sub("", config.request_id or "")
    everything = RequestSelection(limit=LIMIT_MAX)
    found = traced(config.trace, everything) if config.trace else views_named(config, wanted)
    matching = [view for view in found if view.id and (view.id.startswith(wanted) or wanted.endswith(view.id))]
    if not matching:
        sys.stderr.write(f"error: request {config.request_id} is not kept; the last 1000 and the slowest ones are\n")
        return 1
    if len({view.id for view in matching}) > 1:
        sys.stderr.write(f"error: {len(matching)} requests begin with {wanted}; name more of the id\n")
        return 1
    print(json.dumps(msgspec.to_builtins(matching[0])) if config.as_json else detail(matching[0]))
    return 0


def views_named(config: RequestsConfig, wanted: str) -> list[RequestView]:
    """Return the request of a whole id, or the last ones."""
    client = ChatClient(server_url(config.url), key=environment_key())
    found = msgspec.convert(client.requests(id=wanted, limit=1), list[RequestView])
    return found or from_server(client, RequestSelection(limit=LIMIT_MAX)) + from_server(
        client, RequestSelection(state="slow", limit=LIMIT_MAX)
    )


def follow(client: ChatClient, config: RequestsConfig) -> int:
    """Print requests as they end, until an interrupt; a server that does not respond is waited for."""
    seen: dict[str, None] = {}
    is_first = True
    while True:
        try:
            found = [view for selection in followed(config) for view in from_server(client, selection)]
            ended = [view for view in found if view.state != "running"]
        except DynamoException as error:
            if is_first:
                raise
            sys.stderr.write(f"error: {error}\n")
            ended = []
        if is_first and not config.as_json:
            print(heading(), flush=True)
        news = list(new(ended, seen))
        for view in news[-config.limit :] if is_first else news:
            print(json.dumps(msgspec.to_builtins(view)) if config.as_json else explained(view), flush=True)
        is_first = False
        time.sleep(config.interval)


def followed(config: RequestsConfig) -> list[RequestSelection]:
    """Return the requests that `--follow` polls: those that ended last; slow and failed ones with both options."""
    least_ms = config.slower_than or (SLOW_MS if config.slow else 0)
    ended = RequestSelection(model=config.model or "", cause=config.cause or "", slower_than_ms=least_ms, limit=POLLED)
    if not config.failed:
        return [ended]
    failed = replace(ended, state="failed", slower_than_ms=config.slower_than)
    return [failed, ended] if config.slow else [failed]


def new(ended: Iterable[RequestView], seen: dict[str, None]) -> Iterator[RequestView]:
    """Yield the requests that were not seen before, oldest first, and remember them."""
    for view in sorted(ended, key=lambda one: one.started_at + one.total_ms / 1e3):
        key = view.id or f"{view.started_at:.3f} {view.endpoint}"
        if key not in seen:
            seen[key] = None
            yield view
    while len(seen) > SEEN_MAX:
        del seen[next(iter(seen))]


def traced(paths: Sequence[str], selection: RequestSelection) -> list[RequestView]:
    """Return the selected requests of trace files. Raise `ConfigError` for a file that is none."""
    from dynamo.replay.request_trace import row_of  # Heavy imports, which the server's requests do not need.
    from dynamo.replay.trace_lines import lines
    from dynamo.serving.recent_requests import RecentRequests

    rows = (row_of(place, text) for place, text in lines(paths))
    facts = [facts_of(row.request) for row in rows if row.event_type == "request_end" and row.request is not None]
    kept = RecentRequests()
    for found in facts:
        kept.ended(found)  # Measures how slow each one was.
    paces = WorkerPaces(reversed(facts))
    return selection.of_views(view_of(found, 0.0, 0.0, paces) for found in selection.of_facts(facts, 0.0))


def facts_of(end: "RequestEnd") -> RequestFacts:
    """Return the record of a traced request, whose times are those of the wall clock."""
    started_s = end.request_received_ms / 1e3
    ended_s = started_s + end.total_time_ms / 1e3
    sent_s = started_s + (end.prefill_wait_time_ms or 0.0) / 1e3
    first_s = 0.0 if end.ttft_ms is None else started_s + end.ttft_ms / 1e3
    gaps = max(0, end.output_tokens - 1)
    prefill = None if end.worker is None else end.worker.prefill_worker_id
    decode = None if end.worker is None else end.worker.decode_worker_id
    return RequestFacts(
        request_id=end.request_id,
        model=end.model or "",
        endpoint="",
        request_type="stream",
        started_s=started_s,
        ended_at=ended_s,
        ended_s=ended_s,
        prepared_s=started_s,
        route_s=(started_s, sent_s),
        sent_s=sent_s,
        first_s=first_s,
        last_s=0.0 if not first_s else min(ended_s, first_s + gaps * (end.avg_itl_ms or 0.0) / 1e3),
        prompt_tokens=max(0, end.input_tokens),
        output_tokens=max(0, end.output_tokens),
        cached_tokens=max(0, end.cached_tokens),
        workers=() if decode is None else (decode,),
        prefill_worker=None if prefill == decode else prefill,
    )
