"""Namespace and Component: the path `runtime.namespace(n).component(c).endpoint(e)` to an endpoint."""

from typing import TYPE_CHECKING

from dynamo.core.errors import InvalidArgument
from dynamo.runtime.component import Endpoint

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime


class Namespace:
    """First part of an endpoint's name."""

    def __init__(self, runtime: "DistributedRuntime", name: str) -> None:
        self._runtime = runtime
        self.name = one_part(name)

    def component(self, name: str) -> "Component":
        """Return a component of this namespace."""
        return Component(self._runtime, self.name, name)

    def __str__(self) -> str:
        return self.name


class Component:
    """First two parts of an endpoint's name."""

    def __init__(self, runtime: "DistributedRuntime", namespace: str, name: str) -> None:
        self._runtime = runtime
        self.namespace = namespace
        self.name = one_part(name)

    def endpoint(self, name: str) -> Endpoint:
        """Return an endpoint of this component."""
        return self._runtime.endpoint(f"{self.namespace}.{self.name}.{one_part(name)}")

    async def create_service(self) -> None:
        """Open the listener of this process's endpoints; serving an endpoint opens it as well."""
        await self._runtime.request_plane.listen()

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def one_part(name: str) -> str:
    """Return `name`. Raise `InvalidArgument` if it has several parts."""
    if not name or "." in name or "/" in name:
        raise InvalidArgument(f"name {name!r}: must be one part without dots and slashes")
    return name
