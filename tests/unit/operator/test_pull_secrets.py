"""Pull secrets: names by registry, read again, and kept while the API server refuses."""

from typing import Any

import pytest
from tests.settle import turns
from tests.unit.operator.reconcile.test_registries import secret

from dynamo.core.clock import ManualClock
from dynamo.k8s.client import KubeListing, KubeRefused
from dynamo.operator.pull_secrets import READ_S, PullSecretIndex


class Source:
    """Secrets, or a refusal."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.is_refused = False
        self.fields = ""

    async def list(self, kind: Any, namespace: str | None = None, labels: str = "", fields: str = "") -> KubeListing:
        self.fields = fields
        if self.is_refused:
            raise KubeRefused(403, "Forbidden", "secrets is forbidden")
        return KubeListing(self.items, "1")


@pytest.fixture
def changes() -> list[int]:
    return []


async def test_changed_secret_names_are_reported_once(changes: list[int]) -> None:
    source, clock = Source(), ManualClock()
    index = PullSecretIndex(source, None, lambda: changes.append(1), clock)
    source.items = [secret("a", "nvcr.io")]
    await index.read()
    await index.read()
    assert source.fields == "type=kubernetes.io/dockerconfigjson"
    assert (list(index.names("space", "nvcr.io/x:1")), changes) == (["a"], [1])


async def test_forbidden_secret_access_keeps_the_names_and_is_logged_once(
    changes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    index = PullSecretIndex(source, None, lambda: changes.append(1))
    source.items = [secret("a", "nvcr.io")]
    await index.read()
    source.is_refused = True
    await index.read()
    await index.read()
    assert list(index.names("space", "nvcr.io/x:1")) == ["a"]
    assert [record.message for record in caplog.records if "cannot read pull secrets" in record.message] != []
    assert len(caplog.records) == 1


async def test_secrets_are_read_again(changes: list[int]) -> None:
    import asyncio

    source, clock = Source(), ManualClock()
    index = PullSecretIndex(source, None, lambda: changes.append(1), clock)
    task = asyncio.create_task(index.follow())
    await turns(5)
    source.items = [secret("a", "nvcr.io")]
    clock.advance(READ_S)
    await turns(10)
    task.cancel()
    assert changes == [1]
