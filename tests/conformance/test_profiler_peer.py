"""Profiler compared with the released one: the same specifications are accepted, and the same pick yields the same result.

The released search needs a performance database that is not published, so its search is replaced by our pick
(`peer_profiler`). Reading, validation, flow and the assembly of `final_config.yaml` are the released code.
"""

import functools
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.planner_peer import planner_home, planner_python

from dynamo.core.errors import ConfigError
from dynamo.profiler.graph.components import engine_args, role_args
from dynamo.profiler.main import main
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.rapid import PickedDeployment, rapid
from dynamo.profiler.search import EngineChoice
from dynamo.profiler.spec import profile_spec

pytestmark = pytest.mark.conformance

SCRIPT = Path(__file__).with_name("peer_profiler.py")
TIMEOUT_S = 240.0
H200 = {"gpuSku": "h200_sxm", "totalGpus": 16, "numGpusPerNode": 8}
BASE: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B",
    "image": "nvcr.io/nvidia/ai-dynamo/dynamo-planner:1.6.1",
    "hardware": H200,
}
SLA = {"planner": {"optimization_target": "sla"}}
TOLERATION = {"key": "gpu", "operator": "Exists"}
JOB = {"template": {"spec": {"tolerations": [TOLERATION]}}}
CACHE = {"pvcName": "models"}
ACCEPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "backend sglang": {"backend": "sglang"},
    "backend trtllm": {"backend": "trtllm"},
    "backend vllm": {"backend": "vllm"},
    "image with digest": {"image": "registry:5000/team/dynamo-planner:1@sha256:00ff"},
    "image without path": {"image": "dynamo-planner"},
    "kv router": {"features": {"kvRouter": {"enabled": True}}},
    "kv router off": {"features": {"kvRouter": {"enabled": False}}},
    "planner": {"features": {"planner": {}}},
    "planner for the objectives": {"features": SLA},
    "planner with sglang": {"features": SLA, "backend": "sglang"},
    "planner with trtllm": {"features": SLA, "backend": "trtllm"},
    "planner with kv router": {"features": {**SLA, "kvRouter": {"enabled": True}}},
    "planner without sweep": {"features": {"planner": {**SLA["planner"], "pre_deployment_sweeping_mode": "none"}}},
    "planner of prefill": {"features": {"planner": {"mode": "prefill"}}},
    "planner of decode": {"features": {"planner": {"mode": "decode"}}},
    "advisory planner": {"features": {"planner": {"advisory": True}}},
    "planner with own objectives": {
        "features": {"planner": {**SLA["planner"], "ttft": 250, "itl_ms": 11}},
        "sla": {"ttft": 900, "itl": 25},
    },
    "planner takes over objectives": {"features": SLA, "sla": {"ttft": 900, "itl": 25}},
    "planner with end-to-end objective": {"features": SLA, "sla": {"e2eLatency": 60000}},
    "planner with model name": {"features": {"planner": {"model_name": "other"}}},
    "planner with both scalings": {"features": {"planner": {**SLA["planner"], "enable_load_scaling": True}}},
    "request rate": {"workload": {"requestRate": 3}},
    "concurrency": {"workload": {"concurrency": 40.5}},
    "lengths as text": {"workload": {"isl": "3000", "osl": "150"}},
    "null lengths": {"workload": {"isl": 2000, "osl": 300, "concurrency": None}},
    "objectives": {"sla": {"ttft": 500, "itl": 20}},
    "only ttft": {"sla": {"ttft": 500}},
    "optimization for latency": {"sla": {"optimizationType": "latency"}},
    "optimization for throughput": {"sla": {"optimizationType": "throughput"}},
    "end-to-end objective": {"sla": {"e2eLatency": 60000}},
    "unattainable objectives": {"sla": {"ttft": 1, "itl": 0.1}},
    "runtime version": {"runtimeVersionOverride": "1.6.1"},
    "runtime version with planner": {"runtimeVersionOverride": "1.6.1", "features": SLA},
    "tolerations": {"overrides": {"profilingJob": JOB}},
    "tolerations with planner": {"overrides": {"profilingJob": JOB}, "features": SLA},
    "remote code": {"overrides": {"trustRemoteCode": True}},
    "remote code with sglang": {"overrides": {"trustRemoteCode": True}, "backend": "sglang"},
    "remote code with trtllm": {"overrides": {"trustRemoteCode": True}, "backend": "trtllm"},
    "cache of the hub": {"modelCache": CACHE},
    "model in a volume": {"modelCache": {**CACHE, "pvcModelPath": "qwen"}},
    "model in a mounted path": {
        "modelCache": {**CACHE, "pvcModelPath": "/data/qwen", "pvcMountPath": "/data"},
        "backend": "sglang",
    },
    "model in a volume with trtllm": {"modelCache": {**CACHE, "pvcModelPath": "/qwen/"}, "backend": "trtllm"},
    "other GPU": {"hardware": {"gpuSku": "h100_sxm", "totalGpus": 8, "numGpusPerNode": 8, "vramMb": 81559}},
    "legacy GPU name": {"hardware": {"gpuSku": "gb200_sxm", "totalGpus": 8, "numGpusPerNode": 4}},
    "small GPU": {"hardware": {"gpuSku": "l40s", "totalGpus": 8, "numGpusPerNode": 8}},
    "mixture of experts": {"model": "Qwen/Qwen3-30B-A3B"},
    "large mixture of experts": {"model": "deepseek-ai/DeepSeek-R1"},
    "mixture with planner and sglang": {"model": "Qwen/Qwen3-30B-A3B", "features": SLA, "backend": "sglang"},
    "not applied": {"autoApply": False},
    "unknown field": {"future": {"a": 1}},
    "mocker": {"features": {"mocker": {"enabled": True}}},
    "mocker with planner": {"features": {**SLA, "mocker": {"enabled": True}}},
    "mocker off": {"features": {"mocker": {"enabled": False}}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "no image": {"image": None},
    "empty image": {"image": ""},
    "no hardware": {"hardware": None},
    "no GPU": {"hardware": {"totalGpus": 8, "numGpusPerNode": 8}},
    "unknown GPU": {"hardware": {"gpuSku": "h201", "totalGpus": 8, "numGpusPerNode": 8}},
    "GPU in capitals": {"hardware": {"gpuSku": "H200_SXM", "totalGpus": 8, "numGpusPerNode": 8}},
    "no GPUs per node": {"hardware": {"gpuSku": "h200_sxm", "totalGpus": 8}},
    "zero GPUs per node": {"hardware": {"gpuSku": "h200_sxm", "totalGpus": 8, "numGpusPerNode": 0}},
    "rate and concurrency": {"workload": {"requestRate": 3, "concurrency": 4}},
    "negative ttft": {"sla": {"ttft": -1}},
    "zero itl": {"sla": {"itl": 0}},
    "negative end-to-end": {"sla": {"e2eLatency": -1}},
    "both kinds of objectives": {"sla": {"e2eLatency": 1000, "ttft": 100}},
    "ttft without itl": {"sla": {"ttft": 100, "itl": None}},
    "no objective": {"sla": {"ttft": None, "itl": None}},
    "unknown optimization": {"sla": {"optimizationType": "cost"}},
    "unknown backend": {"backend": "tgi"},
    "unknown strategy": {"searchStrategy": "slow"},
    "thorough without backend": {"searchStrategy": "thorough"},
    "mocker without sweep": {
        "features": {"mocker": {"enabled": True}, "planner": {"pre_deployment_sweeping_mode": "none"}}
    },
    "unknown planner mode": {"features": {"planner": {"mode": "both"}}},
    "planner without scaling": {
        "features": {"planner": {**SLA["planner"], "enable_throughput_scaling": False, "enable_load_scaling": False}}
    },
    "text for a number": {"workload": {"isl": "long"}},
    "list for a model": {"model": ["a"]},
}
PROFILE_DATA = "planner-profile-data"
"""Our rapid strategy attaches performance data, because the database that released planners and mockers load instead is not
published. The comparison leaves them out; `test_rapid_results_carry_performance_data` covers them."""


@functools.cache
def released_process() -> "subprocess.Popen[str]":
    """Return the process of the released profiler, which serves all cases."""
    return subprocess.Popen(
        [planner_python(), str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/tmp"),
            "OMP_NUM_THREADS": "1",
            "WORKSPACE_DIR": "/workspace",
        },
    )


def released(function: str, cases: list[Any]) -> list[Any]:
    """Return the released profiler's result of each case; skip the test where it is not installed."""
    if not os.path.exists(os.path.join(planner_home(), "ready")):
        pytest.skip(f"the released planner is not installed in {planner_home()}: python -m benchmarks.planner_peer")
    process = released_process()
    assert process.stdin is not None and process.stdout is not None
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        process.stdin.write(json.dumps({"function": function, "cases": cases}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    finally:
        watchdog.cancel()
    assert line, "the released profiler ended"
    found: list[Any] = json.loads(line)
    return found


def case(changes: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
    """Return a case of the released profiler, with our pick."""
    raw = {**BASE, **changes}
    if dry_run:
        return {"spec": raw, "dry_run": True}
    picked = rapid(profile_spec(raw), known_config(raw["model"]) or {})
    return {"spec": raw, "pick": pick_of(raw, picked), "max_context": picked.max_context}


def pick_of(raw: dict[str, Any], picked: PickedDeployment) -> dict[str, Any]:
    """Return a deployment as the released generator gets it: arguments, replicas and GPUs of each role."""
    config, backend = picked.config, picked.backend

    def role(choice: EngineChoice, name: str | None) -> dict[str, Any]:
        parallel = choice.parallel
        widths = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "dp", "moe_tp", "moe_ep")}
        # The released vLLM modifier adds the role's arguments itself.
        args = engine_args(backend, choice) + ([] if backend == "vllm" else role_args(backend, name))
        return {"parallel": widths, "args": args, "replicas": choice.replicas, "gpus": parallel.num_gpus}

    found = {"model": raw["model"], "backend": backend, "gpus_per_node": raw["hardware"]["numGpusPerNode"]}
    if config.prefill is not None:
        return {**found, "prefill": role(config.prefill, "prefill"), "decode": role(config.decode, "decode")}
    return {**found, "decode": role(config.decode, None)}


def ours(directory: Path, changes: dict[str, Any], *more: str) -> list[Any] | str:
    """Return the documents of our result, or the error."""
    code = main(["--config", json.dumps({**BASE, **changes}), "--output-dir", str(directory), *more])
    if code:
        status = yaml.safe_load((directory / "profiler_status.yaml").read_text())
        assert status["status"] == "failed"
        return str(status["error"])
    return list(yaml.safe_load_all((directory / "final_config.yaml").read_text()))


def comparable(documents: list[Any]) -> dict[str, Any]:
    """Return the documents by kind with random names removed, components by name and configurations decoded."""
    text = re.sub(r"(planner-config|planner-profile-data)-[0-9a-f]{4}", r"\1", json.dumps(documents))
    text = re.sub(r"-(agg|disagg)-[0-9a-f]{8}", r"-\1", text)
    found: dict[str, Any] = {}
    for document in json.loads(text):
        name = document["metadata"]["name"]
        if document["kind"] == "ConfigMap" and name != PROFILE_DATA:
            config = json.loads(document["data"]["planner_config.json"])
            config["plugin_registration"]["auth"].pop("static_secrets", None)  # Ours never writes secrets.
            found[name] = {**document, "data": config}
        elif document["kind"] == "DynamoGraphDeployment":
            components = {one["name"]: without_profile_data(one) for one in document["spec"]["components"]}
            found["graph"] = {**document, "spec": {**document["spec"], "components": components}}
    return found


def without_profile_data(component: dict[str, Any]) -> dict[str, Any]:
    """Return a component without the mounts of performance data and the arguments that select a mocker's timing."""
    pod = component["podTemplate"]["spec"]
    for owner, field in ((pod, "volumes"), (pod["containers"][0], "volumeMounts")):
        kept = [one for one in owner.pop(field, []) if one["name"] != PROFILE_DATA]
        if kept:
            owner[field] = kept
    container = pod["containers"][0]
    if "dynamo.mocker" in container["command"]:
        container["args"] = container["args"][: container["args"].index("--disaggregation-mode") + 2]
    return component


@pytest.mark.parametrize("name", ACCEPTED)
def test_same_pick_yields_the_same_result(tmp_path: Path, name: str) -> None:
    changes = ACCEPTED[name]
    found = ours(tmp_path, changes)
    assert not isinstance(found, str), found
    (theirs,) = released("profile", [case(changes)])
    assert theirs.get("status", {}).get("status") == "success", theirs
    assert comparable(found) == comparable(theirs["documents"])


@pytest.mark.parametrize("name", REFUSED)
def test_same_specifications_are_refused(tmp_path: Path, name: str) -> None:
    found = ours(tmp_path, REFUSED[name], "--dry-run")
    (theirs,) = released("profile", [case(REFUSED[name], dry_run=True)])
    assert isinstance(found, str)
    assert "error" in theirs


def test_dry_runs_have_the_same_result(tmp_path: Path) -> None:
    (theirs,) = released("profile", [case({}, dry_run=True)])
    assert ours(tmp_path, {}, "--dry-run") == theirs["documents"]
    status = yaml.safe_load((tmp_path / "profiler_status.yaml").read_text())
    assert {name: value for name, value in status.items() if name != "timestamp"} == theirs["status"]


def test_released_planner_and_mocker_read_our_curves(tmp_path: Path) -> None:
    assert not isinstance(ours(tmp_path, {"features": {"mocker": {"enabled": True}}}), str)
    (read,) = released("read_curves", [str(tmp_path)])
    assert read["is_finite"]
    assert read["shapes"]["decode_itl"] == [100, 100]
    assert read["itl"][0] > 0
    assert read["steps"]["prefill"] > 2
    assert read["steps"]["decode"] > 2


def test_rapid_results_carry_performance_data(tmp_path: Path) -> None:
    found = ours(tmp_path, {"features": {**SLA, "mocker": {"enabled": True}}})
    assert not isinstance(found, str)
    (data,) = [one for one in found if one["metadata"]["name"].startswith(PROFILE_DATA)]
    assert set(data["data"]) == {"prefill_raw_data.json", "decode_raw_data.json"}
    workers = [one for one in found[-1]["spec"]["components"] if one["type"] in ("prefill", "decode")]
    for one in workers:
        container = one["podTemplate"]["spec"]["containers"][0]
        assert container["args"][-2:] == ["--planner-profile-data", "/workspace/profiling_results"]
        assert container["volumeMounts"][0]["name"] == data["metadata"]["name"]


def test_specifications_are_many() -> None:
    assert len(ACCEPTED) + len(REFUSED) >= 50


def test_refusals_are_one_line(tmp_path: Path) -> None:
    for changes in REFUSED.values():
        with pytest.raises(ConfigError) as refused:
            profile_spec({**BASE, **changes})
        assert "\n" not in str(refused.value)
