"""Attacks are valid JSON of the size they are named for, and a delay is attributed to the machine or to the frontend."""

import json
from pathlib import Path

import pytest
from benchmarks.floods import LIMIT_MS, FloodsConfig, Window, all_attacks, effect, line, markdown, volley
from benchmarks.floods_attacks import Attack
from benchmarks.floods_connections import FINAL, PING, TEXT, frame
from benchmarks.floods_frontend import RECORD, LoopLag, read_lags
from benchmarks.floods_send import request_bytes

from dynamo.core.errors import ConfigError

NOT_JSON = ("a body of 190 MB that is not JSON", "JSON 100,000 deep", "a schema 1,000 deep")
SMALL = ("16,000 parts", "32 stop strings of 4 KB", "a schema of 8,000 properties", "100,000 biases", "2,048 tools")


def test_names_of_attacks_are_unique() -> None:
    names = [one.name for one in all_attacks()]
    assert len(names) == len(set(names)) > 150
    assert {*NOT_JSON, *SMALL} <= set(names)


@pytest.mark.parametrize("name", SMALL)
def test_attack_is_a_request_in_json(name: str) -> None:
    (attack,) = FloodsConfig(attacks=f"^{name}$").selected()
    assert isinstance(attack, Attack)
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


def test_request_is_complete_and_the_last_of_its_connection() -> None:
    head, _, body = request_bytes("POST", "/v1/x", b"hello").partition(b"\r\n\r\n")
    assert body == b"hello"
    assert b"\r\nContent-Length: 5" in head and b"\r\nConnection: close" in head


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_frame_has_the_length_of_its_data(size: int) -> None:
    data = frame(FINAL | TEXT, b"x" * size)
    shown = data[1] & 0x7F
    length = shown if shown < 126 else int.from_bytes(data[2 : 4 if shown == 126 else 10], "big")
    assert (length, data[-size:] if size else b"") == (size, b"x" * size)
    assert data[1] & 0x80, "a client masks its frames"
    assert frame(FINAL | PING, b"")[0] & 0x0F == PING


def test_crowd_makes_the_attack_once_for_each_client() -> None:
    ports: list[int] = []

    def shot(port: int) -> tuple[int, str]:
        ports.append(port)
        return 200, "done"

    assert volley(7, shot, 3) == (200, "done")
    assert ports == [7, 7, 7]
