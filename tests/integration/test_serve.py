"""`dynamo serve` and `dynamo chat` as users run them: real processes, the bundled model, the openai SDK, curl."""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from benchmarks.ports import free_port

pytestmark = pytest.mark.integration

DYNAMO = [sys.executable, "-m", "dynamo.cli"]
DEADLINE_S = 60.0  # For operations that take a second on an idle machine.
PATIENT = [
    sys.executable, "-c",
    "from dynamo.cli import __main__, session; session.FRONTEND_DRAIN_S = session.WORKER_DRAIN_S = 600.0; __main__.main()",
]  # fmt: skip
"""Program of `dynamo` that never kills a process which does not end by itself within `DEADLINE_S`."""
QUESTION = [{"role": "user", "content": "What is Dynamo?"}]


class Server:
    """One `dynamo serve`, its output and its processes."""

    def __init__(self, tmp_path: Path, *argv: str, is_private: bool = False, program: Sequence[str] = DYNAMO) -> None:
        self.kv = tmp_path / "kv"
        self._tmp_path = tmp_path
        self._client: openai.OpenAI | None = None
        self._output = tmp_path / "output"
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [*program, "serve", "--http-host", "127.0.0.1", "--http-port", "0", *argv],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DYN_FILE_KV": "" if is_private else str(self.kv), "TMPDIR": str(tmp_path)},
            )

    def text(self) -> str:
        return self._output.read_text()

    def ready(self) -> "Server":
        self.until("Press Ctrl-C to stop.")
        return self

    def until(self, words: str) -> None:
        def has_come() -> bool:
            assert self.process.poll() is None, f"it ended:\n{self.text()}"
            return words in self.text()

        wait_for(has_come, lambda: f"{words!r} never appeared in:\n{self.text()}")

    @property
    def url(self) -> str:
        found = re.search(r"at (http://localhost:\d+)", self.text())
        assert found, self.text()
        return found[1]

    def client(self) -> openai.OpenAI:
        if self._client is None:
            self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def children(self) -> dict[int, str]:
        """Return its child processes: their ids and command lines."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == self.process.pid:
                    found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text().replace("\0", " ")
        return found

    def workers(self) -> list[int]:
        return sorted(pid for pid, command in self.children().items() if "dynamo.frontend" not in command)

    def instances(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=DEADLINE_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["instances"]
        return [instance for instance in found if instance["endpoint"] == "generate"]

    def records(self) -> list[str]:
        """Return the records in the discovery directory."""
        return [path.name for path in self.kv.rglob("*") if path.is_file()]

    def leftovers(self) -> list[Path]:
        """Return its temporary directories."""
        return list(self._tmp_path.glob("dynamo-serve-*"))

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


def wait_for(is_so: Callable[[], bool], complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@contextlib.contextmanager
def serving(tmp_path: Path, *argv: str, is_private: bool = False, program: Sequence[str] = DYNAMO) -> Iterator[Server]:
    server = Server(tmp_path, *argv, is_private=is_private, program=program)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one worker with the bundled model; the tests that share it restore its state."""
    with serving(tmp_path_factory.mktemp("demo"), is_private=True) as server:
        yield server.ready()


def model_of(server: Server) -> str:
    return server.client().models.list().data[0].id


def streamed(server: Server, model: str, **options: Any) -> str:
    chunks = server.client().chat.completions.create(model=model, messages=QUESTION, stream=True, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_serve_describes_the_demo_model(demo: Server) -> None:
    assert "demo model: tiny" in demo.text()


def test_workers_of_a_private_graph_listen_on_loopback_only(demo: Server) -> None:
    addresses = [instance["transport"]["tcp"] for instance in demo.instances()]
    assert addresses
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_openai_sdk_gets_equal_text_streamed_and_whole(demo: Server) -> None:
    model = model_of(demo)
    whole = demo.client().chat.completions.create(model=model, messages=QUESTION, temperature=0.0)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 1
    assert whole.choices[0].message.content
    assert streamed(demo, model, temperature=0.0) == whole.choices[0].message.content


def test_openai_sdk_completes_a_text(demo: Server) -> None:
    answer = demo.client().completions.create(model=model_of(demo), prompt="Dynamo is", max_tokens=5)
    assert answer.choices[0].finish_reason in {"length", "stop"}


def test_bad_request_raises_an_exception_of_the_sdk(demo: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        demo.client().chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError):
        demo.client().chat.completions.create(model=model_of(demo), messages=QUESTION, temperature=9.0)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_printed_curl_command_works(demo: Server) -> None:
    line = next(line for line in demo.text().splitlines() if line.startswith("curl "))
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    events = [text for text in answer.stdout.splitlines() if text.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert any(json.loads(event[6:])["choices"][0]["delta"].get("content") for event in events[:-1])


def test_ten_concurrent_conversations_do_not_mix(demo: Server) -> None:
    # Long enough for all of them to be in progress at once, however late a busy machine lets the last one begin.
    model, long = model_of(demo), {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
    alone = streamed(demo, model, temperature=0.0, **long)
    arrivals: list[int] = []

    def converse(number: int) -> str:
        text = ""
        for chunk in demo.client().chat.completions.create(
            model=model, messages=QUESTION, stream=True, temperature=0.0, **long
        ):
            arrivals.append(number)
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        return text

    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(converse, range(10)))
    assert answers == [alone] * 10
    changes = sum(before != after for before, after in itertools.pairwise(arrivals))
    assert changes > 20, "the answers came one after the other"


def test_piped_chat_keeps_and_resets_its_history(demo: Server) -> None:
    command = [*DYNAMO, "chat", "--url", demo.url, "--temperature", "0", "--max-tokens", "40"]
    lines = "What is Dynamo?\n/reset\nWhat is Dynamo?\n"
    talk = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    first, expected_message, second = talk.stdout.rstrip("\n").split("\n")
    assert (talk.returncode, talk.stderr) == (0, "")
    assert expected_message == "History deleted."
    assert first
    assert first == second


def test_disconnected_client_frees_the_engine(demo: Server) -> None:
    model = model_of(demo)
    chunks = demo.client().chat.completions.create(
        model=model, messages=QUESTION, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(iter(chunks))
    chunks.close()
    assert streamed(demo, model, max_tokens=5) != ""


def test_ctrl_c_interrupts_a_response_and_ctrl_d_ends_the_chat(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine", "mocker") as server:
        server.ready()
        terminal, theirs = pty.openpty()
        talk = subprocess.Popen(
            [*DYNAMO, "chat", "--url", server.url, "--max-tokens", "5000"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  No other thread runs here.
        )
        os.close(theirs)
        seen = b""

        def shows(words: bytes) -> Callable[[], bool]:
            def has_come() -> bool:
                nonlocal seen
                if select.select([terminal], [], [], 0)[0]:
                    seen += os.read(terminal, 65536)
                return words in seen

            return has_come

        wait_for(shows(b"> "), lambda: f"no prompt: {seen!r}")
        os.write(terminal, b"Tell me a story\n")
        wait_for(lambda: shows(b"story")() and len(seen) > 500, lambda: f"no answer: {seen!r}")
        os.write(terminal, b"\x03")
        wait_for(shows(b" [interrupted]"), lambda: f"it went on: {seen!r}")
        # Ctrl-D before the prompt is lost: readline switches the terminal to raw mode, which drops a pending end of file.
        wait_for(
            lambda: shows(b"")() and b"> " in seen.rpartition(b" [interrupted]")[2], lambda: f"no prompt: {seen!r}"
        )
        os.write(terminal, b"\x04")
        assert talk.wait(DEADLINE_S) == 0
        os.close(terminal)


def test_chat_without_a_server_prints_how_to_start_one() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    talk = subprocess.run([*DYNAMO, "chat", "--url", url], input="", capture_output=True, text=True, check=False)
    assert talk.returncode == 1
    assert talk.stderr.startswith(f"error: no server at {url}")
    assert "dynamo serve" in talk.stderr
    assert len(talk.stderr.splitlines()) == 1


def test_chat_started_with_its_server_waits_for_the_model(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    command = [*DYNAMO, "chat", "--url", url, "--max-tokens", "8", "--ready-timeout", str(DEADLINE_S)]
    with serving(tmp_path, "--http-port", url.rpartition(":")[2]) as server:
        wait_for(lambda: any(tmp_path.glob("dynamo-serve-*/logs/graph.json")), server.text)
        talk = subprocess.run(
            command,
            input="What is Dynamo?\n",
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    assert (talk.returncode, bool(talk.stdout.strip())) == (0, True), talk.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_stops_cleanly_on_each_signal(tmp_path: Path, number: int) -> None:
    with serving(tmp_path, "--engine", "mocker", "--workers", "2", program=PATIENT) as server:
        server.ready()
        children = list(server.children())
        assert len(children) == 3
        assert server.records()
        assert server.leftovers()
        assert server.end(number) == 0
        assert not any(map(is_alive, children))
        assert server.records() == []
        assert server.leftovers() == []
        assert server.text().rstrip().splitlines()[-1].endswith(": stopping")


def test_ctrl_c_during_a_response_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, program=PATIENT) as server:
        server.ready()
        chunks = server.client().chat.completions.create(
            model=model_of(server), messages=QUESTION, stream=True, max_tokens=200
        )
        next(iter(chunks))
        children = list(server.children())
        assert server.end() == 0
        chunks.close()
        assert not any(map(is_alive, children))
        assert server.records() == []


def test_no_process_survives_a_killed_server(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine", "mocker") as server:
        server.ready()
        children = list(server.children())
        server.process.kill()
        wait_for(lambda: not any(map(is_alive, children)), lambda: f"still there: {children}")
        assert server.records() == []


def test_killed_worker_is_restarted_and_fails_no_unstarted_conversation(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2") as server:
        server.ready()
        model = model_of(server)
        before = server.workers()
        os.kill(before[0], signal.SIGKILL)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: streamed(server, model, max_tokens=20, temperature=0.0), range(16)))
        assert len(set(answers)) == 1
        assert answers[0]
        server.until("was killed by SIGKILL; restarting it")
        wait_for(lambda: len(server.workers()) == 2, lambda: f"no second worker came back:\n{server.text()}")
        wait_for(
            lambda: len({instance["instance_id"] for instance in server.instances()}) >= 2,
            lambda: "the new worker never registered",
        )
        assert streamed(server, model, max_tokens=5)


def test_killed_frontend_is_restarted_on_its_port_with_the_same_workers(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine", "mocker", "--workers", "2", "--speedup-ratio", "0", is_private=True) as server:
        server.ready()
        url, model, workers = server.url, model_of(server), server.workers()
        instances = {instance["instance_id"] for instance in server.instances()}
        frontend = next(pid for pid, command in server.children().items() if "dynamo.frontend" in command)
        os.kill(frontend, signal.SIGKILL)
        server.until("frontend was killed by SIGKILL; restarting it")

        def is_complete() -> bool:
            with contextlib.suppress(OSError):
                return {instance["instance_id"] for instance in server.instances()} == instances
            return False

        wait_for(is_complete, lambda: f"the workers did not attach again:\n{server.text()}")
        wait_for(
            lambda: [one.id for one in server.client().models.list().data] == [model],
            lambda: "the model was not listed again",
        )
        assert streamed(server, model, max_tokens=3)
        assert (server.url, server.workers()) == (url, workers)
        log = Path(re.search(r"\(log: (.+)\)", server.text())[1])  # type: ignore[index]
        assert server.end() == 0
    assert log.exists(), "a message named this log, so it stays"
    assert server.leftovers() == [log.parent.parent]


def test_occupied_port_is_one_line_before_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = Server(tmp_path, "--http-port", port)
        assert server.process.wait(DEADLINE_S) == 1
    assert server.text().startswith(f"error: --http-port {port} is in use by another process")
    assert len(server.text().splitlines()) == 1
    assert not server.kv.exists()


@pytest.mark.parametrize("name", ["DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT", "DYN_FILE_KV"])
def test_setting_that_the_machine_refuses_is_one_line_and_status_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        value = str(tmp_path / "file") if name == "DYN_FILE_KV" else str(taken.getsockname()[1])
        places = {"DYN_FILE_KV": str(tmp_path / "kv"), "TMPDIR": str(tmp_path), name: value}
        variables = {key: text for key, text in os.environ.items() if key != "DYN_LOG"} | places
        for argv in (
            ["dynamo.mocker", "--model-name", "m"],
            ["dynamo.cli", "serve", "--engine", "mocker", "--http-port", "0"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", *argv],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                env=variables,
                check=False,
            )
            assert done.returncode == 1, done.stderr
            errors = [line for line in done.stderr.splitlines() if " INFO " not in line]
            assert len(errors) == 1, done.stderr
            assert f"{name}=" in errors[0]
            assert errors[0].startswith("error: ")


@pytest.mark.parametrize(
    ("argv", "expected_message"),
    [
        (["--wokers", "2"], "unknown argument --wokers; did you mean --workers?"),
        (["--rooter-mode", "random"], "unknown argument --rooter-mode; did you mean --router-mode?"),
        (["--engine", "mocker", "--speed-ratio", "2"], "unknown argument --speed-ratio; did you mean --speedup-ratio?"),
        (["--workers", "0"], "--workers 0: must be from 1 to 64"),
        (["--router-mode", "psychic"], "psychic"),
        (["./no-such-model"], "no such directory"),
    ],
)
def test_invalid_option_is_one_line_before_the_start(tmp_path: Path, argv: list[str], expected_message: str) -> None:
    server = Server(tmp_path, *argv)
    assert server.process.wait(DEADLINE_S) == 2
    assert server.text().startswith("error: ")
    assert expected_message in server.text()
    assert len(server.text().splitlines()) == 1
    assert not server.kv.exists()


def test_every_router_mode_serves(tmp_path: Path) -> None:
    for mode in ("random", "power-of-two", "least-loaded"):
        folder = tmp_path / mode
        folder.mkdir()
        with serving(
            folder, "--engine", "mocker", "--workers", "2", "--speedup-ratio", "0", "--router-mode", mode
        ) as it:
            it.ready()
            model = model_of(it)
            assert [bool(streamed(it, model, max_tokens=3)) for _ in range(4)] == [True] * 4


def test_components_run_as_single_commands(tmp_path: Path) -> None:
    port = free_port()
    variables = {**os.environ, "DYN_FILE_KV": str(tmp_path / "kv"), "DYN_LOG": "warn"}
    flags = ["--discovery-backend", "file"]
    commands = [
        [sys.executable, "-m", "dynamo.frontend", *flags, "--http-host", "127.0.0.1", "--http-port", str(port)],
        [sys.executable, "-m", "dynamo.mocker", *flags, "--speedup-ratio", "0", "--model-name", "mock"],
    ]
    started = [subprocess.Popen(command, env=variables) for command in commands]
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0) as client:

            def is_listed() -> bool:
                with contextlib.suppress(openai.APIConnectionError):
                    return [model.id for model in client.models.list()] == ["mock"]
                return False

            wait_for(is_listed, lambda: "the model was never listed")
            answer = client.chat.completions.create(model="mock", messages=QUESTION, max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
    finally:
        for process in started:
            process.terminate()
        assert [process.wait(DEADLINE_S) for process in started] == [0, 0]
    assert [path for path in (tmp_path / "kv").rglob("*") if path.is_file()] == []


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads the command lines of processes in /proc")
def test_serve_requires_its_keys_and_shows_them_on_no_child_command_line(tmp_path: Path) -> None:
    key, admin = "sk-one,with-comma-SECRET", "sk-admin-SECRET"
    argv = ["--engine", "mocker", "--api-key", key, "--admin-api-key", admin, "--http-workers", "2"]
    with serving(tmp_path, *argv) as server:
        server.ready()
        assert "SECRET" not in server.text()
        children = server.children()
        (frontend,) = [pid for pid, command in children.items() if "dynamo.frontend" in command]
        grandchildren = [int(pid) for pid in Path(f"/proc/{frontend}/task/{frontend}/children").read_text().split()]
        assert len(grandchildren) == 2
        for pid in (*children, *grandchildren):
            assert "SECRET" not in Path(f"/proc/{pid}/cmdline").read_text()

        def status(path: str, sent: str | None) -> int:
            headers = {} if sent is None else {"authorization": f"Bearer {sent}"}
            return httpx.get(f"{server.url}{path}", headers=headers, timeout=DEADLINE_S).status_code

        assert [status("/v1/models", sent) for sent in (None, "sk-one", key, admin)] == [401, 401, 200, 200]
        assert [status("/busy_threshold", sent) for sent in (None, key, admin)] == [401, 403, 200]
        environment = {**os.environ, "DYN_API_KEY": admin}
        requested = [*DYNAMO, "route", "state", "--url", server.url]
        assert (
            subprocess.run(requested, env=environment, capture_output=True, timeout=DEADLINE_S, check=False).returncode
            == 0
        )
        assert subprocess.run(requested, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 1


@pytest.mark.parametrize(("argv", "variables"), [(["--api-key", ""], {}), ([], {"DYN_API_KEYS": ","})])
def test_serve_does_not_start_with_an_authentication_option_that_holds_no_key(
    argv: list[str], variables: dict[str, str]
) -> None:
    for command in ([*DYNAMO, "serve"], [sys.executable, "-m", "dynamo.frontend", "--http-port", "0"]):
        ended = subprocess.run(
            [*command, *argv], env={**os.environ, **variables}, capture_output=True, timeout=DEADLINE_S, check=False
        )
        assert ended.returncode == 2
        assert re.fullmatch(r"error: [^\n]*(--api-key|DYN_API_KEYS)[^\n]*\n", ended.stderr.decode())
