"""The scripted SGLang of the unit tests against the real package: its signatures, its arguments, its events.

SGLang's server does not start without a GPU. The importable parts of its package are imported, the others are read as
source. `tools/engines_env.py` makes the environment.
"""

import asyncio
import json
import os
import struct
import subprocess
import sysconfig
from pathlib import Path

import msgspec
import pytest
from benchmarks.ports import free_port
from tests.engines.tiny_model import ROOT
from tests.unit.vllm.conftest import Host
from tools.engines_env import sglang_python

import dynamo.cpu
from dynamo.backend.listeners import PassListener
from dynamo.protocols.kv_events import Cleared, Removed, Stored
from dynamo.protocols.load import ForwardPass, QueuedRequests, ScheduledRequests
from dynamo.sglang.events import kv_listeners

pytestmark = pytest.mark.engines

DEADLINE_S = 180.0
MODEL = str(Path(dynamo.cpu.__file__).parent / "demo_model")

SOURCES = """
import ast, importlib.util, inspect, json, pathlib, sys
sys.path.insert(0, sys.argv[1])
from tests.unit.sglang import scripted

srt = pathlib.Path(importlib.util.find_spec("sglang").origin).parent / "srt"

def classes(*paths):
    return {node.name: node for path in paths for node in ast.walk(ast.parse((srt / path).read_text()))
            if isinstance(node, ast.ClassDef)}

def shape_of_source(function):
    given = function.args
    plain = given.posonlyargs + given.args
    bare = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    found = [[one.arg, default is None] for one, default in zip(plain, bare)]
    found += [[one.arg, default is None] for one, default in zip(given.kwonlyargs, given.kw_defaults)]
    return [pair for pair in found if pair[0] != "self"]

def shape_of(function):
    return [[name, one.default is inspect.Parameter.empty] for name, one in inspect.signature(function).parameters.items()
            if name != "self"]

wrong = {}
engine = classes("entrypoints/engine.py")["Engine"]
managers = classes("managers/tokenizer_manager.py", "managers/tokenizer_control_mixin.py")
methods = {"Engine": {}, "TokenizerManager": {}}
for node in engine.body:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        methods["Engine"][node.name] = node
for name in ("TokenizerControlMixin", "TokenizerManager"):
    for node in managers[name].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            methods["TokenizerManager"][node.name] = node
for kind, names in scripted.METHODS.items():
    for name in names:
        ours, theirs = getattr(getattr(scripted, kind), name), methods[kind].get(name)
        if theirs is None:
            wrong[name] = "is not there"
            continue
        if inspect.iscoroutinefunction(ours) != isinstance(theirs, ast.AsyncFunctionDef):
            wrong[name] = "is not of the same kind"
        told = shape_of_source(theirs)
        if shape_of(ours) != told:
            wrong[name] = [shape_of(ours), told]

words = classes("managers/io_struct.py")
for name, fields in scripted.WORDS.items():
    theirs = {node.target.id for node in words[name].body if isinstance(node, ast.AnnAssign)}
    if missing := set(fields) - theirs:
        wrong[name] = sorted(missing)

text = (srt / "managers" / "tokenizer_manager.py").read_text()
for attribute in ("self.context_len", "self.model_config", "def gracefully_exit"):
    if attribute not in text:
        wrong[attribute] = "is not there"
text = (srt / "entrypoints" / "engine.py").read_text()
for attribute in ("self.tokenizer_manager", "self._scheduler_init_result", "scheduler_infos"):
    if attribute not in text:
        wrong[attribute] = "is not there"
if f'FAKE_BOOTSTRAP_HOST = "{scripted.FAKE_BOOTSTRAP_HOST}"' not in (srt / "disaggregation" / "utils.py").read_text():
    wrong["FAKE_BOOTSTRAP_HOST"] = "is another"
if "MLA" not in (srt / "configs" / "model_config.py").read_text():
    wrong["AttentionArch"] = "has no MLA"
if "effective_max_running_requests_per_dp" not in (srt / "managers/scheduler_components/internal_state.py").read_text():
    wrong["effective_max_running_requests_per_dp"] = "is not there"
print(json.dumps(wrong))
"""

IMPORTS = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import msgspec
from tests.unit.sglang import scripted
from sglang.srt.disaggregation import kv_events
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

wrong = {}
def check(name, ours, theirs):
    if missing := set(ours) - set(theirs):
        wrong[name] = sorted(missing)

check("SamplingParams", scripted.SAMPLING, SamplingParams.__struct_fields__)
check("LoadSnapshot", scripted.LOADS, LoadSnapshot.__struct_fields__)
for name, fields in scripted.EVENT_FIELDS.items():
    check(name, fields, getattr(kv_events, name).__struct_fields__)
check("KVEventsConfig", ("publisher", "endpoint", "replay_endpoint"), kv_events.KVEventsConfig.model_fields)
known = set(dir(ServerArgs)) | set(getattr(ServerArgs, "__annotations__", {})) | set(
    getattr(ServerArgs, "__dataclass_fields__", {})) | set(getattr(ServerArgs, "__struct_fields__", ()))
check("ServerArgs", {one.name for one in dataclasses.fields(scripted.ServerArgs)}, known)
for name, found in (("EAGLE", True), ("NGRAM", False)):
    if SpeculativeAlgorithm.from_string(name).is_eagle() is not found:
        wrong[name] = "is taken for something else"
SamplingParams(**json.loads(sys.argv[2]))
print(json.dumps(wrong))
"""

PUBLISHER = """
import sys
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
publisher = ZmqEventPublisher(0, endpoint=f"tcp://*:{sys.argv[1]}", replay_endpoint=f"tcp://*:{sys.argv[2]}")
stored = BlockStored([11, -12], None, [1, 2, 3, 4], 2, None, medium="GPU")
lower = BlockStored([13], -12, [5, 6], 2, None, medium="CPU_PINNED", lora_name="a")
for batch in ([stored], [lower], [BlockRemoved([11], medium="GPU"), AllBlocksCleared()]):
    publisher.publish(KVEventBatch(ts=0.0, events=batch))
print("told", flush=True)
for line in sys.stdin:
    publisher.publish(KVEventBatch(ts=0.0, events=[stored]))
publisher.shutdown()
"""

STEP = """
import sys
from sglang.srt.observability import forward_pass_metrics as fpm
sys.stdout.buffer.write(fpm.encode(fpm.ForwardPassMetrics(
    worker_id="7", dp_rank=1, counter_id=3, wall_time=0.5,
    scheduled_requests=fpm.ScheduledRequestMetrics(num_decode_requests=2, sum_prefill_tokens=5),
    queued_requests=fpm.QueuedRequestMetrics(num_prefill_requests=4))))
"""


def start(python: str, program: str, *argv: str) -> "subprocess.Popen[bytes]":
    variables = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"], "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [python, "-c", program, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
    )


def run_program(python: str, program: str, *argv: str) -> bytes:
    with start(python, program, *argv) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err.decode()[-3000:]
    return out


@pytest.fixture(scope="module")
def python() -> str:
    found = sglang_python()
    if not os.path.exists(found):
        pytest.skip("SGLang is not installed: run tools/engines_env.py")
    return found


def test_scripted_engine_has_the_signatures_of_sglang(python: str) -> None:
    assert json.loads(run_program(python, SOURCES, ROOT).splitlines()[-1]) == {}


def test_sglang_arguments_events_and_sampling_have_the_used_fields(python: str) -> None:
    sampling = {
        "n": 2, "temperature": 0.5, "top_k": 4, "sampling_seed": 7, "max_new_tokens": 3, "min_new_tokens": 1,
        "logit_bias": {"4": 1.0}, "stop_token_ids": [9], "json_schema": "{}", "ignore_eos": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    assert json.loads(run_program(python, IMPORTS, ROOT, json.dumps(sampling)).splitlines()[-1]) == {}


async def test_listener_receives_events_of_the_real_publisher_and_replays_missed_ones(python: str) -> None:
    port, again = free_port(), free_port()
    host = Host()
    publisher = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{again}"}
    (listener,) = kv_listeners(publisher, 1, 2, host)
    with start(python, PUBLISHER, str(port), str(again)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"told\n"
        listening = asyncio.create_task(listener.run())
        async with asyncio.timeout(DEADLINE_S):
            while len(host.events) < 5:
                process.stdin.write(b"\n")
                process.stdin.flush()
                await asyncio.sleep(0.1)
        listening.cancel()
        await asyncio.wait({listening})
        process.stdin.close()
    first, second, third, fourth, *_ = host.events
    assert [type(one[0]) for one in (first, second, third, fourth)] == [Stored, Stored, Removed, Cleared]
    assert [block.block_hash for block in first[0].blocks] == [11, (1 << 64) - 12]
    assert (second[0].parent_hash, second[2]) == ((1 << 64) - 12, "host_pinned")
    assert third[0].block_hashes == [11]


def test_step_metrics_of_the_real_scheduler_are_read(python: str) -> None:
    host = Host()
    PassListener("tcp://127.0.0.1:1", 1, host).on_message([b"", struct.pack(">Q", 3), run_program(python, STEP)])
    expected = ForwardPass(
        0.5,
        ScheduledRequests(num_decode_requests=2, sum_prefill_tokens=5),
        QueuedRequests(num_prefill_requests=4),
    )
    ((passed, rank),) = host.passes
    assert (msgspec.to_builtins(passed), rank) == (msgspec.to_builtins(expected), 1)


ARGUMENTS = """
import sys
sys.path.insert(0, sys.argv[1])
from dynamo.core.errors import ConfigError
from dynamo.sglang.library import _read_server_args
try:
    _read_server_args(["--model-path", sys.argv[2], "--page-sise", "16"])
except ConfigError as error:
    print(str(error).splitlines()[0])
"""


def test_invalid_argument_is_refused_with_sglangs_message(python: str) -> None:
    program_output = run_program(python, ARGUMENTS, os.path.join(ROOT, "src"), MODEL).decode()
    assert "unrecognized arguments: --page-sise" in program_output
