"""Topology: a worker publishes its location, and its blocks go only to allowed locations."""

import asyncio
from pathlib import Path

import pytest
from msgspec import UNSET
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, NotReady
from dynamo.protocols.model_card import RuntimeConfig
from dynamo.routing.topology import (
    Topology,
    near_taint_of,
    read_domains,
    read_topology,
    taints_of,
    transfer_constraints,
)


def variables(mount: Path, **more: str) -> dict[str, str]:
    return {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": str(mount),
        "DYN_KV_TRANSFER_DOMAIN": "zone",
        **more,
    }


def card(**more: object) -> RuntimeConfig:
    return RuntimeConfig(**{"topology_domains": {"zone": "a", "rack": "7"}, "kv_transfer_domain": "zone", **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["", "false", "perhaps"])
async def test_topology_is_absent_unless_configured(tmp_path: Path, word: str) -> None:
    assert await read_topology(variables(tmp_path, DYN_TOPOLOGY_ENABLED=word)) is None


async def test_topology_reads_every_file_as_a_domain(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("a\n")
    (tmp_path / "rack").write_text(" 7 ")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "folder").mkdir()

    found = await read_topology(variables(tmp_path))

    assert found == Topology(domains={"zone": "a", "rack": "7"}, transfer_domain="zone")


async def test_topology_waits_for_the_domain_required_for_transfers(tmp_path: Path) -> None:
    clock = ManualClock()
    reading = asyncio.ensure_future(read_topology(variables(tmp_path), clock))
    await turns()
    (tmp_path / "rack").write_text("7")
    clock.advance(1.0)
    await turns()
    assert not reading.done()

    (tmp_path / "zone").write_text("a")
    clock.advance(1.0)

    found = await asyncio.wait_for(reading, 5)
    assert found is not None and found.domains == {"rack": "7", "zone": "a"}


async def test_topology_wait_is_bounded(tmp_path: Path) -> None:
    clock = ManualClock()
    reading = asyncio.ensure_future(read_topology(variables(tmp_path), clock))
    for _ in range(31):
        await turns()
        clock.advance(1.0)

    with pytest.raises(ConfigError, match="zone was missing"):
        await asyncio.wait_for(reading, 5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"DYN_KV_TRANSFER_DOMAIN": ""}, "DYN_KV_TRANSFER_DOMAIN"),
        ({"DYN_KV_TRANSFER_ENFORCEMENT": "often"}, "required or preferred"),
        ({"DYN_KV_TRANSFER_ENFORCEMENT": "preferred"}, "PREFERRED_WEIGHT"),
        ({"DYN_KV_TRANSFER_PREFERRED_WEIGHT": "2"}, "0 to 1"),
        ({"DYN_KV_TRANSFER_PREFERRED_WEIGHT": "much"}, "0 to 1"),
    ],
)
async def test_topology_refuses_contradictory_variables(tmp_path: Path, more: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await read_topology(variables(tmp_path, **more))


def test_topology_of_a_missing_directory_is_empty(tmp_path: Path) -> None:
    assert read_domains(tmp_path / "none") == {}


async def test_topology_is_written_to_the_card(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("a")
    found = await read_topology(
        variables(tmp_path, DYN_KV_TRANSFER_ENFORCEMENT="preferred", DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.85")
    )
    assert found is not None
    config = RuntimeConfig()

    found.put_on(config)

    assert config.topology_domains == {"zone": "a"}
    assert transfer_constraints(config) == (frozenset(), {"dynamo.topology/zone=a": 0.85})


def test_topology_taints_are_added_to_configured_taints() -> None:
    assert taints_of(card(taints=["h200"])) == {"h200", "dynamo.topology/zone=a", "dynamo.topology/rack=7"}
    assert taints_of(RuntimeConfig()) == frozenset()


def test_topology_required_domain_binds_decode_to_the_domain_of_prefill() -> None:
    found = transfer_constraints(card(kv_transfer_enforcement="required"))

    assert found == (frozenset({"dynamo.topology/zone=a"}), {})


def test_topology_does_not_restrict_a_worker_without_a_domain() -> None:
    assert transfer_constraints(card(kv_transfer_domain=UNSET)) == (frozenset(), {})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_transfer_domain": "host"}, "no topology value"),
        ({"kv_transfer_enforcement": "preferred"}, "its weight is missing"),
        ({}, "its enforcement is neither"),
    ],
)
def test_topology_refuses_a_contradictory_card(more: dict[str, str], message: str) -> None:
    with pytest.raises(NotReady, match=message):
        transfer_constraints(card(**more))


def test_transfer_domain_is_the_preferred_taint_of_the_topology() -> None:
    assert near_taint_of({"gpu": 0.5, "dynamo.topology/zone=a": 0.2}) == "dynamo.topology/zone=a"
    assert near_taint_of({"gpu": 0.5}) is None
