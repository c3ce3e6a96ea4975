"""Transfer: what prefill and decode say to each other about KV blocks, for each of vLLM's connectors (serving-plane.md §5.7). Pure.

prefill: kv_transfer_params = handshake.asked_of_prefill()
…vLLM answers with its own…           handshake.told(them)  ─▶ disaggregated_params
decode:  kv_transfer_params = handshake.asked_of_decode(disaggregated_params)
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
"""Connectors whose blocks lie in a store that both sides know: nothing is to be said."""
MOONCAKE_PORT = 8998  # Of Mooncake's bootstrap server, unless VLLM_MOONCAKE_BOOTSTRAP_PORT says another.


class Handshake(Protocol):
    """One connector's words."""

    def asked_of_prefill(self) -> dict[str, Any] | None:
        """What the prefill engine is asked; None: nothing."""

    def told(self, params: Mapping[str, Any] | None, asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """What decode needs of the prefill engine's answer to what it was `asked`; None: nothing is to be fetched."""


@dataclass(frozen=True, slots=True)
class Nixl:
    """Decode pulls the blocks from prefill's memory."""

    def asked_of_prefill(self) -> dict[str, Any] | None:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def told(self, params: Mapping[str, Any] | None, asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return dict(params) if params else None


@dataclass(frozen=True, slots=True)
class Mooncake:
    """Prefill pushes the blocks to whoever asks for the transfer by its id."""

    engine_id: str
    bootstrap: str
    """`http://host:port` of the prefill side."""

    def asked_of_prefill(self) -> dict[str, Any] | None:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": uuid.uuid4().hex}

    def told(self, params: Mapping[str, Any] | None, asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
        assert asked is not None, "Mooncake's prefill is always asked for something"
        return {
            **(params or {}),
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": asked["transfer_id"],
            "remote_bootstrap_addr": self.bootstrap,
            "remote_engine_id": self.engine_id,
        }


@dataclass(frozen=True, slots=True)
class Store:
    """The blocks lie outside both engines, which find them by the prompt."""

    def asked_of_prefill(self) -> dict[str, Any] | None:
        return None

    def told(self, params: Mapping[str, Any] | None, asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return None


def handshake_of(config: Any, role: DisaggregationMode, variable: Callable[[str], str | None]) -> Handshake | None:
    """The words of the connector that `--kv-transfer-config` names; None where a worker does everything itself.

    Raises `ConfigError` for a part of a request without a connector, and for connectors that cannot be told apart.
    """
    if role not in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE):
        return None
    if config is None or not config.kv_connector:
        raise ConfigError(f"--disaggregation-mode {role.value} needs a connector, for example {EXAMPLE}")
    return _handshake(config.kv_connector, config.kv_connector_extra_config or {}, config.engine_id or "", variable)


def _handshake(name: str, extra: Mapping[str, Any], engine_id: str, variable: Callable[[str], str | None]) -> Handshake:
    if name == "NixlConnector":
        return Nixl()
    if name == "MooncakeConnector":
        host = variable("VLLM_HOST_IP") or "127.0.0.1"
        port = variable("VLLM_MOONCAKE_BOOTSTRAP_PORT") or str(MOONCAKE_PORT)
        return Mooncake(engine_id, f"http://{host}:{port}")
    if name in STORES:
        return Store()
    if name == "MultiConnector":
        return _only_speaker(extra, engine_id, variable)
    known = ", ".join(("NixlConnector", "MooncakeConnector", "MultiConnector", *sorted(STORES)))
    raise ConfigError(f"--kv-transfer-config: connector {name!r} is not known here; expected one of {known}")


def _only_speaker(extra: Mapping[str, Any], engine_id: str, variable: Callable[[str], str | None]) -> Handshake:
    """Of several connectors, the one that says something; vLLM joins their words, so that two could not be told apart."""
    children = extra.get("connectors") or []
    found = [
        _handshake(one.get("kv_connector", ""), one.get("kv_connector_extra_config") or {}, engine_id, variable)
        for one in children
    ]
    speakers = [one for one in found if not isinstance(one, Store)]
    if len(speakers) > 1:
        raise ConfigError("--kv-transfer-config: of a MultiConnector's connectors only one may be NIXL or Mooncake")
    return speakers[0] if speakers else Store()


def asked_of_decode(disaggregated_params: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the decode engine is asked. Raises `InvalidArgument` for what no prefill worker of vLLM's said."""
    params = disaggregated_params.get(KEY)
    if params is not None and not isinstance(params, dict):
        raise InvalidArgument(f"prefill_result: {KEY} is {str(params)[:80]!r}, expected a map", param="prefill_result")
    return params
