"""Attacks are valid JSON of the size they are named for, and a delay is attributed to the machine or to the frontend."""

import json
from pathlib import Path

import pytest
from benchmarks.floods import LIMIT_MS, FloodsConfig, Window, effect, line, markdown
from benchmarks.floods_attacks import attacks
from benchmarks.floods_frontend import RECORD, LoopLag, read_lags

from dynamo.core.errors import ConfigError

NOT_JSON = ("a body of 190 MB that is not JSON", "JSON 100,000 deep", "a schema 1,000 deep")
SMALL = ("16,000 parts", "32 stop strings of 4 KB", "a schema of 8,000 properties", "100,000 biases", "2,048 tools")


def test_names_of_attacks_are_unique() -> None:
    names = [one.name for one in attacks()]
    assert len(names) == len(set(names)) > 40
    assert {*NOT_JSON, *SMALL} <= set(names)


@pytest.mark.parametrize("name", SMALL)
def test_attack_is_a_request_in_json(name: str) -> None:
    (attack,) = FloodsConfig(attacks=f"^{name}$").selected()
    body = json.loads(attack.body())
    assert body["model"] == "bench"
    assert body["messages"]


def test_attack_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--attacks nonsense: must match the name of an attack"):
        FloodsConfig(attacks="nonsense").selected()


def test_delay_without_processor_time_is_the_machines(tmp_path: Path) -> None:
    path = tmp_path / "lags"
    path.write_bytes(RECORD.pack(1.0, 0.08, 0.002) + RECORD.pack(2.0, 0.03, 0.05) + b"cut off")
    assert list(read_lags(str(path))) == [LoopLag(1.0, 0.08, 0.002), LoopLag(2.0, 0.03, 0.03)]


def test_effect_has_what_happened_within_its_window() -> None:
    window = Window("flood", 1.0, 2.0, 400, "refused", [0.5, 0.25])
    seen = [(0.5, 9.0), (1.5, 0.06), (1.6, 0.01), (2.5, 9.0)]
    one = effect(window, seen, [LoopLag(0.5, 9.0, 9.0), LoopLag(1.5, 0.05, 0.04)])
    assert (one.status, one.requests, one.request_ms) == (400, 2, 375.0)
    assert one.tokens["max"] == pytest.approx(60.0)
    assert (one.loop["max"], one.loop_computed["max"]) == pytest.approx((50.0, 40.0))
    assert one.tokens["p99"] > LIMIT_MS
    assert not one.is_within
    assert line("flood", one).endswith("ABOVE THE LIMIT")
    assert "| flood | 400 | 375 | 60.0 | 60.0 | 50.0 | 40.0 |" in markdown({"flood": one})
