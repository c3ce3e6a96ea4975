"""Shell: executes the blocks of a page in a copy of this tree, as a reader would type them."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.documentation.blocks import NEEDS_PORTS, ROOT, Block, Command, commands

DEADLINE_S = 60.0  # For anything that takes a second on an idle machine.
FRESH_DEADLINE_S = 900.0  # Where commands install packages.
STOP_S = 20.0
READY = re.compile(
    r"\b(frontend|worker|indexer|router|planner) ready: |^Ready in |Server is ready|^serving", re.MULTILINE
)
MODEL_LISTED = re.compile(r"models: model .+: worker |^Ready in ", re.MULTILINE)
FRONTEND = re.compile(r"-m dynamo\.frontend(?!.*kserve)", re.DOTALL)
WORKER = re.compile(r"-m dynamo\.(cpu|mocker|openai_proxy)")
SCRIPT = re.compile(r"\.sh\b")
STDIN = {"dynamo chat": "What is a worker?\n"}
COPIED = (".agents", "benchmarks", "docs", "examples", "src", "tests", "tools")


class Server:
    """A program that a block started and that runs until it is stopped."""

    def __init__(self, text: str, log: Path, variables: Mapping[str, str], folder: Path) -> None:
        self.text = text
        self._log = log
        # Stripped: the runner is the shell that has it in the background, and sends it SIGINT as Ctrl-C would.
        command = re.sub(r"\s&(\s*#.*)?$", "", text)
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_ready(self) -> bool:
        if SCRIPT.search(self.text):  # A script starts several: its frontend has to list their model.
            return bool(MODEL_LISTED.search(self.log))
        return bool(READY.search(self.log))

    def check_alive(self) -> None:
        assert self.process.poll() is None, f"`{self.text}` ended with status {self.process.returncode}:\n{self.log}"

    def stop(self) -> None:
        """Send Ctrl-C and check that it ends cleanly."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            status = self.process.wait(STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        ends = {0, 130, -signal.SIGINT, *([2] if self.text.startswith("make ") else [])}
        assert status in ends, f"`{self.text}` ended with status {status} after Ctrl-C:\n{self.log}"
        assert "Traceback" not in self.log, f"`{self.text}` printed a traceback:\n{self.log}"


class Shell:
    """A reader's shell in a copy of the tree; used as a context manager, on leaving which all servers are stopped."""

    def __init__(self, folder: Path, *, is_fresh: bool) -> None:
        """`is_fresh`: the copy has no environment, and commands that install packages are executed, not checked."""
        self.folder = folder / "clone"
        self.is_fresh = is_fresh
        self._temporary = folder / "tmp"
        self._tools = folder / "tools"
        self._servers: list[Server] = []
        self._count = 0
        for path in (self._temporary, self._tools):
            path.mkdir()
        kept = {
            name: value for name, value in os.environ.items() if re.match(r"(?i)pip_|.*_proxy$|ssl_|lang|lc_", name)
        }
        self._base = kept | {
            "PATH": f"{self._tools}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self._temporary),
            "TMPDIR": str(self._temporary),
        }
        self.variables = dict(self._base)

    def __enter__(self) -> Self:
        self._copy()
        if not self.is_fresh:
            self._environment()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)

    def run_page(self, found: list[Block]) -> None:
        """Execute a page's blocks in order; each page has a shell and a discovery directory of its own."""
        self.variables = self._base | {"DYN_FILE_KV": str(self._temporary / f"kv{self._count}")}
        for block in found:
            if block.not_run is None and (
                block.language == "sh" or (block.page, block.language) == ("README.md", "python")
            ):
                self.run_block(block)
        self.stop()

    def run_block(self, block: Block) -> None:
        """Execute a block. The servers of earlier blocks are stopped first if it starts some of its own."""
        print(f"{block.name}", flush=True)
        if block.language == "python":
            self._run(shlex.join([".venv/bin/python", "-c", block.text]))
            return
        found = commands(block.text)
        if any(command.is_server or NEEDS_PORTS.search(command.text) for command in found):
            self.stop()
        if block.given is not None:
            self._give(block.given)
        for command in found:
            self._execute(command)
        self._await_servers()

    def stop(self) -> None:
        """Stop all servers, the last first."""
        while self._servers:
            self._servers.pop().stop()

    def _execute(self, command: Command) -> None:
        if command.is_server:
            self._start(command.text)
            return
        self._await_servers()
        if ".venv/bin/pip install" in command.text and not self.is_fresh:
            check_pip(command.text)
            return
        self._run(command.text)

    def _start(self, text: str) -> None:
        self._count += 1
        self._servers.append(Server(text, self._temporary / f"server{self._count}.log", self.variables, self.folder))

    def _run(self, text: str) -> None:
        state = self._temporary / "variables"
        stdin = next((lines for word, lines in STDIN.items() if word in text), "")
        done = subprocess.run(
            ["bash", "-c", f'set -eo pipefail\n{text}\nenv -0 >"$STATE"'],
            cwd=self.folder, env={**self.variables, "STATE": str(state)}, input=stdin, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=FRESH_DEADLINE_S if self.is_fresh else DEADLINE_S,
        )  # fmt: skip
        logs = "\n".join(f"--- {server.text}\n{server.log}" for server in self._servers)
        assert done.returncode == 0, f"`{text}` ended with status {done.returncode}:\n{done.stdout}\n{logs}"
        assert not re.search(r'^\s*{"error"', done.stdout, re.MULTILINE), f"`{text}` got an error:\n{done.stdout}"
        self.variables = dict(line.split("=", 1) for line in state.read_text().split("\0") if line)

    def _await_servers(self) -> None:
        """Wait until all servers serve, and a frontend lists the model of a worker if both are there."""
        deadline = time.monotonic() + (FRESH_DEADLINE_S if self.is_fresh else DEADLINE_S)
        has_worker = any(WORKER.search(server.text) for server in self._servers)

        def is_settled(server: Server) -> bool:
            server.check_alive()
            wants_model = has_worker and FRONTEND.search(server.text)
            return server.is_ready and (not wants_model or bool(MODEL_LISTED.search(server.log)))

        for server in self._servers:
            while not is_settled(server):
                assert time.monotonic() < deadline, f"`{server.text}` was never ready:\n{server.log}"
                time.sleep(0.05)

    def _give(self, what: str) -> None:
        """Provide the prerequisites of a block."""
        if what == "adapters/tuned":
            from tests.integration import adapters

            adapters.write(self.folder / what, 1, ("q_proj", "v_proj"))
        elif what == "trace.jsonl":
            rows = (
                {"timestamp": 50 * n, "input_length": 1024, "output_length": 8, "hash_ids": [0, n]} for n in range(40)
            )
            (self.folder / what).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        elif what == "nats-server":
            from tests.cluster.nats import nats_server_binary

            (self._tools / what).symlink_to(str(nats_server_binary()))
        elif what == "a server on port 8001":
            self._start(".venv/bin/dynamo serve --engine mocker --http-port 8001 &")
            self._await_servers()
        else:
            raise AssertionError(f"the tests cannot provide {what!r}")

    def _copy(self) -> None:
        self.folder.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy2(path, self.folder)

    def _environment(self) -> None:
        """Make the environment that `make serve` would make, out of the packages that are installed for the tests."""
        home = self.folder / ".venv"
        venv.create(home, with_pip=False, symlinks=True)
        site = next(home.glob("lib/python*/site-packages"))
        (site / "copy.pth").write_text(f"{self.folder / 'src'}\n{sysconfig.get_paths()['purelib']}\n")
        for name, code in (
            ("dynamo", "from dynamo.cli.__main__ import main; main()"),
            ("pip", "from pip._internal.cli.main import main; raise SystemExit(main())"),
        ):
            script = home / "bin" / name
            script.write_text(f"#!{home / 'bin' / 'python'}\n{code}\n")
            script.chmod(0o755)
        (home / ".serve").touch()


def check_pip(text: str) -> None:
    """Check a `pip install` that is not executed: its extras are declared and its packages are those of the tests."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = shlex.split(text, comments=True)[2:]
    for word in words:
        if word == "-e":
            continue
        named = re.fullmatch(r"\.\[([\w,]+)\]", word)
        if named:
            assert set(named[1].split(",")) <= set(extras), f"`{text}` names an unknown extra"
        else:
            assert any(requirement.startswith(word) for requirement in extras["test"]), f"`{text}`: is {word} right?"


def main() -> None:
    """Run the named pages: python -m tests.documentation.shell FOLDER PAGE..."""
    from tests.documentation.blocks import page_blocks

    folder, *pages = sys.argv[1:]
    loopback_up()
    with Shell(Path(folder), is_fresh=bool(os.environ.get("DOCUMENTATION_FRESH"))) as shell:
        for page in pages:
            shell.run_page(page_blocks(page))


def loopback_up() -> None:
    """Switch on the loopback interface, which is off in a new network namespace."""
    import fcntl
    import socket
    import struct

    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(probe, get_flags, request))
        if not flags & up:
            fcntl.ioctl(probe, set_flags, struct.pack("16sh14x", b"lo", flags | up))


if __name__ == "__main__":
    main()
