"""Our processes and the released ones in a real etcd: the same keys, the same records, the same lease."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import MODEL_NAME, Implementation, Recipe, Stack, StackFailed, ours, theirs
from tests.cluster.etcd import EtcdCluster
from tests.cluster.peers import require_peer
from tests.cluster.processes import wait_until

from dynamo.protocols.discovery import METRICS_SOURCES

pytestmark = pytest.mark.conformance

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 8}
GONE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def implementations() -> dict[str, Implementation]:
    require_peer()
    return {"ours": ours(), "theirs": theirs(peer_python())}


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.wait()


def recipe(implementations: dict[str, Implementation], pair: str, etcd: EtcdCluster) -> Recipe:
    frontend, engine = (implementations[name] for name in pair.split("-"))
    variables = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd.endpoints, "ETCD_LEASE_TTL": "5"}
    return Recipe(name=pair, frontend=frontend, engine=engine, variables=variables)


def chat(stack: Stack) -> None:
    status, answer = stack.send_request("POST", "/v1/chat/completions", CHAT)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8), answer


def listed(stack: Stack) -> list[Any]:
    return list(stack.send_request("GET", "/v1/models")[1]["data"])


@pytest.mark.parametrize("pair", ["ours-theirs", "theirs-ours"])
def test_each_implementation_finds_and_calls_the_other_and_sees_it_leave(
    implementations: dict[str, Implementation], pair: str, etcd: EtcdCluster
) -> None:
    try:
        with Stack(recipe(implementations, pair, etcd), bench_model()) as stack:
            chat(stack)
            assert any(key.startswith("v1/instances/") for key in etcd.names())
            stack.end_engines()
            wait_until(lambda: listed(stack) == [], "the worker that stopped is still listed", GONE_TIMEOUT_S)
    except StackFailed as error:
        pytest.fail(str(error), pytrace=False)


def test_our_frontend_serves_with_their_mocker_while_etcd_is_away(
    implementations: dict[str, Implementation], etcd: EtcdCluster
) -> None:
    (member,) = etcd.members
    with Stack(recipe(implementations, "ours-theirs", etcd), bench_model()) as stack:
        chat(stack)
        member.kill()
        for _ in range(5):
            chat(stack)
            time.sleep(0.1)
        member.start()
        etcd.wait()
        chat(stack)


def described(etcd: EtcdCluster) -> dict[str, str]:
    """Return a worker's keys and records with each id, port and checksum replaced by its kind.

    The addresses of metrics that our processes write for our planner are omitted: the released system never reads their
    prefix.
    """
    leases = etcd.control("lease", "list").split()[3:]
    holders = {lease: etcd.control("lease", "timetolive", lease, "--keys") for lease in leases}
    ((lease, attached),) = [item for item in holders.items() if "v1/instances/" in item[1]]
    found: dict[str, str] = {}
    for key in etcd.names():
        if key.startswith(f"{METRICS_SOURCES}/"):
            assert any(key in keys for keys in holders.values()), f"{key} would outlive its owner"
            continue
        assert key in attached, f"{key} would outlive its owner"
        record = json.loads(etcd.control("get", "--print-value-only", key))
        own = record.get("instance_id", record.get("publisher_id"))
        assert key.endswith(f"/{own:x}"), "the last segment is the record's id"
        if not key.startswith("v1/event_"):
            assert own == int(lease, 16), "a process is known by its lease"
        record.pop("card_json", None)
        record.pop("response_frames", None)  # Only ours; the released system ignores it.
        found[plain(key)] = plain(json.dumps(record, separators=(",", ":")))
    return found


def plain(text: str) -> str:
    text = re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)
    return re.sub(r"(?<=[/_:])(?=[0-9a-f]*\d)[0-9a-f]{11,19}(?=[/\",}]|$)", "ID", text)


CONTROL = "v1/instances/dynamo/backend/worker_control/ID"
"""Endpoint of our workers by which our frontends drain them; the released one has none."""


def test_both_implementations_write_the_same_records_under_the_same_keys(
    implementations: dict[str, Implementation], etcd: EtcdCluster
) -> None:
    written: dict[str, dict[str, str]] = {}
    for implementation in ("ours", "theirs"):
        with Stack(recipe(implementations, f"{implementation}-{implementation}", etcd), bench_model()):
            written[implementation] = described(etcd)
        wait_until(lambda: etcd.names() == [], "something outlived its owner", GONE_TIMEOUT_S)
    assert {"v1/instances/dynamo/backend/generate/ID", "v1/mdc/dynamo/backend/generate/ID"} <= written["ours"].keys()
    del written["ours"][CONTROL]
    for key, record in written["ours"].items():
        assert record == written["theirs"][key], key
