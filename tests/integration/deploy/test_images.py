"""Service images, built by `tools.images` on Debian packages, whose entry points run as their own users (`make test-images`)."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.processes import LOOPBACK, ProcessGroup
from tools.images import ENGINES, SERVICES, SLIM_BASE

pytestmark = [pytest.mark.integration, pytest.mark.images]

ROOT = Path(__file__).parents[3]
STORE = ROOT / ".cache" / "images"
"""Images are kept between runs."""
BUILD_S = 1800.0
USER = 1000
AUTHORITIES = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
CONFIG = '[storage]\ndriver = "overlay"\ngraphroot = "{0}/storage"\nrunroot = "{0}/run"\n'


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    """Use a store of their own for the images."""
    assert shutil.which("buildah"), "buildah is not installed; on Debian: apt install buildah debootstrap"
    STORE.mkdir(parents=True, exist_ok=True)
    config = STORE.resolve() / "storage.conf"
    config.write_text(CONFIG.format(config.parent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(config))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        yield


@functools.cache
def build(name: str, *flags: str) -> str:
    """Build an image with the tool; return its name."""
    command = [sys.executable, "-m", "tools.images", "--builder", "buildah", "--debian-base", "--name", name, *flags]
    command += ["--ca", str(AUTHORITIES)] if AUTHORITIES.is_file() else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0
    return done.stdout.splitlines()[-1]


class Container:
    """Container of an image, removed at the end; its network is the machine's."""

    def __init__(self, name: str, *flags: str) -> None:
        self.id = buildah("from", build(name, *flags)).strip()
        self.config: dict[str, Any] = json.loads(buildah("inspect", self.id))["OCIv1"]["config"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        buildah("rm", self.id)

    def command(self, *argv: str, flags: tuple[str, ...] = ()) -> list[str]:
        """Return a command that runs a program in the container, with the image's user and environment."""
        return ["buildah", "run", *flags, self.id, "--", *argv]

    def entry_point(self, *argv: str, flags: tuple[str, ...] = ()) -> list[str]:
        return self.command(*self.config["Entrypoint"], *argv, flags=flags)


def buildah(*argv: str) -> str:
    return subprocess.run(["buildah", *argv], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("name", SERVICES)
def test_entry_point_of_an_image_starts_as_an_ordinary_user(name: str) -> None:
    with Container(name) as container:
        assert container.config["User"] == f"{USER}:{USER}"
        done = subprocess.run(container.entry_point("--help"), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert f"usage: python -m dynamo.{name}" in done.stdout
        probe = "id -u; touch /opt/dynamo/x; command -v gcc; ls /etc/pip.conf /etc/pip-ca.crt"
        done = subprocess.run(
            container.command("sh", "-c", probe), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.split() == [str(USER)], "neither writable, nor with a compiler, nor with the build's secrets"


@pytest.mark.parametrize("name", ENGINES)
def test_engine_image_adds_the_worker_to_the_engines_python(name: str, tmp_path: Path) -> None:
    base = "localhost/test-engine:latest"
    (tmp_path / "Containerfile").write_text(
        f"FROM {SLIM_BASE}\nRUN python3 -m venv /opt/engine\nENV PATH=/opt/engine/bin:$PATH\n"
    )
    buildah("build", "--layers", "-f", str(tmp_path / "Containerfile"), "-t", base, str(tmp_path))
    with Container(name, "--engine-image", base) as container:
        done = subprocess.run(container.entry_point("--help"), capture_output=True, text=True, timeout=120, check=False)
        if name == "vllm":  # Its options are those of the engine, which the base does not have.
            assert (done.returncode, "vLLM is not installed" in done.stderr) == (2, True)
        else:
            assert (done.returncode, f"usage: python -m dynamo.{name}" in done.stdout) == (0, True)
        done = subprocess.run(
            container.command("sh", "-c", "id -u; ls /tmp"), capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split() == [str(USER)]


def test_compiled_modules_are_in_the_image() -> None:
    with Container("frontend") as container:
        modules = "dynamo.kv_router._names, dynamo.serving._token_path, dynamo.text.tokenizer._compiled_words, dynamo.tokens._hashing"
        subprocess.run(container.command("python3", "-c", f"import {modules}"), check=True)


def test_frontend_and_mocker_images_answer_a_chat_and_stop_on_sigterm(tmp_path: Path) -> None:
    records, port = tmp_path / "kv", free_port()
    records.mkdir(mode=0o700)
    os.chown(records, USER, USER)
    variables = {**LOOPBACK, "DYN_FILE_KV": "/records", "DYN_DISCOVERY_BACKEND": "file"}
    flags = ("--volume", f"{records}:/records", *(f"--env={name}={value}" for name, value in variables.items()))
    group = ProcessGroup(tmp_path)
    with Container("frontend") as frontend, Container("mocker") as mocker:
        worker = group.start("mocker", mocker.entry_point("--model-name", "m", "--speedup-ratio", "0", flags=flags))
        server = group.start("frontend", frontend.entry_point("--http-port", str(port), flags=flags))
        try:
            group.wait_until(lambda: models(port) == ["m"], "the image's worker was not found")
            chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat, timeout=30)
            assert answer.status_code == 200
            assert answer.text.rstrip().endswith("data: [DONE]")
            for process in (server, worker):
                os.kill(program_of(process.pid), signal.SIGTERM)
                assert process.wait(60) == 0
        finally:
            for process in (server, worker):
                if process.poll() is None:
                    os.kill(program_of(process.pid), signal.SIGKILL)
                    process.wait(30)


def models(port: int) -> list[str]:
    try:
        return [one["id"] for one in httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]]
    except httpx.TransportError:
        return []


def program_of(pid: int) -> int:
    """Return the Python process that a builder runs, whose processes do not pass signals on."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"python3"):
            return pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
    raise AssertionError("the container's program has ended")
