"""Pull secrets of the cluster by registry, read again and again, so that pods get those of their images."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.k8s.client import KubeListing, KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import SECRETS, ObjectKind
from dynamo.operator.reconcile.registries import SECRET_TYPE, SecretIndex, secret_index, secrets_for

logger = logging.getLogger(__name__)

READ_S = 60.0
"""Interval in which the secrets are read. They are listed instead of watched: their content is not kept."""


class SecretSource(Protocol):
    """Lists secrets: `KubeClient`, or a fake in tests."""

    async def list(
        self, kind: ObjectKind, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> KubeListing: ...


class PullSecretIndex:
    """Names of the pull secrets, by namespace and registry."""

    def __init__(
        self,
        source: SecretSource,
        namespace: str | None,
        on_change: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        """Read the secrets of all namespaces, or of one; call `on_change` when another set of names results."""
        self._source = source
        self._namespace = namespace
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._index: SecretIndex = {}
        self._error = ""

    def names(self, namespace: str, image: str) -> Sequence[str]:
        """Return the pull secrets of a namespace for the registry of an image."""
        return secrets_for(self._index, namespace, image)

    async def read(self) -> None:
        """Read the secrets; if the API server refuses, pods keep the names that are known."""
        try:
            listed = await self._source.list(SECRETS, self._namespace, fields=f"type={SECRET_TYPE}")
        except (KubeRefused, KubeUnavailable) as error:
            if not self._error:
                logger.warning("cannot read pull secrets, pods get those of their templates only: %s", error)
            self._error = str(error)
            return
        self._error = ""
        found = secret_index(listed.items)
        if found != self._index:
            self._index = found
            self._on_change()

    async def follow(self) -> None:
        """Read again and again until cancelled."""
        while True:
            await self._clock.sleep(READ_S)
            await self.read()
