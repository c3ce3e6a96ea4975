"""Transfer: parameters of KV block transfers between prefill and decode, for each of vLLM's connectors. Pure.

prefill: kv_transfer_params = handshake.prefill_params()
…vLLM returns its own parameters…     handshake.handover(them)  ─▶ disaggregated_params
decode:  kv_transfer_params = handshake.decode_params(disaggregated_params)
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.errors import ConfigError, InvalidArgument

KEY = "kv_transfer_params"
EXAMPLE = '--kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\''
STORES = frozenset({"LMCacheMPConnector", "LMCacheConnector", "LMCacheConnectorV1", "FlexKVConnectorV1",
                    "OffloadingConnector", "SharedStorageConnector", "ExampleConnector"})  # fmt: skip
"""Connectors with a store that both sides share: no parameters are exchanged."""
MOONCAKE_PORT = 8998  # Of Mooncake's bootstrap server, unless VLLM_MOONCAKE_BOOTSTRAP_PORT is set.


class NixlHandshake(Protocol):
    """Transfer parameters of one connector."""

    def prefill_params(self) -> dict[str, Any] | None:
        """Return the parameters for the prefill engine; None: no parameters."""

    def handover(
        self, params: Mapping[str, Any] | None, request_params: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """Return the parameters for decode, from prefill's request and result parameters; None: nothing to transfer."""


@dataclass(frozen=True, slots=True)
class Nixl:
    """Transfer in which decode pulls the blocks from prefill's memory."""

    def prefill_params(self) -> dict[str, Any] | None:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def handover(
        self, params: Mapping[str, Any] | None, request_params: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        return dict(params) if params else None


@dataclass(frozen=True, slots=True)
class Mooncake:
    """Transfer in which prefill pushes the blocks to the decode engine that requests the transfer id."""

    engine_id: str
    bootstrap: str
    """`http://host:port` of the prefill side's bootstrap server."""

    def prefill_params(self) -> dict[str, Any] | None:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": uuid.uuid4().hex}

    def handover(
        self, params: Mapping[str, Any] | None, request_params: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        assert request_params is not None, "a Mooncake prefill always has transfer parameters"
        return {
            **(params or {}),
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": request_params["transfer_id"],
            "remote_bootstrap_addr": self.bootstrap,
            "remote_engine_id": self.engine_id,
        }


@dataclass(frozen=True, slots=True)
class Store:
    """Transfer through a store outside both engines, which look blocks up by the prompt."""

    def prefill_params(self) -> dict[str, Any] | None:
        return None

    def handover(
        self, params: Mapping[str, Any] | None, request_params: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        return None


def handshake_of(config: Any, role: DisaggregationMode, variable: Callable[[str], str | None]) -> NixlHandshake | None:
    """Return the handshake of `--kv-transfer-config`'s connector; None for an aggregated worker.

    Raise `ConfigError` for a disaggregated worker without a connector, and for ambiguous connectors.
    """
    if role not in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE):
        return None
    if config is None or not config.kv_connector:
        raise ConfigError(f"--disaggregation-mode {role.value} requires a connector, for example {EXAMPLE}")
    return _handshake(config.kv_connector, config.kv_connector_extra_config or {}, config.engine_id or "", variable)


def _handshake(
    name: str, extra: Mapping[str, Any], engine_id: str, variable: Callable[[str], str | None]
) -> NixlHandshake:
    if name == "NixlConnector":
        return Nixl()
    if name == "MooncakeConnector":
        host = variable("VLLM_HOST_IP") or "127.0.0.1"
        port = variable("VLLM_MOONCAKE_BOOTSTRAP_PORT") or str(MOONCAKE_PORT)
        return Mooncake(engine_id, f"http://{host}:{port}")
    if name in STORES:
        return Store()
    if name == "MultiConnector":
        return _only_exchanging(extra, engine_id, variable)
    known = ", ".join(("NixlConnector", "MooncakeConnector", "MultiConnector", *sorted(STORES)))
    raise ConfigError(f"--kv-transfer-config: connector {name!r} is not supported; must be one of {known}")


def _only_exchanging(extra: Mapping[str, Any], engine_id: str, variable: Callable[[str], str | None]) -> NixlHandshake:
    """Return the only connector that exchanges parameters; vLLM merges those of all, so two would be ambiguous."""
    children = extra.get("connectors") or []
    found = [
        _handshake(one.get("kv_connector", ""), one.get("kv_connector_extra_config") or {}, engine_id, variable)
        for one in children
    ]
    exchanging = [one for one in found if not isinstance(one, Store)]
    if len(exchanging) > 1:
        raise ConfigError("--kv-transfer-config: only one connector of a MultiConnector may be NIXL or Mooncake")
    return exchanging[0] if exchanging else Store()


def decode_params(disaggregated_params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the decode engine's parameters. Raise `InvalidArgument` for a result not from a vLLM prefill worker."""
    params = disaggregated_params.get(KEY)
    if params is not None and not isinstance(params, dict):
        raise InvalidArgument(f"prefill_result: {KEY} is {str(params)[:80]!r}, expected a map", param="prefill_result")
    return params
