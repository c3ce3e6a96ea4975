"""Components of a graph: frontend and workers of each backend, with the arguments of a picked configuration."""

import copy
import math
from collections.abc import Sequence
from typing import Any

from dynamo.profiler.graph.images import backend_image
from dynamo.profiler.search import Configuration, EngineChoice
from dynamo.profiler.spec import CACHE_PATH, ProfileSpec, path_in_cache
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject

GRAPH_KIND = "DynamoGraphDeployment"
MAIN = "main"
GPU = "nvidia.com/gpu"
WORKERS = ("worker", "prefill", "decode")
"""Types of components that run an engine."""
TOKEN_SECRET = [{"secretRef": {"name": "hf-token-secret"}}]
WORKING_DIRECTORY = {
    "vllm": "/workspace/examples/backends/vllm",
    "sglang": "/workspace/examples/backends/sglang",
    "trtllm": "/workspace/",
}
AGGREGATED_NAME = {"vllm": "worker", "sglang": "decode", "trtllm": "TRTLLMWorker"}
MODEL_FLAG = {"vllm": "--model", "sglang": "--model-path", "trtllm": "--model-path"}
KV_DTYPE_ARGS = {
    "vllm": ("--kv-cache-dtype", "fp8"),
    "sglang": ("--kv-cache-dtype", "fp8_e4m3"),
    "trtllm": ("--trtllm.kv_cache_config.dtype", "fp8"),
}
"""Arguments of a cache with eight bits per value."""
KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}
EPHEMERAL_STORAGE = "2Gi"
BOOTSTRAP_PORT = 12345


def graph_of(spec: ProfileSpec, config: Configuration, backend: str, name: str) -> KubeObject:
    """Return the graph of a configuration, without features."""
    image = backend_image(spec.image, backend)
    if config.prefill is None:
        kind = AGGREGATED_NAME[backend]
        workers = [worker(spec, backend, image, name=kind, role=None, choice=config.decode)]
    else:
        workers = [
            worker(spec, backend, image, name="decode", role="decode", choice=config.decode),
            worker(spec, backend, image, name="prefill", role="prefill", choice=config.prefill),
        ]
    frontend = component("Frontend", "frontend", 1, container(image, ["python3"], ["-m", "dynamo.frontend"]))
    components = [frontend, *workers]
    _add_model_cache(spec, components)
    return graph(name, components)


def graph(name: str, components: Sequence[KubeObject]) -> KubeObject:
    """Return a graph resource."""
    return {
        "apiVersion": V1BETA1,
        "kind": GRAPH_KIND,
        "metadata": {"name": name},
        "spec": {"components": list(components)},
    }


def component(name: str, kind: str, replicas: int, main: KubeObject) -> KubeObject:
    """Return a component with one container."""
    return {
        "name": name,
        "type": kind,
        "replicas": replicas,
        "podTemplate": {"spec": {"containers": [main]}},
    }


def container(image: str, command: list[str], args: list[str], *, has_secret: bool = True) -> KubeObject:
    """Return a main container, with the token of the Hugging Face hub in its environment."""
    found: KubeObject = {"name": MAIN, "image": image, "command": command, "args": args}
    if has_secret:
        found["envFrom"] = copy.deepcopy(TOKEN_SECRET)
    return found


def main_container(one: KubeObject) -> KubeObject | None:
    """Return a component's main container, or None."""
    containers = ((one.get("podTemplate") or {}).get("spec") or {}).get("containers") or []
    return next((each for each in containers if each.get("name") == MAIN), None)


def worker(
    spec: ProfileSpec, backend: str, image: str, *, name: str, role: str | None, choice: EngineChoice
) -> KubeObject:
    """Return the component of engines of one role; `role` None: aggregated."""
    args = [*engine_args(backend, choice), *role_args(backend, role), *_model_args(spec, backend)]
    main = container(image, ["python3", "-m", f"dynamo.{backend}"], args)
    main["workingDir"] = WORKING_DIRECTORY[backend]
    nodes = math.ceil(choice.parallel.num_gpus / spec.gpus_per_node)
    limits = {GPU: str(min(choice.parallel.num_gpus, spec.gpus_per_node))}
    main["resources"] = {"limits": limits}
    if backend == "vllm" or role is None:
        main["resources"]["requests"] = {**limits, "ephemeral-storage": EPHEMERAL_STORAGE}
    found = component(name, role or "worker", choice.replicas, main)
    if nodes > 1:
        found["multinode"] = {"nodeCount": nodes}
    return found


def engine_args(backend: str, choice: EngineChoice) -> list[str]:
    """Return the arguments of parallelism and batch limits."""
    parallel = choice.parallel
    cache = [] if choice.kv_dtype == "auto" else [*KV_DTYPE_ARGS[backend]]
    if backend == "vllm":
        args: list[Any] = ["--tensor-parallel-size", parallel.tp]
        args += ["--pipeline-parallel-size", parallel.pp] if parallel.pp > 1 else []
        args += ["--data-parallel-size", parallel.dp] if parallel.dp > 1 else []
        args += ["--enable-expert-parallel"] if parallel.moe_ep > 1 else []
        args += ["--max-num-seqs", choice.batch, "--max-num-batched-tokens", choice.max_tokens]
    elif backend == "sglang":
        # Attention in data parallel divides the GPUs of `--tp`.
        args = ["--page-size", 16, "--tp", max(parallel.tp, parallel.dp)]
        args += ["--pp", parallel.pp] if parallel.pp > 1 else []
        args += ["--dp", parallel.dp, "--enable-dp-attention"] if parallel.dp > 1 else []
        args += ["--ep", parallel.moe_ep] if parallel.moe_ep > 1 else []
        args += ["--max-running-requests", choice.batch * parallel.dp]
        args += ["--chunked-prefill-size", choice.max_tokens * parallel.dp]
    else:
        args = ["--tensor-parallel-size", max(parallel.tp, parallel.dp)]
        args += ["--pipeline-parallel-size", parallel.pp] if parallel.pp > 1 else []
        args += ["--expert-parallel-size", parallel.moe_ep] if parallel.moe_ep > 1 else []
        args += ["--enable-attention-dp"] if parallel.dp > 1 else []
        args += ["--max-batch-size", choice.batch, "--max-num-tokens", choice.max_tokens]
    return [str(one) for one in [*args, *cache]]


def role_args(backend: str, role: str | None) -> list[str]:
    """Return the arguments of a role of disaggregated engines."""
    if role is None:
        return []
    mode = ["--disaggregation-mode", role]
    if backend == "vllm":
        return [*mode, "--kv-transfer-config", f'{{"kv_connector":"NixlConnector","kv_role":"{KV_ROLE[role]}"}}']
    if backend == "sglang":
        port = ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT), "--host", "0.0.0.0"]  # noqa: S104 — inside a pod.
        return [*mode, "--disaggregation-transfer-backend", "nixl", *port]
    return [*mode, "--publish-kv-events"] if role == "prefill" else mode


def _model_args(spec: ProfileSpec, backend: str) -> list[str]:
    path = spec.model_path() or spec.model
    return [MODEL_FLAG[backend], path, "--served-model-name", spec.model]


def _add_model_cache(spec: ProfileSpec, components: Sequence[KubeObject]) -> None:
    """Mount the claim with the model into all components; without a path in it, it is the cache of the Hugging Face hub."""
    cache = spec.model_cache
    if cache is None or not cache.pvc_name:
        return
    mount = cache.pvc_mount_path or CACHE_PATH
    for one in components:
        pod = one["podTemplate"]["spec"]
        pod["volumes"] = [{"name": cache.pvc_name, "persistentVolumeClaim": {"claimName": cache.pvc_name}}]
        main = pod["containers"][0]
        main["volumeMounts"] = [{"name": cache.pvc_name, "mountPath": mount}]
        if not cache.pvc_model_path or path_in_cache(cache) == mount.rstrip("/"):
            main["env"] = [{"name": "HF_HOME", "value": mount}]
    if spec.model_path() is not None:
        main = components[0]["podTemplate"]["spec"]["containers"][0]
        main["args"] += ["--model-name", spec.model, "--model-path", path_in_cache(cache)]
