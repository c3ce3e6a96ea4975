"""Transfer parameters of each connector."""

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.vllm.transfer import Mooncake, Nixl, NixlHandshake, Store, decode_params, handshake_of

PREFILL = DisaggregationMode.PREFILL


def made(name: str | None, **extra: Any) -> NixlHandshake | None:
    config = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra, engine_id="e")
    return handshake_of(config, PREFILL, {"VLLM_HOST_IP": "10.0.0.1"}.get)


def test_nixl_handover_returns_the_prefill_params() -> None:
    found = made("NixlConnector")
    assert isinstance(found, Nixl)
    requested = found.prefill_params()
    assert requested is not None
    assert requested["do_remote_decode"] is True
    assert found.handover({"remote_port": 1}, requested) == {"remote_port": 1}
    assert found.handover(None, requested) is None


def test_mooncake_handover_names_the_transfer_and_the_bootstrap_address() -> None:
    found = made("MooncakeConnector")
    assert isinstance(found, Mooncake)
    requested, other = found.prefill_params(), found.prefill_params()
    assert requested is not None
    assert other is not None
    assert requested["transfer_id"] != other["transfer_id"]
    reported = found.handover(None, requested)
    assert reported == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": requested["transfer_id"],
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e",
    }


def test_store_connector_has_no_prefill_params() -> None:
    found = made("LMCacheMPConnector")
    assert isinstance(found, Store)
    assert found.prefill_params() is None
    assert found.handover({"x": 1}, None) is None


def test_multi_connector_uses_its_single_transfer_connector() -> None:
    nixl, store = {"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}
    assert isinstance(made("MultiConnector", connectors=[store, nixl]), Nixl)
    assert isinstance(made("MultiConnector", connectors=[store]), Store)
    with pytest.raises(ConfigError, match="only one"):
        made("MultiConnector", connectors=[nixl, {"kv_connector": "MooncakeConnector"}])


def test_disaggregated_role_requires_a_supported_connector() -> None:
    with pytest.raises(ConfigError, match="requires a connector"):
        handshake_of(None, PREFILL, {}.get)
    with pytest.raises(ConfigError, match="'Odd' is not supported"):
        made("Odd")
    assert handshake_of(None, DisaggregationMode.AGGREGATED, {}.get) is None


def test_decode_params_reads_the_vllm_prefill_result() -> None:
    assert decode_params({"kv_transfer_params": {"a": 1}}) == {"a": 1}
    assert decode_params({}) is None
    with pytest.raises(InvalidArgument, match="expected a map"):
        decode_params({"kv_transfer_params": 3})
