"""Resource definitions that are missing, older or newer than the operator."""

import copy
import logging
from typing import Any

import pytest

from dynamo import __version__
from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.operator.definitions import VERSION_LABEL, name_of, prepare_definitions
from dynamo.protocols.kubernetes.crds import KINDS, manifest

GRAPH = next(one for one in KINDS if one.kind == "DynamoGraphDeployment")
SERVICE = ("dynamo-system", "webhooks")


class Definitions:
    """Stored definitions, and those that were applied."""

    def __init__(self, version: str | None = None, *, error: Exception | None = None) -> None:
        self.stored: dict[str, Any] = {}
        self.applied: dict[str, Any] = {}
        self.error = error
        for kind in KINDS if version is not None else ():
            self.stored[name_of(kind)] = manifest(kind)
            self.stored[name_of(kind)]["metadata"]["labels"] = {VERSION_LABEL: version}

    async def get(self, kind: Any, name: str) -> Any:
        if self.error is not None:
            raise self.error
        return copy.deepcopy(self.stored.get(name))

    async def apply(self, kind: Any, value: Any, *, manager: str) -> Any:
        self.applied[value["metadata"]["name"]] = value
        return value


async def prepare(found: Definitions, *, upgrades: bool) -> None:
    await prepare_definitions(found, *SERVICE, upgrades=upgrades)  # type: ignore[arg-type]


async def test_missing_definition_is_a_warning_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    await prepare(Definitions(), upgrades=False)
    assert len(caplog.records) == len(KINDS)
    text = caplog.records[0].getMessage()
    assert "dynamographdeployments.nvidia.com is not installed" in text and "upgrade the chart dynamo-crds" in text


async def test_missing_definitions_are_installed_if_upgrades_are_on() -> None:
    found = Definitions()
    await prepare(found, upgrades=True)
    assert len(found.applied) == len(KINDS)
    graph = found.applied[name_of(GRAPH)]
    assert graph["metadata"]["labels"][VERSION_LABEL] == __version__
    service = graph["spec"]["conversion"]["webhook"]["clientConfig"]["service"]
    assert (service["namespace"], service["name"]) == SERVICE


async def test_older_definition_without_a_version_is_a_warning_unless_upgrades_are_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = Definitions("1.0.0")
    stored = found.stored[name_of(GRAPH)]
    stored["spec"]["versions"] = stored["spec"]["versions"][:1]
    stored["spec"]["conversion"]["webhook"]["clientConfig"]["caBundle"] = "YQ=="
    await prepare(found, upgrades=False)
    assert "does not serve v1" in caplog.text and "it is older than this operator" in caplog.text
    await prepare(found, upgrades=True)
    assert found.applied[name_of(GRAPH)]["spec"]["conversion"]["webhook"]["clientConfig"]["caBundle"] == "YQ=="


async def test_current_definitions_are_not_written() -> None:
    found = Definitions(__version__)
    await prepare(found, upgrades=True)
    assert found.applied == {}


async def test_newer_definitions_are_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = Definitions("99.0.0")
    with caplog.at_level(logging.WARNING):
        await prepare(found, upgrades=True)
    assert found.applied == {}
    assert "from release 99.0.0, this operator from" in caplog.text


async def test_unreachable_api_server_does_not_prevent_the_start(caplog: pytest.LogCaptureFixture) -> None:
    await prepare(Definitions(error=KubeUnavailable("away")), upgrades=True)
    assert "cannot check the resource definitions" in caplog.text


async def test_missing_permissions_are_named() -> None:
    with pytest.raises(ConfigError, match="install the chart's roles"):
        await prepare(Definitions(error=KubeRefused(403, "Forbidden", "no")), upgrades=True)
