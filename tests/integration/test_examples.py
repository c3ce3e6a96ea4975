"""Output of the example programs."""

import json
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
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.integration.scripts import EXAMPLES, Scripts, running

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
WORDS = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    with running(tmp_path) as made:
        yield made


def test_hello_world_worker_removes_its_records(scripts: Scripts) -> None:
    scripts.start("hello_world/worker.py")
    assert scripts.run("hello_world/client.py", "Ada, Bob") == ["Hello Ada!", "Hello Bob!"]
    assert len(scripts.records()) == 1
    assert scripts.stop() == [0]
    assert scripts.records() == []


def test_two_stages_share_the_context_of_the_caller(scripts: Scripts) -> None:
    upper = scripts.start("two_stages/upper.py")
    scripts.start("two_stages/entrance.py")
    assert scripts.run("two_stages/client.py", "one two") == ["1. ONE", "2. TWO"]
    assert scripts.line(upper) == "asked by examples"


def test_stopped_caller_stops_both_stages(scripts: Scripts) -> None:
    upper = scripts.start("two_stages/upper.py")
    scripts.start("two_stages/entrance.py")
    many = " ".join([WORDS] * 50)  # Half a minute, of which the client takes the first tenth of a second.
    collected = scripts.run("two_stages/client.py", many, "2")
    assert collected[:2] == ["1. ONE", "2. TWO"]
    assert len(collected) < len(many.split())
    assert [scripts.line(upper), scripts.line(upper)] == ["asked by examples", "stopped"]


def test_cancellation_reaches_the_server_directly_and_through_a_middle_server(scripts: Scripts) -> None:
    server = scripts.start("cancellation/server.py")
    middle = scripts.start("cancellation/middle.py")
    received = ["received 0", "received 1", "received 2", "cancelled"]
    assert scripts.run("cancellation/client.py") == received
    assert scripts.line(server).startswith("cancelled before ")
    assert scripts.run("cancellation/client.py", "--middle") == received
    assert scripts.line(server).startswith("cancelled before ")
    assert scripts.line(middle) == "response of the server ended"
    assert scripts.stop() == [0, 0]


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_echo_model_serves_behind_the_frontend(scripts: Scripts, tmp_path: Path, kind: str) -> None:
    with Cluster(tmp_path, "--discovery-backend", "file") as cluster:
        scripts.start("echo_model/worker.py", *([] if kind == "text" else [bench_model()]))
        client = cluster.openai()
        wait_until(cluster.is_live, "the frontend never came up")
        wait_until(lambda: [model.id for model in client.models.list()] == ["echo"], "the model never appeared")
        messages = [{"role": "user", "content": "Good morning to you"}]
        whole = client.chat.completions.create(model="echo", messages=messages, max_tokens=64)  # type: ignore[call-overload]
        chunks = client.chat.completions.create(model="echo", messages=messages, max_tokens=64, stream=True)  # type: ignore[call-overload]
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert whole.choices[0].message.content == streamed
        assert "Good morning to you" in streamed
        assert whole.choices[0].finish_reason == "stop"  # The echoed prompt contains the token that ends a turn.
        assert ("user" in streamed) == (kind == "tokens"), "the template's own words are tokens too"


def test_sample_engine_runs_as_a_command(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        wait_until(cluster.is_live, "the frontend never came up")
        worker = cluster.worker("backend.sample", "--model-path", bench_model())
        messages = [{"role": "user", "content": "Good morning"}]
        answer = cluster.post({"model": "m", "messages": messages, "max_tokens": 16}).json()
        assert "Good morning" in answer["choices"][0]["message"]["content"]
        worker.terminate()
        assert worker.wait(DEADLINE_S) == 0
        refused = cluster.run("backend.sample", "--step-s", "1")
        assert refused.wait(DEADLINE_S) == 2
        assert "--model-path is required" in (tmp_path / "backend.sample2.log").read_text()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start the bundled model with a frontend that also serves Anthropic's API."""
    with Cluster(tmp_path_factory.mktemp("demo"), "--enable-anthropic-api") as cluster:
        wait_until(cluster.is_live, "the frontend never came up")
        cluster.worker("cpu", "--threads", "1")
        yield cluster


def run_example(cluster: Cluster, script: str, *arguments: str) -> str:
    """Return the output of an example for a running server."""
    argv = [sys.executable, str(EXAMPLES / script), *arguments, f"http://127.0.0.1:{cluster.port}"]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True).stdout


WORKER = "A worker is a process that runs an engine and answers requests."
FRONTEND = "The frontend is the process that speaks the OpenAI API over HTTP and passes requests on to workers."
PREFILL = "Prefill is the first phase of a request: the whole prompt is read and the KV cache is filled."
BLOCK = "A block is a run of tokens, such as 16, whose keys and values are kept together in the KV cache."


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (("01_stream.py", "What is a worker?"), [WORKER]),
        (("01_stream.py", "What is Dynamo?"), ["dynamo-serve is a framework for serving large language models on many machines. It is written in Python."]),
        (("02_many.py",), [f"  {one}" for one in (WORKER, FRONTEND, "12 + 30 = 42.", BLOCK, PREFILL)]),
        (("04_tools.py", "What is the weather in Paris?"), ['get_weather({"city": "Paris"}) -> {"city": "Paris", "condition": "sunny", "temperature": 21}']),
        (("05_json.py", "What is 12 + 30?"), ["{'answer': 42, 'unit': 'none'}"]),
        (("07_responses.py",), [WORKER, FRONTEND]),
        (("08_messages.py", "What is prefill?"), [PREFILL]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_bundled_model_answers_the_examples_correctly(demo: Cluster, argv: tuple[str, ...], lines: list[str]) -> None:
    shown = run_example(demo, *argv).splitlines()
    assert [line for line in lines if line not in shown] == []


def test_bundled_model_uses_the_result_of_a_tool(demo: Cluster) -> None:
    answer = run_example(demo, "04_tools.py", "What is the weather in Paris?").splitlines()[-1]
    assert [word for word in ("Paris", "sunny", "21") if word not in answer] == []


def test_bundled_model_answers_under_a_schema_of_one_integer(demo: Cluster) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    for a, b in ((12, 30), (41, 29), (25, 17), (60, 31)):
        answer = demo.post(
            {
                "model": "m",
                "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}},
                "temperature": 0,
            }
        ).json()
        choice = answer["choices"][0]
        assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == ({"answer": a + b}, "stop")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("My name is", " Demo. I am a tiny demo model of a few million parameters that comes with dynamo-serve."),
        ("12 + 30 =", " 42"),
        ("Dynamo is", " a framework for serving large language models on many machines."),
        ("Once upon a time", " there was a tiny demo model."),
        ("Hello", "! How can I help you?"),
    ],
)
def test_bundled_model_continues_a_text(demo: Cluster, prompt: str, text: str) -> None:
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 64}
    assert demo.http.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith(text)


def test_reasoning_is_returned_separately(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        wait_until(cluster.is_live, "the frontend never came up")
        cluster.worker("backend.sample", "--model-path", bench_model(), "--dyn-reasoning-parser", "qwen3")
        shown = run_example(cluster, "06_thoughts.py", "<think>Be kind.</think>Good morning").splitlines()
        thoughts = shown.index("thoughts: Be kind.")
        assert shown[thoughts + 1].startswith("Good morning")


def test_processes_of_the_example_discover_each_other_and_end_together(tmp_path: Path) -> None:
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

            wait_until(is_served, "two workers never appeared")
            messages = [{"role": "user", "content": "What is a worker?"}]
            answer = http.post("/v1/chat/completions", json={"model": "demo", "messages": messages}).json()
        assert "A worker is" in answer["choices"][0]["message"]["content"]
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(DEADLINE_S)


def test_router_sends_prompts_with_equal_prefix_to_the_same_worker(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path), "DYN_FILE_KV": ""}
    done = subprocess.run(
        ["sh", str(EXAMPLES / "09_kv_routing.sh"), str(free_port())],
        stdout=subprocess.PIPE, text=True, timeout=2 * DEADLINE_S, env=variables, check=True,
    )  # fmt: skip
    chosen = next(line for line in done.stdout.splitlines() if line.startswith("→"))
    assert chosen.split()[2] == "10+0+0", done.stdout
