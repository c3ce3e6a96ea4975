"""Processes that share a port."""

import pytest

from dynamo.core.config import without_secrets
from dynamo.frontend.config import FrontendConfig, read
from dynamo.frontend.main import worker_variables
from dynamo.frontend.workers import command_of


def test_worker_command_repeats_the_arguments_and_adds_the_port() -> None:
    command = command_of(["--http-port", "0", "--http-workers", "2"], 4711)
    assert command[1:] == ["-m", "dynamo.frontend", "--http-port", "0", "--http-workers", "2", "--http-port=4711"]


def test_http_workers_get_no_key_on_their_command_lines() -> None:
    argv = [
        "--api-key",
        "sk-a,b-secret",
        "--http-workers",
        "2",
        "--api-key=sk-secret",
        "--admin-api-key",
        "sk-secret-3",
    ]
    command = command_of(without_secrets(FrontendConfig, argv), 4711)
    assert command[-3:] == ["--http-workers", "2", "--http-port=4711"]
    assert not [word for word in command if "secret" in word]


@pytest.mark.parametrize(
    ("argv", "variables", "expected"),
    [
        (["--router-mode", "kv"], {}, "true"),
        (["--router-mode", "kv"], {"DYN_ROUTER_REPLICA_SYNC": "false"}, None),
        (["--router-mode", "round-robin"], {}, None),
    ],
)
def test_kv_routers_of_one_port_exchange_placements_unless_it_is_set(
    argv: list[str], variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYN_ROUTER_REPLICA_SYNC", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert worker_variables(read(argv)).get("DYN_ROUTER_REPLICA_SYNC") == expected
