"""Check of a router: the models of a frontend, one request, and the proof of its mode; what `check_router_health.py` prints."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.progress import activity
from dynamo.http.client import ChatClient, environment_key
from dynamo.ops.doctor.command import print_report
from dynamo.ops.graphs import DEFAULT_URL, server_url
from dynamo.ops.report import CheckRow, exit_status, failed, passed
from dynamo.ops.router_health import chat_once, one_line
from dynamo.ops.router_modes import MODES, rows_of_mode
from dynamo.ops.router_probe import RouterProbe

RETRY_S = 1.0
PREFILL = "prefill"
DIRECT = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCheckConfig:
    """Check a frontend: it lists a model, answers a request, and its router works in the given mode."""

    model: str | None = option(None, "MODEL", None, "Model that must be served; default: the first that is listed")
    base_url: str = option(DEFAULT_URL, "--base-url", "DYN_CHAT_URL", "URL of the frontend", aliases=("--url",))
    mode: str | None = option(None, "--mode", None, "Router mode to prove with small requests", choices=MODES)
    retries: int = option(0, "--retries", None, "Further attempts, a second apart, until a model is listed")
    timeout_s: float = option(30.0, "--timeout", None, "Timeout of each request, in seconds")
    json: bool = option(False, "--json", None, "Print the report as JSON")

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"--retries {self.retries}: must be at least 0")
        if not self.timeout_s > 0:
            raise ConfigError(f"--timeout {self.timeout_s:g}: must be greater than 0")


def check(argv: Sequence[str], prog: str = "dynamo router check") -> int:
    """Run the checks; return 1 if one fails. Raise `ConfigError` for wrong options."""
    config = load(RouterCheckConfig, argv, prog=prog)
    url = server_url(config.base_url)
    with activity(f"listing the models of {url}", is_quiet=config.json) as show:
        rows = rows_of_router(url, config, show)
    print_report(rows, is_json=config.json)
    return exit_status(rows)


def rows_of_router(url: str, config: RouterCheckConfig, show: Callable[[str], None]) -> list[CheckRow]:
    """Return the rows of a running frontend, and show what is being checked; rows after a failure are left out."""
    client = ChatClient(url, timeout_s=config.timeout_s, verify=False, key=environment_key())
    models, row = listed_models(client, config)
    rows = [row]
    if not models:
        return rows
    if config.mode != DIRECT:  # A direct router refuses a request that names no worker.
        show("waiting for the response to one chat request")
        result = chat_once(url, prefer=[config.model or ""], timeout_s=config.timeout_s)
        if not result.is_success:
            return [*rows, failed("chat", result.error, "run: dynamo troubleshoot")]
        text = f"{result.model} answered with {result.tokens} tokens on worker {result.worker or '?'}"
        rows.append(passed("chat", text))
    if config.mode is None:
        return rows
    show(f"sending small requests that show whether the mode is {config.mode}")
    try:
        found = {
            str(one["instance_id"]): str(one.get("device_type") or "")
            for one in client.instances()
            if one.get("endpoint") == "generate" and one.get("component") != PREFILL
        }
        devices = {worker: device for worker, device in found.items() if device}
        observed = RouterProbe(client, config.model or models[0]).observe(config.mode, frozenset(found), devices)
    except DynamoException as error:
        return [*rows, failed("mode", one_line(error), "run: dynamo troubleshoot")]
    return [*rows, *rows_of_mode(config.mode, observed)]


def listed_models(client: ChatClient, config: RouterCheckConfig) -> tuple[list[str], CheckRow]:
    """Return the models, none if the wanted one is missing, and the row."""
    text, models = "", []
    for attempt in range(config.retries + 1):
        if attempt:
            time.sleep(RETRY_S)
        try:
            models = client.models()
            text = f"{len(models)} models: {', '.join(models) or 'none'}"
        except DynamoException as error:
            models, text = [], one_line(error)
        if models and config.model in {None, *models}:
            return models, passed("models", text)
    remedy = f"serve {config.model}, or name a listed model" if models else "start workers; run: dynamo troubleshoot"
    return [], failed("models", text, remedy)


def main() -> int:
    """Run `check_router_health.py`; return the exit status."""
    return check(sys.argv[1:], prog="check_router_health.py")
