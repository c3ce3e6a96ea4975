"""The examples do what they say."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmarks.corpus import bench_model
from benchmarks.ports import free_port
from tests.integration.graph import Graph, is_live, wait_for
from tests.integration.scripts import EXAMPLES, Scripts, running

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
WORDS = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    with running(tmp_path) as made:
        yield made


def test_hello_world_and_a_worker_that_leaves_nothing_behind(scripts: Scripts) -> None:
    scripts.start("hello_world/worker.py")
    assert scripts.run("hello_world/client.py", "Ada, Bob") == ["Hello Ada!", "Hello Bob!"]
    assert len(scripts.records()) == 1
    assert scripts.stop() == [0]
    assert scripts.records() == []


def test_two_stages_share_the_callers_context(scripts: Scripts) -> None:
    upper = scripts.start("two_stages/upper.py")
    scripts.start("two_stages/entrance.py")
    assert scripts.run("two_stages/client.py", "one two") == ["1. ONE", "2. TWO"]
    assert scripts.line(upper) == "asked by examples"


def test_a_caller_that_stops_stops_both_stages(scripts: Scripts) -> None:
    upper = scripts.start("two_stages/upper.py")
    scripts.start("two_stages/entrance.py")
    heard = scripts.run("two_stages/client.py", WORDS, "2")
    assert heard[:2] == ["1. ONE", "2. TWO"]
    assert len(heard) < len(WORDS.split())
    assert [scripts.line(upper), scripts.line(upper)] == ["asked by examples", "stopped"]


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_the_echo_model_answers_behind_the_frontend(scripts: Scripts, tmp_path: Path, kind: str) -> None:
    graph = Graph(tmp_path, "--discovery-backend", "file")
    try:
        scripts.start("echo_model/worker.py", *([] if kind == "text" else [bench_model()]))
        client = graph.openai()
        wait_for(lambda: is_live(graph), "the frontend never came up")
        wait_for(lambda: [model.id for model in client.models.list()] == ["echo"], "the model never appeared")
        messages = [{"role": "user", "content": "Good morning to you"}]
        whole = client.chat.completions.create(model="echo", messages=messages, max_tokens=64)  # type: ignore[call-overload]
        chunks = client.chat.completions.create(model="echo", messages=messages, max_tokens=64, stream=True)  # type: ignore[call-overload]
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert whole.choices[0].message.content == streamed
        assert "Good morning to you" in streamed
        assert whole.choices[0].finish_reason == "stop"  # The echoed prompt holds the token that ends a turn.
        assert ("user" in streamed) == (kind == "tokens"), "the template's own words are tokens too"
    finally:
        graph.stop()


def test_the_sample_engine_is_a_command(tmp_path: Path) -> None:
    graph = Graph(tmp_path)
    try:
        wait_for(lambda: is_live(graph), "the frontend never came up")
        worker = graph.worker("backend.sample", "--model-path", bench_model())
        messages = [{"role": "user", "content": "Good morning"}]
        answer = graph.post({"model": "m", "messages": messages, "max_tokens": 16}).json()
        assert "Good morning" in answer["choices"][0]["message"]["content"]
        worker.terminate()
        assert worker.wait(30) == 0
        refused = graph.run("backend.sample", "--step-s", "1")
        assert refused.wait(30) == 2
        assert "--model-path is missing" in (tmp_path / "backend.sample2.log").read_text()
    finally:
        graph.stop()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """The bundled model behind a frontend that speaks to Anthropic's clients too."""
    graph = Graph(tmp_path_factory.mktemp("demo"), "--enable-anthropic-api")
    try:
        wait_for(lambda: is_live(graph), "the frontend never came up")
        graph.worker("cpu", "--threads", "1")
        yield graph
    finally:
        graph.stop()


def said(graph: Graph, script: str, *arguments: str) -> str:
    """What an example prints of a running server."""
    argv = [sys.executable, str(EXAMPLES / script), *arguments, f"http://127.0.0.1:{graph.port}"]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True).stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("01_stream.py", "What is a worker?"), "A worker is"),
        (("02_many.py",), "order of arrival:"),
        (("04_tools.py", "What is the weather in Paris?"), 'get_weather({"city": "Paris"}) -> {"city": "Paris", "sky": "clear"'),
        (("05_json.py", "What is 12 + 30?"), "{'answer': "),
        (("07_responses.py",), "tokens in, "),
        (("08_messages.py", "What is prefill?"), "Prefill is"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_clients_are_answered_by_the_bundled_model(demo: Graph, argv: tuple[str, ...], words: str) -> None:
    assert words in said(demo, *argv)


def test_thoughts_are_shown_apart(tmp_path: Path) -> None:
    graph = Graph(tmp_path)
    try:
        wait_for(lambda: is_live(graph), "the frontend never came up")
        graph.worker("backend.sample", "--model-path", bench_model(), "--dyn-reasoning-parser", "qwen3")
        shown = said(graph, "06_thoughts.py", "<think>Be kind.</think>Good morning").splitlines()
        thoughts = shown.index("thoughts: Be kind.")
        assert shown[thoughts + 1].startswith("Good morning")
    finally:
        graph.stop()


def test_the_parts_find_each_other_and_end_together(tmp_path: Path) -> None:
    port = free_port()
    variables = {**os.environ, "PYTHON": sys.executable, "PORT": str(port), "DYN_FILE_KV": str(tmp_path / "kv")}
    shell = subprocess.Popen(["bash", str(EXAMPLES / "03_parts.sh")], env=variables, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:

            def is_served() -> bool:
                try:
                    return len(http.get("/health").json()["instances"]) == 2
                except httpx.TransportError:
                    return False

            wait_for(is_served, "two workers never appeared")
            messages = [{"role": "user", "content": "What is a worker?"}]
            answer = http.post("/v1/chat/completions", json={"model": "demo", "messages": messages}).json()
        assert "A worker is" in answer["choices"][0]["message"]["content"]
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(DEADLINE_S)


def test_the_router_sends_what_begins_alike_to_the_same_worker(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path), "DYN_FILE_KV": ""}
    done = subprocess.run(
        ["sh", str(EXAMPLES / "09_kv_routing.sh"), str(free_port())],
        stdout=subprocess.PIPE, text=True, timeout=2 * DEADLINE_S, env=variables, check=True,
    )  # fmt: skip
    chosen = next(line for line in done.stdout.splitlines() if line.startswith("→"))
    assert chosen.split()[2] == "10+0+0", done.stdout
