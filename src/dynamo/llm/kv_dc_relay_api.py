"""KvDcRelay: the relay of a data center's KV state under upstream's name."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.core.config import setting
from dynamo.core.errors import InvalidArgument, StartupError
from dynamo.dc_relay.config import RelayConfig, check_address, limits_of, selected
from dynamo.runtime.component import Endpoint

if TYPE_CHECKING:
    from dynamo.dc_relay.host import RelayHost
    from dynamo.dc_relay.service import RelayService


class KvDcRelay:
    """Relay of one data center's KV state: discovers pools and serves them over gRPC if `bind` is set."""

    def __init__(
        self,
        endpoint: Endpoint,
        dc_id: str,
        namespace_filter: str | None = None,
        endpoint_prefix: str | None = None,
        publication_threshold: int = 16,
        publication_delay_ms: int = 1,
        recovery_attempt_timeout_ms: int = 30000,
        *,
        namespaces: Sequence[str] | None = None,
        endpoint_prefixes: Sequence[str] | None = None,
        watch_all: bool | None = None,
        expected_unique_blocks: int = 1048576,
        bind: str | None = None,
        tuning: Mapping[str, int] | None = None,
        sources_file: str | None = None,
        connection_revision: str | None = None,
    ) -> None:
        """Raise `InvalidArgument` for arguments that contradict each other; `start` checks their values."""
        if endpoint_prefix is not None and endpoint_prefixes is not None:
            raise InvalidArgument("endpoint_prefix and endpoint_prefixes are mutually exclusive")
        prefixes = [endpoint_prefix] if endpoint_prefix is not None else list(endpoint_prefixes or ())
        names = selected(namespace_filter, namespaces, watch_all=watch_all)
        _check_sources(sources_file, connection_revision, has_filters=bool(names or prefixes or watch_all))
        if bind is not None:
            check_address(bind)
        settings = {
            "publication_threshold": publication_threshold,
            "publication_delay_ms": publication_delay_ms,
            "recovery_attempt_timeout_ms": recovery_attempt_timeout_ms,
        }
        self._config = RelayConfig(
            dc_id=dc_id,
            namespaces=names,
            endpoint_prefixes=tuple(prefixes),
            sources_file=sources_file,
            connection_revision=connection_revision,
            expected_unique_blocks=expected_unique_blocks,
            bind=bind,
            limits=limits_of(settings, tuning, has_listener=bind is not None),
        )
        self._runtime = endpoint.runtime
        self._host: RelayHost | None = None
        self._service: RelayService | None = None
        self._starting = asyncio.Lock()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Start; a second call has no effect. Raise `ConfigError` for a setting that cannot be used."""
        async with self._starting:
            if self._host is None:
                await self._start()

    async def _start(self) -> None:
        from dynamo.dc_relay.host import RelayHost

        config = self._config
        config.check()
        host = RelayHost(self._runtime, config)
        await self._runtime.connect()
        await host.start()
        if config.bind is not None:
            from dynamo.dc_relay.service import RelayService  # Requires gRPC.

            service = RelayService(host, config.bind)
            try:
                await service.start()
            except StartupError:
                await host.close()
                raise
            self._service = service
        self._host = host
        self._runtime.register_engine_route("state", self._state)

    async def health(self) -> dict[str, Any]:
        """Return the numbers of endpoints, and the states of the pools, the sources and the listener."""
        host, service = self._started(), self._service
        is_serving = service is not None and service.is_serving
        return {
            **host.health(),
            "wan_enabled": service is not None,
            "wan_serving": is_serving,
            "wan_bound_address": service.address if service is not None else None,
            "wan_last_error": None,
        }

    async def _state(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the sources and the listener's readiness, for `/engine/state` of the system server."""
        health, config = await self.health(), self._config
        return {
            "podUID": setting("POD_UID", None, str),
            "mode": "discovery" if config.sources_file is None else "from-file",
            "connectionRevision": config.connection_revision,
            "ready": not health["shutting_down"] and health["wan_serving"] == health["wan_enabled"],
            "sources": health["sources"],
        }

    async def flush(self) -> None:
        """Publish the collected changes of every pool."""
        self._started().flush()

    async def shutdown(self) -> None:
        """Withdraw the pools, end every stream and stop."""
        host = self._started()
        if not self._ended.is_set():
            if self._service is not None:
                self._service.is_serving = False
            await host.close()
            if self._service is not None:
                await self._service.stop()
            self._ended.set()

    async def wait_for_shutdown(self) -> None:
        """Return once the relay has stopped; a shutdown of the runtime stops it."""
        self._started()
        runtime = asyncio.ensure_future(self._runtime.wait_closed())
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({runtime, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            runtime.cancel()
            ended.cancel()
        await self.shutdown()

    def _started(self) -> "RelayHost":
        if self._host is None:
            raise RuntimeError("KvDcRelay: call start() first")
        return self._host


def _check_sources(sources_file: str | None, connection_revision: str | None, *, has_filters: bool) -> None:
    if sources_file is None:
        if connection_revision is not None:
            raise InvalidArgument(
                "connection_revision: requires sources_file" if connection_revision else _EMPTY_REVISION
            )
        return
    if not sources_file:
        raise InvalidArgument("sources_file: must not be empty")
    if connection_revision == "":
        raise InvalidArgument(_EMPTY_REVISION)
    if has_filters:
        raise InvalidArgument("sources_file and the selection of namespaces and endpoints are mutually exclusive")


_EMPTY_REVISION = "connection_revision: must not be empty"
