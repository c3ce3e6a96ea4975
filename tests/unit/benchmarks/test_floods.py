"""Attacks are valid JSON of the size they are named for, and a delay is attributed to the machine or to the frontend."""

import io
import json
import sys
import threading
from pathlib import Path

import pytest
from benchmarks.floods.__main__ import LIMIT_MS, FloodsConfig, Window, effect, line, markdown, median_of, volley
from benchmarks.floods.attacks import Attack
from benchmarks.floods.connections import FINAL, PING, TEXT, frame
from benchmarks.floods.frontend import RECORD, LoopLag
from benchmarks.floods.late_stacks import LateStacks
from benchmarks.floods.records import lag_file, read_lags
from benchmarks.floods.send import request_bytes
from benchmarks.floods.surfaces import SURFACES, Surface

from dynamo.core.errors import ConfigError

NOT_JSON = ("a body of 190 MB that is not JSON", "JSON 100,000 deep", "a schema 1,000 deep")
SMALL = ("16,000 parts", "32 stop strings of 4 KB", "a schema of 8,000 properties", "100,000 biases", "2,048 tools")


def test_names_of_attacks_are_unique() -> None:
    names = [one.name for kind in SURFACES for one in kind("").attacks()]
    assert len(names) == len(set(names)) > 150
    assert {*NOT_JSON, *SMALL} <= set(names)


@pytest.mark.parametrize("name", SMALL)
def test_attack_is_a_request_in_json(name: str) -> None:
    (attack,) = FloodsConfig(attacks=f"^{name}$").selected(Surface(""))
    assert isinstance(attack, Attack)
    body = json.loads(attack.body())
    assert body["model"] == "bench"
    assert body["messages"]


def test_unknown_listener_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--surfaces ftp: must be among http, tls, kserve"):
        FloodsConfig(surfaces=["ftp"])


def test_delay_without_processor_time_is_the_machines(tmp_path: Path) -> None:
    path = tmp_path / "lags"
    path.write_bytes(RECORD.pack(1.0, 0.08, 0.002, 0.001) + RECORD.pack(2.0, 0.03, 0.05, 0.02) + b"cut off")
    file = lag_file(str(path))
    first, second = read_lags(file)
    assert (first.computed_s, first.on_loop_s, second.computed_s, second.on_loop_s) == (0.002, 0.001, 0.03, 0.02)
    assert not read_lags(file), "records are read once"


def test_effect_has_what_happened_within_its_window() -> None:
    window = Window("flood", 1.0, 2.0, 400, "refused", [0.5, 0.25])
    seen = [(0.5, 9.0), (1.5, 0.06), (1.6, 0.01), (2.5, 9.0)]
    one = effect(window, seen, [LoopLag(0.5, 9.0, 9.0, 9.0), LoopLag(1.5, 0.07, 0.06, 0.02)])
    assert (one.status, one.requests, one.request_ms) == (400, 2, 375.0)
    assert one.tokens["max"] == pytest.approx(60.0)
    assert (one.loop["max"], one.computed_ms, one.on_loop_ms, one.cpu_ms) == pytest.approx((70.0, 60.0, 20.0, 60.0))
    assert one.tokens["p99"] > LIMIT_MS
    assert not one.is_within
    assert line("flood", one).endswith("ABOVE THE LIMIT")
    assert "| flood | 400 | 375 | 60.0 | 0.00 | 70.0 | 60.0 | 20.0 | 60.0 |" in markdown({"flood": one})
    quiet = effect(window, [(1.5, 0.01)], [])
    assert median_of([one, quiet, quiet]).is_within


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


def hold(entered: threading.Event, leave: threading.Event) -> None:
    entered.set()
    leave.wait()


def test_stacks_are_written_only_while_the_loop_is_late() -> None:
    now_s = 1.0
    out = io.StringIO()
    late = LateStacks(out, 0.03, lambda: now_s)
    entered, leave = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold, args=(entered, leave), name="holder")
    holder.start()
    try:
        entered.wait()
        late.beat()
        now_s = 1.02
        assert not late.look(sys._current_frames())
        assert not out.getvalue()
        now_s = 1.05
        assert late.look(sys._current_frames())
        late.beat()
        assert not late.look(sys._current_frames())
    finally:
        leave.set()
        holder.join()
    text = out.getvalue()
    assert text.startswith("--- 1.0500: late 50.0 ms, 30.0 ms since the last look")
    assert "holder: " in text
    assert f"{__file__}:" in text and " hold\n" in text
    assert text.count("---") == 1
