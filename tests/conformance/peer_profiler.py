"""The released profiler on one case per line of JSON; runs in the environment of `benchmarks.planner_peer`.

A case is `{"spec", "dry_run", "max_context", "pick"}`; the reply has the documents of `final_config.yaml` and the last status,
or the error. The performance database of the release is not published: `aisimulate` is an import stub, and `pick` is what it
would have picked. Everything else is the released code: reading, validation, flow, assembly and files.
"""

import asyncio
import contextlib
import importlib
import io
import json
import logging
import os
import sys
import tempfile
import types

import peer_planner  # noqa: F401 - installs the stubs of `aisimulate`.
import yaml


def stub(name, **members):
    """Install a module with these members."""
    module = types.ModuleType(name)
    module.__dict__.update(members)
    module.__path__ = []
    sys.modules[name] = module


async def nothing(*args, **kwargs):
    """Do nothing."""


stub("deploy")
stub("deploy.utils")
stub(
    "deploy.utils.dynamo_deployment",
    DeploymentFailedError=RuntimeError,
    DynamoDeploymentClient=object,
    cleanup_remaining_deployments=nothing,
)
for missing in ("matplotlib", "scipy"):
    with contextlib.suppress(ImportError):
        importlib.import_module(missing)


class Task:
    """Search of the simulator, whose result is the case's pick."""

    pick = {}

    def __init__(self, **fields):
        self.total_gpus = fields.get("total_gpus") or 0
        self.primary_backend_name = self.pick["backend"]
        self.primary_backend_version = None

    def run(self, autoscale=False):
        """Return one row, the pick."""
        return frame(self.pick)


def frame(pick):
    """Return the pick as the simulator's table."""
    import pandas as pd

    row = {"backend": pick["backend"], "ttft": 1.0, "tpot": 1.0, "request_latency": 1.0}
    for prefix, role in (("(p)", "prefill"), ("(d)", "decode")):
        for axis, width in (pick.get(role) or pick["decode"])["parallel"].items():
            row[f"{prefix}{axis}"] = width
    return pd.DataFrame([row])


def artifacts(params, backend, **_):
    """Return the deployment of the pick, built by the released modifiers."""
    from dynamo.profiler.utils.config_modifiers import CONFIG_MODIFIERS

    pick, k8s = Task.pick, params["K8sConfig"]
    mount, path = k8s.get("k8s_pvc_mount_path"), k8s.get("k8s_model_path_in_pvc")
    where = {
        "model_path": None
        if not path or not k8s.get("k8s_pvc_name")
        else mount
        if path == "."
        else f"{mount}/{path.lstrip('/')}"
    }
    if k8s.get("k8s_pvc_name"):
        where |= {"pvc_name": k8s["k8s_pvc_name"], "pvc_mount_path": mount}
    decode, prefill = pick["decode"], pick.get("prefill")
    if prefill is None:
        sizes = {"agg_cli_args": decode["args"], "agg_replicas": decode["replicas"], "agg_gpus": decode["gpus"]}
    else:
        sizes = {
            f"{role}_{name}": value
            for role, one in (("prefill", prefill), ("decode", decode))
            for name, value in (("cli_args", one["args"]), ("replicas", one["replicas"]), ("gpus", one["gpus"]))
        }
    made = CONFIG_MODIFIERS[backend].build_dgd_config(
        mode="agg" if prefill is None else "disagg",
        model_name=pick["model"],
        image=k8s["k8s_image"],
        num_gpus_per_node=pick["gpus_per_node"],
        **where,
        **sizes,
    )
    return {"k8s_deploy.yaml": yaml.safe_dump(made, sort_keys=False)}


def execute_tasks(tasks, **_):
    """Return the pick as the best of all tasks."""
    chosen = "disagg" if Task.pick.get("prefill") else "agg"
    latencies = {"ttft": 1.0, "tpot": 1.0, "request_latency": 1.0}
    return chosen, {chosen: frame(Task.pick)}, None, None, {chosen: latencies}, None


def profile(case):
    """Return the result of the released profiler for a case."""
    from dynamo.profiler.utils import dgd_generation, dgd_materialization
    from dynamo.profiler.utils.config_modifiers import vllm
    from dynamo.profiler.utils.profile_common import ProfilerOperationalConfig

    from dynamo.profiler import __main__ as command
    from dynamo.profiler import profile_sla, rapid

    Task.pick = case.get("pick") or {}
    is_known = bool(Task.pick) and not Task.pick.get("is_naive")
    profile_sla.check_model_hardware_support = lambda *_: is_known
    profile_sla.get_model_config_from_model_path = lambda *_: {"max_position_embeddings": case.get("max_context")}
    dgd_generation.get_latest_database_version = lambda **_: None
    dgd_materialization.model_has_auto_map = lambda *_: False
    vllm.get_model_context_length = lambda *_: None
    rapid.Task = Task
    rapid.build_default_tasks = lambda **_: {"agg": Task(), "disagg": Task()}
    rapid._execute_tasks = execute_tasks
    rapid.task_config_to_generator_config = lambda task_config, result_df, generator_overrides: dict(
        generator_overrides
    )
    rapid.build_naive_generator_params = lambda **_: {}
    rapid.generate_backend_artifacts = artifacts
    os.environ["DGDR_NAME"] = case.get("name", "")
    with tempfile.TemporaryDirectory() as directory:
        try:
            spec = command._parse_dgdr_spec(json.dumps(case["spec"]))
            ops = ProfilerOperationalConfig(output_dir=directory, dry_run=case.get("dry_run", False))
            asyncio.run(profile_sla.run_profile(spec, ops))
        except Exception as error:  # Any error is a refusal, whose kind does not matter.
            return {"error": f"{type(error).__name__}: {error}"}
        with open(os.path.join(directory, "final_config.yaml")) as file:
            documents = list(yaml.safe_load_all(file))
        with open(os.path.join(directory, "profiler_status.yaml")) as file:
            status = yaml.safe_load(file)
    return {"documents": documents, "status": {name: value for name, value in status.items() if name != "timestamp"}}


def read_curves(directory):
    """Return the values that the released planner and mocker read from a folder of profile files."""
    import pathlib

    import numpy as np
    from dynamo.planner.monitoring import perf_metrics

    from dynamo.mocker.utils.planner_profiler_perf_data_converter import convert_profile_results_to_npz

    target = pathlib.Path(directory) / "mocker.npz"
    convert_profile_results_to_npz(pathlib.Path(directory), target)
    with np.load(target) as data:
        shapes = {name: list(data[name].shape) for name in data.files}
        itl = data["decode_itl"]
        finite = bool(np.isfinite(itl).all())
    steps = {
        role: len(getattr(perf_metrics, f"_convert_{role}_profiling")(directory)) for role in ("prefill", "decode")
    }
    return {"shapes": shapes, "is_finite": finite, "itl": [float(itl.min()), float(itl.max())], "steps": steps}


def main():
    """Process the cases of standard input."""
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        request = json.loads(line)
        function = {"profile": profile, "read_curves": read_curves}[request["function"]]
        with contextlib.redirect_stdout(io.StringIO()):
            results = [function(case) for case in request["cases"]]
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
