"""The command lines of `dynamo serve --engine trtllm` are accepted by the released TensorRT-LLM adapter's parser."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from benchmarks.peer import PeerMissing, ensure_peer
from tests.integration.test_engine_adapters import MODEL

pytestmark = pytest.mark.conformance

PROGRAM = """
import json, sys, types
# The parser reads four defaults of TensorRT-LLM, which cannot be imported without CUDA; nothing else of it is needed.
names = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
fields = {name: types.SimpleNamespace(default=1) for name in names}
llmapi = types.ModuleType("tensorrt_llm.llmapi")
llmapi.BuildConfig = types.SimpleNamespace(model_fields=fields)
sys.modules.update({"tensorrt_llm": types.ModuleType("tensorrt_llm"), "tensorrt_llm.llmapi": llmapi})
from dynamo.trtllm.args import parse_args
config = parse_args(sys.argv[1:])
print(json.dumps({
    "mode": config.disaggregation_mode.value, "name": config.served_model_name, "block_size": config.kv_block_size,
    "gpus": config.tensor_parallel_size, "events": config.publish_kv_events, "model": config.model,
}))
"""


@pytest.fixture(scope="module")
def released() -> str:
    """Interpreter of the released packages."""
    try:
        return ensure_peer()
    except PeerMissing as error:
        pytest.skip(str(error))


def parsed(python: str, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_released_trtllm_adapter_accepts_the_workers_of_dynamo_serve(released: str) -> None:
    command = [sys.executable, "-m", "dynamo.cli", "serve", MODEL, "--engine", "trtllm", "--prefill-workers", "1"]
    command += ["--router-mode", "kv", "--dry-run", "--", "--kv-block-size", "16", "--tensor-parallel-size", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = {}
    for words in map(shlex.split, printed.splitlines()):
        if "dynamo.trtllm" in words:
            done = parsed(released, words[words.index("dynamo.trtllm") + 1 :])
            assert done.returncode == 0, done.stderr
            value = json.loads(done.stdout.splitlines()[-1])
            found[value.pop("mode")] = value
    expected = {"name": os.path.basename(MODEL), "block_size": 16, "gpus": 2, "model": MODEL}
    assert found == {"prefill": {**expected, "events": True}, "decode": {**expected, "events": False}}


def test_released_trtllm_adapter_refuses_a_flag_that_it_does_not_have(released: str) -> None:
    done = parsed(released, ["--model", MODEL, "--publish-kv-eventz"])
    assert done.returncode != 0
    assert "--publish-kv-eventz" in done.stderr
