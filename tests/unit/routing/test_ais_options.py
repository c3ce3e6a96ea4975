"""Engine settings yield a first estimate of prefill times."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.kv_router.config import ESTIMATE
from dynamo.routing.ais_options import AisOptions, estimate_of, perf_config_text
from dynamo.routing.settings import KvRouterOptions, router_config

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
FLAT = ["--ais-backend", "vllm", "--ais-system", "h200_sxm", "--ais-model-path"]


def options(*argv: str, **variables: str) -> AisOptions:
    return load(AisOptions, argv, variables)


def engine(model: Path | str, **more: Any) -> dict[str, Any]:
    return {"backend": "vllm", "system": "h200_sxm", "model": str(model), "worker_type": "aggregated", **more}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_ais_model_estimates_thirty_thousand_tokens_per_second_for_eight_billion_parameters(model: Path) -> None:
    base, token, pair = options(*FLAT, str(model)).prefill_estimate()

    assert 20_000 < 1 / token < 50_000
    assert 0 < base < 0.05 and 0 < pair * 8192 < token


def test_ais_model_is_faster_with_more_and_faster_accelerators(model: Path) -> None:
    one, two = estimate_of(engine(model)), estimate_of(engine(model, tp=2))
    slow = estimate_of(engine(model, system="a100-sxm"))

    assert two[1] == pytest.approx(one[1] / 2)
    assert slow[1] > 3 * one[1]


def test_ais_model_counts_active_experts_only(model: Path) -> None:
    dense = estimate_of(engine(model))[1]
    (model / "config.json").write_text(
        json.dumps({**LLAMA_8B, "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 1024})
    )

    assert estimate_of(engine(model))[1] < dense / 2


@pytest.mark.parametrize("given", [{"system": "abacus"}, {"model": "org/name"}])
def test_ais_model_uses_a_mid_sized_model_by_default(
    model: Path, given: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert estimate_of({**engine(model), **given}) == ESTIMATE
    assert "unknown" in caplog.text


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"num_hidden_layers": "x"}'])
def test_ais_model_treats_an_empty_config_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    assert estimate_of(engine(tmp_path)) == ESTIMATE


@pytest.mark.parametrize("form", ["json", "file", "variable"])
def test_ais_options_accept_json_or_a_file(model: Path, tmp_path: Path, form: str) -> None:
    text = json.dumps(engine(model, tp=4))
    path = tmp_path / "ais.yaml"
    path.write_text(text)
    given = {
        "json": lambda: options("--ais-perf-config", text),
        "file": lambda: options("--ais-perf-config", str(path)),
        "variable": lambda: options(DYN_AIS_PERF_CONFIG=str(path)),
    }[form]()

    assert given.prefill_estimate() == estimate_of(engine(model, tp=4))


def test_ais_options_accept_the_older_spelling(model: Path) -> None:
    older = [word.replace("--ais-", "--aic-") for word in FLAT]

    assert options(*older, str(model), "--aic-tp-size", "2").ais_config()["tp"] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "backend, system, model"),
        (["--ais-backend", "vllm"], "system, model"),
        (["--ais-perf-config", "{}", "--ais-backend", "vllm"], "mutually exclusive"),
        (["--ais-perf-config", "{"], "valid JSON"),
        (["--ais-perf-config", "[]"], "--ais-perf-config"),
        (["--ais-perf-config", "none.yaml"], "none.yaml"),
        ([*FLAT, "m", "--ais-tp-size", "0"], "--ais-tp-size"),
    ],
)
def test_ais_options_refuse_missing_and_extra_fields(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*argv).ais_config()


def test_ais_options_require_an_engine_only_with_a_model() -> None:
    assert router_config(KvRouterOptions(), 16).prefill_load_model == "none"
    with pytest.raises(ConfigError, match="--router-prefill-load-model ais requires"):
        router_config(KvRouterOptions(router_prefill_load_model="ais"), 16)
    given = KvRouterOptions(router_prefill_load_model="aic", ais_perf_config=json.dumps(engine("m")))
    assert router_config(given, 16).prefill_load_model == "ais"


def test_ais_options_accept_an_object_a_mapping_or_text_from_python() -> None:
    class Config:
        def to_dict(self) -> dict[str, str]:
            return {"backend": "vllm"}

    assert perf_config_text(None) is None
    assert perf_config_text("file.yaml") == "file.yaml"
    assert perf_config_text({"backend": "vllm"}) == perf_config_text(Config()) == '{"backend":"vllm"}'
