"""A frontend continues to serve, and can be stopped, while a chat template computes without end."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

TEMPLATES = {
    "power": "{% set ns = namespace(x=3) %}{% for i in range(99999) %}{% set ns.x = ns.x ** 60 % 18446744073709551557 %}"
    "{% for j in range(99999) %}{% set y = ns.x * ns.x %}{% endfor %}{% endfor %}",
    "sorts": "{% for i in range(99999) %}{% set x = range(99999) | sort | list %}{% endfor %}",
}
GO = "{{ messages[0].content }}{% if messages[0].content == 'go' %}"
ANSWER_S = 5.0  # Time limit of a page that takes a millisecond, on a shared machine.


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        for name, source in TEMPLATES.items():
            (tmp_path / f"{name}.jinja").write_text(GO + source + "{% endif %}")
            template = ("--custom-jinja-template", str(tmp_path / f"{name}.jinja"))
            cluster.run("mocker", "--model-name", name, "--namespace", name, *template)
        cluster.run("mocker", "--model-name", "plain", "--namespace", "plain")
        wait_until(lambda: cluster.workers() == 3, "the workers never appeared")
        wait_until(lambda: len(cluster.http.get("/v1/models").json()["data"]) == 3, "the models never appeared")
        yield cluster


def send_request(cluster: Cluster, model: str, text: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return httpx.post(f"http://127.0.0.1:{cluster.port}/v1/chat/completions", json=body, timeout=60.0)


def test_hostile_template_does_not_delay_other_requests(cluster: Cluster) -> None:
    refused: dict[str, httpx.Response] = {}
    threads = [
        threading.Thread(target=lambda name=name: refused.setdefault(name, send_request(cluster, name, "go")))  # type: ignore[misc]
        for name in TEMPLATES
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        began_s = time.monotonic()
        assert cluster.http.get("/live").status_code == 200
        assert send_request(cluster, "plain", "hello").status_code == 200
        assert time.monotonic() - began_s < ANSWER_S
        time.sleep(0.2)
    for name, response in refused.items():
        assert response.status_code == 400, (name, response.text)
        # The limit on steps or the one on time, whichever this machine reaches first.
        assert re.search(r"chat template: (it|its loops and macros) ", response.json()["error"]["message"])
    assert send_request(cluster, "sorts", "hello").status_code == 200


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_sigterm_ends_the_frontend_while_a_template_computes(cluster: Cluster, name: str) -> None:
    def send_all() -> None:
        try:
            send_request(cluster, name, "go")
        except httpx.HTTPError:
            return

    thread = threading.Thread(target=send_all)
    thread.start()
    time.sleep(1.0)
    cluster.frontend.send_signal(signal.SIGTERM)
    assert cluster.frontend.wait(30.0) == 0
    thread.join(60.0)
