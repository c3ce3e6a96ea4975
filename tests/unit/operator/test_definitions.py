"""Resource definitions at the start: old and missing ones are warnings, or are installed on request."""

from typing import Any

import pytest
from tests.unit.operator.kube_store import KubeStore

from dynamo import __version__
from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import RESOURCE_DEFINITIONS
from dynamo.operator.definitions import VERSION_LABEL, is_older, name_of, prepare_definitions
from dynamo.protocols.kubernetes.crds import KINDS, manifest


class RefusingStore(KubeStore):
    """Cluster that refuses to show its definitions."""

    error: Exception = KubeRefused(403, "Forbidden", "no")

    async def get(self, *args: Any, **named: Any) -> Any:
        raise self.error


@pytest.fixture
def store() -> KubeStore:
    """Return a cluster with all definitions."""
    made = KubeStore()
    for kind in KINDS:
        made.put(RESOURCE_DEFINITIONS, manifest(kind))
    return made


async def prepare(store: KubeStore, *, upgrades: bool = False) -> None:
    await prepare_definitions(store, "home", "webhooks", upgrades=upgrades)  # type: ignore[arg-type]


async def test_present_definitions_are_no_warning(store: KubeStore, caplog: pytest.LogCaptureFixture) -> None:
    await prepare(store)
    assert caplog.records == []


async def test_missing_old_and_new_definitions_are_warnings(store: KubeStore, caplog: pytest.LogCaptureFixture) -> None:
    missing, old, new = KINDS[0], next(one for one in KINDS[1:] if len(one.versions) > 1), KINDS[-1]
    store.remove(RESOURCE_DEFINITIONS, "", name_of(missing))
    value = store.objects[RESOURCE_DEFINITIONS.plural, "", name_of(old)]
    value["spec"]["versions"] = value["spec"]["versions"][:1]
    later = store.objects[RESOURCE_DEFINITIONS.plural, "", name_of(new)]
    later["metadata"]["labels"] = {VERSION_LABEL: "999.0"}
    await prepare(store)
    first, second, third = (one.getMessage() for one in caplog.records)
    assert f"{name_of(missing)} is not installed" in first and "--upgrade-crds" in first
    assert f"{name_of(old)} does not serve" in second
    assert "is from release 999.0" in third


async def test_definitions_are_installed_on_request_with_their_release(store: KubeStore) -> None:
    store.remove(RESOURCE_DEFINITIONS, "", name_of(KINDS[0]))
    await prepare(store, upgrades=True)
    for kind in KINDS:
        stored = store.objects[RESOURCE_DEFINITIONS.plural, "", name_of(kind)]
        assert stored["metadata"]["labels"][VERSION_LABEL] == __version__
        assert not is_older(stored)


async def test_definitions_that_may_not_be_read_matter_only_where_they_are_to_be_installed() -> None:
    await prepare(RefusingStore())
    with pytest.raises(ConfigError, match="--upgrade-crds: resource definitions cannot be installed"):
        await prepare(RefusingStore(), upgrades=True)


async def test_a_server_that_is_away_is_waited_for_by_the_controllers(caplog: pytest.LogCaptureFixture) -> None:
    away = RefusingStore()
    away.error = KubeUnavailable("away")
    await prepare(away, upgrades=True)
    assert "cannot check the resource definitions" in caplog.text
