"""The command lines of `dynamo serve --engine vllm` are accepted by the released adapter, with the real vLLM's parser."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.peer import PeerMissing, ensure_peer

pytestmark = [pytest.mark.engines, pytest.mark.conformance]

PROGRAM = """
import json, pathlib, sys
# Our package is installed there too; the released one must be imported.
sys.meta_path = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
sys.path = [one for one in sys.path if not (pathlib.Path(one) / "dynamo" / "cpu").exists()] + [sys.argv[1]]
from dynamo.vllm.args import parse_args
config = parse_args(sys.argv[2:])
engine = config.engine_args
print(json.dumps({
    "mode": config.disaggregation_mode.value, "name": config.served_model_name, "block_size": engine.block_size,
    "connector": engine.kv_transfer_config.kv_connector if engine.kv_transfer_config else None,
    "events": engine.kv_events_config.endpoint if engine.kv_events_config else None,
}))
"""


@pytest.fixture(scope="module")
def released() -> str:
    """Directory of the released package."""
    try:
        python = Path(ensure_peer())
    except PeerMissing as error:
        pytest.skip(str(error))
    (packages,) = python.parent.parent.glob("lib/python3*/site-packages")
    return str(packages)


def test_released_adapter_accepts_the_workers_of_dynamo_serve(engines_python: str, model: str, released: str) -> None:
    command = [sys.executable, "-m", "dynamo.cli", "serve", model, "--engine", "vllm", "--prefill-workers", "1"]
    command += ["--router-mode", "kv", "--dry-run", "--", "--block-size", "32"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = {}
    for line in printed.splitlines():
        words = shlex.split(line)
        if "dynamo.vllm" in words:
            arguments = words[words.index("dynamo.vllm") + 1 :]
            done = subprocess.run(
                [engines_python, "-P", "-c", PROGRAM, released, *arguments],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
                capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            value = json.loads(done.stdout.splitlines()[-1])
            found[value.pop("mode")] = value
    name = Path(model).name
    assert found["decode"] == {"name": name, "block_size": 32, "connector": "NixlConnector", "events": None}
    assert found["prefill"].pop("events").startswith("tcp://*:")
    assert found["prefill"] == {"name": name, "block_size": 32, "connector": "NixlConnector"}
