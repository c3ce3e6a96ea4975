"""Causes of slow requests: each is produced by real processes, and named by one command and by the console."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from tests.cluster.cluster import MODEL, Cluster
from tests.integration.console.browser import PHONE, Browser, requires_chromium

pytestmark = pytest.mark.integration

COMMON = ("--num-gpu-blocks-override", "2000", "--block-size", "16")
# What makes a request slow takes several times as long as a busy machine adds, and the requests differ by half a second:
# a long prompt takes 0.5 s, a token 3 ms, or 57 ms on the slow worker.
FAST = (*COMMON, "--speedup-ratio", "0.1", "--decode-speedup-ratio", "20")
SLOW = (*COMMON, "--speedup-ratio", "0.1")
QUEUED = (*COMMON, "--speedup-ratio", "0.1")  # A prompt takes 0.2 s: twelve that arrive within two seconds queue.


def send(cluster: Cluster, words: int, tokens: int, name: str) -> str:
    """Send a streamed chat of which no block is cached, and return the id of the response."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{name} {time.time()} " + "word " * words}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    response = cluster.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    first = next(line for line in response.text.splitlines() if line.startswith("data: {"))
    return str(json.loads(first.removeprefix("data: "))["id"])


def together(count: int, work: Callable[[int], str]) -> list[str]:
    """Return the results of calls in threads."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda n=n: found.append(work(n))) for n in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def slowest(cluster: Cluster, *ids: str) -> dict[str, Any]:
    """Return the slowest request, which must be one of `ids`."""
    (found,) = cluster.http.get("/console/api/requests", params={"state": "slow", "limit": 1}).json()["requests"]
    assert found["id"] in {one[-36:] for one in ids}, found
    return dict(found)


def command(cluster: Cluster, *argv: str) -> str:
    """Return the output of `dynamo requests`."""
    argv = (sys.executable, "-m", "dynamo.cli", "requests", "--url", f"http://127.0.0.1:{cluster.port}", *argv)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    """A frontend on which a long prompt, a slow worker and a worker that stopped made requests slow; the id of the last."""
    with Cluster(tmp_path_factory.mktemp("turns"), "--router-mode", "round-robin", "--migration-limit", "3") as cluster:
        cluster.wait_until(cluster.is_live, "the frontend did not start")
        cluster.mocker(*FAST)
        together(6, lambda number: send(cluster, 60, 20, f"usual {number}"))
        long = send(cluster, 1900, 2, "long")
        (found,) = cluster.http.get("/console/api/requests", params={"id": long}).json()["requests"]
        assert (found["cause"], "computed 1,9" in found["explanation"]) == ("prefill", True), found

        slow = cluster.mocker(*SLOW)
        ids = [send(cluster, 60, 15, f"slow {number}") for number in range(2)]
        found = slowest(cluster, *ids)
        assert (found["cause"], "which is slow" in found["explanation"]) == ("slow-worker", True), found

        slow.send_signal(signal.SIGSTOP)
        try:
            moved = together(2, lambda number: send(cluster, 60, 200, f"moved {number}"))
        finally:
            slow.send_signal(signal.SIGCONT)
        found = slowest(cluster, *moved)
        assert (found["cause"], "unresponsive" in found["explanation"]) == ("migration", True), found
        yield cluster, found["id"]


def test_one_command_names_the_causes_and_another_one_the_stages(incident: tuple[Cluster, str]) -> None:
    cluster, moved = incident
    lines = command(cluster, "--slow", "--limit", "2").splitlines()
    assert lines[1].endswith("migration") and "the move to another worker" in lines[2]
    assert lines[3].endswith("slow-worker") and "per output token, other workers" in lines[4]
    detail = command(cluster, moved[:8])
    assert "lost by a failure" in detail
    assert "unresponsive" in detail


def test_a_queue_of_the_router_is_named(tmp_path: Path) -> None:
    flags = ("--router-mode", "kv", "--router-queue-threshold", "0.01")
    with Cluster(tmp_path, *flags) as cluster:
        cluster.wait_until(cluster.is_live, "the frontend did not start")
        cluster.mocker(*QUEUED)
        ids = together(12, lambda number: send(cluster, 600, 4, f"queued {number}"))
        found = slowest(cluster, *ids)
        assert (found["cause"], "no worker had capacity" in found["explanation"]) == ("router-queue", True), found
        assert "queue" in [stage["name"] for stage in found["stages"]]


@requires_chromium
def test_three_clicks_on_a_phone_and_the_keyboard_alone_lead_to_the_cause(
    incident: tuple[Cluster, str], tmp_path: Path
) -> None:
    cluster, moved = incident
    with Browser(tmp_path, f"http://127.0.0.1:{cluster.port}") as browser:
        browser.view("overview", size=PHONE)
        browser.click("Requests", "nav a")
        browser.until(lambda: browser.one("main .segmented"), "no tabs")
        browser.click("Slowest")
        browser.until(lambda: browser.text("tbody a") == moved[:8], "the slowest request is not the first")
        browser.click(moved[:8], "tbody a")
        browser.until(lambda: "the move to another worker" in browser.text(".notice"), "the cause is not named")
        assert "cause: migration" in browser.text()
        assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]

        browser.view("overview")
        browser.tab_to(lambda one: one.get_attribute("data-view") == "requests")
        browser.press(Keys.ENTER)
        browser.until(lambda: browser.one("main .segmented"), "no tabs")
        browser.tab_to(lambda one: one.text == "Slowest")
        browser.press(Keys.ENTER)
        browser.until(lambda: browser.text("tbody a") == moved[:8], "the slowest request is not the first")
        browser.tab_to(lambda one: one.text == moved[:8])
        browser.press(Keys.ENTER)
        browser.until(lambda: "the move to another worker" in browser.text(".notice"), "the cause is not named")
        browser.until(lambda: browser.all(".waterfall li"), "no waterfall")
        browser.picture("request")
        assert browser.errors() == []
