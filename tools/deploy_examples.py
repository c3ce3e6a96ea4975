"""Write the example graphs of `examples/backends/*/deploy` and the recipes of `recipes/` from one table.

python -m tools.deploy_examples [--check]
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tools.crds import PlainDumper
from tools.pages import ROOT, write

from dynamo import __version__

HEAD = "# Written by tools/deploy_examples.py; `make references` updates it.\n"
SECRET = "hf-token-secret"
CACHE = "model-cache"
MOUNT = "/opt/models"
SMALL_MODEL = "Qwen/Qwen3-0.6B"
API = "nvidia.com/v1beta1"
Object = dict[str, Any]
MODES = ("agg", "agg_router", "disagg", "disagg_router", "disagg_planner")
TITLES = {
    "agg": "A frontend and one worker.",
    "agg_router": "A frontend that routes by KV cache, and two workers.",
    "disagg": "A frontend, a prefill worker and a decode worker.",
    "disagg_router": "A frontend that routes by KV cache, two prefill workers and two decode workers.",
    "disagg_planner": "A frontend, prefill and decode workers, and a planner that scales them.",
}
PLANNER = {
    "environment": "kubernetes",
    "mode": "disagg",
    "optimization_target": "throughput",
    "prefill_engine_num_gpu": 1,
    "decode_engine_num_gpu": 1,
    "max_gpu_budget": 8,
}


GATEWAY_MODES = {
    "agg": "Two workers behind a gateway, chosen by an endpoint picker; http-route.yaml sends requests to them.",
    "disagg": "A prefill worker and a decode worker behind a gateway, chosen by an endpoint picker.",
}
SIDECAR = "sidecar-frontend"
GATEWAY = "inference-gateway"
BLOCK_SIZE = 16


class FlowDumper(PlainDumper):
    """YAML whose command lines are on one line."""


class Words(list[str]):
    """A command line."""


class Block(str):
    """A script."""

    __slots__ = ()


FlowDumper.add_representer(
    Words, lambda dumper, words: dumper.represent_sequence("tag:yaml.org,2002:seq", list(words), flow_style=True)
)
FlowDumper.add_representer(
    Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def text_of(*values: Object, title: str) -> str:
    """Return a file with one or several objects."""
    return HEAD + f"# {title}\n" + yaml.dump_all(values, Dumper=FlowDumper, sort_keys=False, width=110)


def image_of(engine: str) -> str:
    """Return the image of a worker, as container/ builds it."""
    return f"dynamo-mocker:{__version__}" if engine == "mocker" else f"{engine}-runtime:{__version__}"


def name_of(engine: str, role: str) -> str:
    """Return the name of a component of workers, as in upstream's examples."""
    phase = "prefill" if role == "prefill" else "decode"
    return f"Vllm{phase.capitalize()}Worker" if engine == "vllm" else phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers of one role."""

    role: str
    """`worker`, `prefill` or `decode`."""
    replicas: int = 1
    gpus: int = 1
    """GPUs of each pod."""
    nodes: int = 1
    flags: tuple[str, ...] = ()


def worker_flags(engine: str, pool: Pool, *, publishes_events: bool) -> Words:
    """Return the flags that a role requires."""
    flags: list[str] = []
    ranks = pool.gpus * pool.nodes
    if pool.role != "worker":
        flags += ["--disaggregation-mode", pool.role]
    match engine:
        case "vllm":
            if pool.role != "worker":
                flags += ["--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
            if publishes_events:
                flags += [
                    "--kv-events-config",
                    '{"publisher":"zmq","endpoint":"tcp://*:20080","enable_kv_cache_events":true}',
                ]
            if ranks > 1:
                flags += ["--tensor-parallel-size", str(ranks)]
        case "sglang":
            flags += ["--page-size", "16"]
            if pool.role != "worker":
                flags += ["--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", "12345"]
            if publishes_events:
                flags += ["--kv-events-config", '{"publisher":"zmq","endpoint":"tcp://*:20080"}']
            if ranks > 1:
                flags += ["--tp-size", str(ranks)]
        case "trtllm":
            if publishes_events:
                flags += ["--publish-kv-events"]
            if ranks > 1:
                flags += ["--tensor-parallel-size", str(ranks)]
        case _:
            flags += ["--speedup-ratio", "1.0"]
    return Words([*flags, *pool.flags])


def worker(
    engine: str, model: str, pool: Pool, *, publishes_events: bool, cached: bool = False, scaled: bool = False
) -> Object:
    """Return a component of workers."""
    path_flag = "--model" if engine in ("vllm", "trtllm") else "--model-path"
    named = ["--model-name", model] if engine == "mocker" else [path_flag, model]
    container: Object = {
        "name": "main",
        "image": image_of(engine),
        "command": Words(["python3", "-m", f"dynamo.{engine}"]),
        "args": Words([*named, *worker_flags(engine, pool, publishes_events=publishes_events)]),
    }
    spec: Object = {"containers": [container]}
    made: Object = {
        "name": name_of(engine, pool.role),
        "type": pool.role,
    }
    if engine != "mocker":
        container["envFrom"] = [{"secretRef": {"name": SECRET, "optional": True}}]
        container["resources"] = {"limits": {"nvidia.com/gpu": str(pool.gpus)}}
    if cached:
        container["env"] = [{"name": "HF_HOME", "value": MOUNT}]
        container["volumeMounts"] = [{"name": CACHE, "mountPath": MOUNT}]
        spec["volumes"] = [{"name": CACHE, "persistentVolumeClaim": {"claimName": CACHE}}]
        made["sharedMemorySize"] = "80Gi"
    made["replicas"] = pool.replicas
    if pool.nodes > 1:
        made["multinode"] = {"nodeCount": pool.nodes}
    if scaled:
        made["scalingAdapter"] = {}
    made["podTemplate"] = {"spec": spec}
    return made


def frontend(*, routes_by_cache: bool, cached: bool = False) -> Object:
    """Return the component of the frontend."""
    container: Object = {
        "name": "main",
        "image": f"dynamo-frontend:{__version__}",
        "command": Words(["python3", "-m", "dynamo.frontend"]),
    }
    spec: Object = {"containers": [container]}
    if routes_by_cache:
        container["args"] = Words(["--router-mode", "kv"])
    if cached:
        container["env"] = [{"name": "HF_HOME", "value": MOUNT}]
        container["volumeMounts"] = [{"name": CACHE, "mountPath": MOUNT}]
        spec["volumes"] = [{"name": CACHE, "persistentVolumeClaim": {"claimName": CACHE}}]
    return {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": {"spec": spec}}


def planner(engine: str) -> Object:
    """Return the component of the planner."""
    import json

    container = {
        "name": "main",
        "image": f"dynamo-planner:{__version__}",
        "command": Words(["python3", "-m", "dynamo.planner"]),
        "args": Words(["--config", json.dumps({**PLANNER, "backend": engine})]),
    }
    return {"name": "Planner", "type": "planner", "replicas": 1, "podTemplate": {"spec": {"containers": [container]}}}


def graph(name: str, engine: str, components: list[Object]) -> Object:
    """Return a graph."""
    spec: Object = {} if engine == "mocker" else {"backendFramework": engine}
    return {
        "apiVersion": API,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {**spec, "components": components},
    }


def example(engine: str, mode: str) -> str:
    """Return the file of one example."""
    routes = "router" in mode
    count = 2 if routes else 1
    roles = ("worker",) if mode.startswith("agg") else ("prefill", "decode")
    components = [frontend(routes_by_cache=routes)]
    for role in roles:
        pool = Pool(role=role, replicas=count)
        publishes = routes and role != "decode"
        scaled = mode.endswith("planner")
        components.append(worker(engine, SMALL_MODEL, pool, publishes_events=publishes, scaled=scaled))
    if mode.endswith("planner"):
        components.append(planner(engine))
    name = f"{engine}-{mode.replace('_', '-')}"
    return text_of(graph(name, engine, components), title=TITLES[mode])


def gateway_example(engine: str, mode: str) -> str:
    """Return the file of a graph whose workers a gateway's endpoint picker chooses."""
    size = {"vllm": "--block-size", "sglang": "", "trtllm": "--kv-block-size", "mocker": "--block-size"}[engine]
    variables = {"DYN_KV_CACHE_BLOCK_SIZE": BLOCK_SIZE, **({"DYN_ENFORCE_DISAGG": "true"} if mode == "disagg" else {})}
    picker = {
        "name": "main",
        "image": f"dynamo-epp:{__version__}",
        "command": Words(["python3", "-m", "dynamo.epp"]),
        "env": [{"name": key, "value": str(value)} for key, value in variables.items()],
    }
    components = [{"name": "Epp", "type": "epp", "replicas": 1, "podTemplate": {"spec": {"containers": [picker]}}}]
    for role in ("worker",) if mode == "agg" else ("prefill", "decode"):
        flags = (size, str(BLOCK_SIZE)) if size else ()  # SGLang has its page size in every example.
        pool = Pool(role=role, replicas=2 if mode == "agg" else 1, flags=flags)
        made = worker(engine, SMALL_MODEL, pool, publishes_events=role != "decode")
        (sidecar,) = frontend(routes_by_cache=False)["podTemplate"]["spec"]["containers"]
        made["podTemplate"]["spec"]["containers"].append(
            {**sidecar, "name": SIDECAR, "args": Words(["--router-mode", "direct"])}
        )
        components.append({**made, "frontendSidecar": SIDECAR})
    return text_of(graph(f"{engine}-gaie-{mode}", engine, components), title=GATEWAY_MODES[mode])


def route(engine: str) -> str:
    """Return the route of a gateway to the workers of the aggregated graph."""
    pool = {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": f"{engine}-gaie-agg-pool",
        "port": 8000,
    }
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [pool],
        "timeouts": {"request": "300s"},
    }
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": GATEWAY}
    made = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": f"{engine}-gaie"},
        "spec": {"parentRefs": [parent], "rules": [rule]},
    }
    return text_of(
        made,
        title="Route to the pool of agg.yaml: set the name of your gateway, and its namespace if it is another one.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model on one engine."""

    folder: str
    model: str
    engine: str
    mode: str
    pools: tuple[Pool, ...]
    routes_by_cache: bool = False
    isl: int = 4000
    osl: int = 500
    concurrency_per_gpu: int = 16

    @property
    def gpus(self) -> int:
        """Return the GPUs of all workers."""
        return sum(pool.gpus * pool.nodes * pool.replicas for pool in self.pools)

    @property
    def name(self) -> str:
        """Return the name of the graph."""
        mode = self.mode.replace("single-node", "sn").replace("multi-node", "mn")
        return f"{self.folder.replace('.', '-')}-{self.engine}-{mode}"


VLLM_70B = ("--block-size", "128")
DISAGG_32B = (Pool(role="prefill", replicas=2, gpus=1), Pool(role="decode", gpus=2))
RECIPES = (
    Recipe(folder="qwen3-0.6b", model="Qwen/Qwen3-0.6B", engine="vllm", mode="agg", pools=(Pool(role="worker"),)),
    Recipe(folder="qwen3-0.6b", model="Qwen/Qwen3-0.6B", engine="sglang", mode="agg", pools=(Pool(role="worker"),)),
    Recipe(folder="qwen3-0.6b", model="Qwen/Qwen3-0.6B", engine="trtllm", mode="agg", pools=(Pool(role="worker"),)),
    Recipe(
        folder="qwen3-32b", model="Qwen/Qwen3-32B", engine="vllm", mode="agg",
        pools=(Pool(role="worker", replicas=4, gpus=2),), routes_by_cache=True,
    ),
    Recipe(
        folder="qwen3-32b", model="Qwen/Qwen3-32B", engine="vllm", mode="disagg-single-node", pools=DISAGG_32B,
        routes_by_cache=True,
    ),
    Recipe(
        folder="qwen3-32b", model="Qwen/Qwen3-32B", engine="sglang", mode="disagg-single-node", pools=DISAGG_32B,
        routes_by_cache=True,
    ),
    Recipe(
        folder="qwen3-32b", model="Qwen/Qwen3-32B", engine="trtllm", mode="agg",
        pools=(Pool(role="worker", replicas=4, gpus=2),),
    ),
    Recipe(
        folder="llama-3-70b", model="RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", engine="vllm", mode="agg",
        pools=(Pool(role="worker", gpus=4, flags=VLLM_70B),),
    ),
    Recipe(
        folder="llama-3-70b", model="RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", engine="vllm",
        mode="disagg-single-node",
        pools=(
            Pool(role="prefill", replicas=2, gpus=2, flags=VLLM_70B), Pool(role="decode", gpus=4, flags=VLLM_70B),
        ),
    ),
    Recipe(
        folder="llama-3-70b", model="RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", engine="vllm",
        mode="disagg-multi-node",
        pools=(Pool(role="prefill", gpus=8, flags=VLLM_70B), Pool(role="decode", gpus=8, flags=VLLM_70B)),
    ),
    Recipe(
        folder="gpt-oss-120b", model="openai/gpt-oss-120b", engine="trtllm", mode="agg",
        pools=(Pool(role="worker", gpus=4),), isl=1000, osl=1000,
    ),
    Recipe(
        folder="gpt-oss-120b", model="openai/gpt-oss-120b", engine="vllm", mode="disagg-single-node",
        pools=(Pool(role="prefill", replicas=2, gpus=2), Pool(role="decode", gpus=4)), isl=1000, osl=1000,
    ),
    Recipe(
        folder="deepseek-r1", model="deepseek-ai/DeepSeek-R1", engine="sglang", mode="agg",
        pools=(Pool(role="worker", gpus=8, nodes=2),), concurrency_per_gpu=8,
    ),
    Recipe(
        folder="deepseek-r1", model="deepseek-ai/DeepSeek-R1", engine="sglang", mode="disagg-multi-node",
        pools=(Pool(role="prefill", gpus=8, nodes=2), Pool(role="decode", gpus=8, nodes=2)), concurrency_per_gpu=8,
    ),
)  # fmt: skip
CACHE_SIZE = {"qwen3-0.6b": "10Gi", "qwen3-32b": "100Gi", "llama-3-70b": "150Gi", "gpt-oss-120b": "150Gi", "deepseek-r1": "1500Gi"}  # fmt: skip


def deployment(recipe: Recipe) -> str:
    """Return a recipe's graph."""
    components = [frontend(routes_by_cache=recipe.routes_by_cache, cached=True)]
    for pool in recipe.pools:
        publishes = recipe.routes_by_cache and pool.role != "decode"
        components.append(worker(recipe.engine, recipe.model, pool, publishes_events=publishes, cached=True))
    title = f"{recipe.model} on {recipe.engine}, {recipe.mode}: {recipe.gpus} GPUs."
    return text_of(graph(recipe.name, recipe.engine, components), title=title)


PERF = Block("""\
set -eu
until python3 -c "import urllib.request, sys; data = urllib.request.urlopen('http://$ENDPOINT/v1/models').read().decode(); \
sys.exit('$TARGET_MODEL' not in data)" 2>/dev/null; do
  echo "waiting for $TARGET_MODEL at $ENDPOINT"
  sleep 5
done
pip install --quiet aiperf
concurrency=$((CONCURRENCY_PER_GPU * DEPLOYMENT_GPU_COUNT))
folder="$ROOT_ARTIFACT_DIR/$(date +%s)_$JOB_NAME/concurrency_$concurrency"
mkdir -p "$folder"
aiperf profile --model "$TARGET_MODEL" --url "http://$ENDPOINT" --endpoint-type chat --streaming \\
  --synthetic-input-tokens-mean "$ISL" --synthetic-input-tokens-stddev 0 \\
  --output-tokens-mean "$OSL" --output-tokens-stddev 0 \\
  --extra-inputs "max_tokens:$OSL" --extra-inputs "min_tokens:$OSL" --extra-inputs ignore_eos:true \\
  --concurrency "$concurrency" --request-count $((10 * concurrency)) --warmup-request-count "$concurrency" \\
  --num-dataset-entries 12800 --random-seed 100 --artifact-dir "$folder"
""")


def benchmark(recipe: Recipe) -> str:
    """Return a recipe's load test."""
    name = f"{recipe.name}-perf"
    values = {
        "TARGET_MODEL": recipe.model,
        "ENDPOINT": f"{recipe.name}-frontend:8000",
        "ISL": recipe.isl,
        "OSL": recipe.osl,
        "CONCURRENCY_PER_GPU": recipe.concurrency_per_gpu,
        "DEPLOYMENT_GPU_COUNT": recipe.gpus,
        "DEPLOYMENT_MODE": recipe.mode,
        "ROOT_ARTIFACT_DIR": f"{MOUNT}/perf",
        "JOB_NAME": name,
    }
    container = {
        "name": "perf",
        "image": "python:3.12-slim",
        "command": Words(["/bin/sh", "-c"]),
        "args": [PERF],
        "env": [{"name": key, "value": str(value)} for key, value in values.items()],
        "volumeMounts": [{"name": CACHE, "mountPath": MOUNT}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 1, "template": {"spec": pod_of(container)}},
    }
    return text_of(job, title="Load test with aiperf; results are below perf/ of the volume.")


def pod_of(container: Object) -> Object:
    """Return the pod of a job that uses the model's volume."""
    return {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": CACHE, "persistentVolumeClaim": {"claimName": CACHE}}],
    }


def cache(folder: str) -> str:
    """Return the volume of a model's files."""
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "your-storage-class-name",
        "resources": {"requests": {"storage": CACHE_SIZE[folder]}},
    }
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CACHE}, "spec": spec}
    return text_of(claim, title="Volume of the model's files: set a storage class that several nodes can mount.")


def download(model: str) -> str:
    """Return the job that downloads a model."""
    script = Block(
        "set -eu\npip install --quiet --target /tmp/hub huggingface_hub hf_transfer\n"
        'PYTHONPATH=/tmp/hub python3 -m huggingface_hub.cli.hf download "$MODEL_NAME" --revision "$MODEL_REVISION"\n'
    )
    values = {
        "MODEL_NAME": model,
        "MODEL_REVISION": "main",
        "HF_HOME": "/model-store",
        "HF_HUB_ENABLE_HF_TRANSFER": "1",
        "HOME": "/tmp",
    }
    container = {
        "name": "model-download",
        "image": "python:3.10-slim",
        "command": Words(["/bin/sh", "-c"]),
        "args": [script],
        "envFrom": [{"secretRef": {"name": SECRET}}],
        "env": [{"name": key, "value": value} for key, value in values.items()],
        "securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": CACHE, "mountPath": "/model-store"}],
    }
    pod = {**pod_of(container), "securityContext": {"fsGroup": 1000}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "model-download"},
        "spec": {"backoffLimit": 3, "template": {"spec": pod}},
    }
    return text_of(job, title="Downloads the model's files to the volume.")


def page(folder: str, recipes: list[Recipe]) -> str:
    """Return the README of one model."""
    rows = "\n".join(
        f"| {one.engine} | {one.mode} | {one.gpus} | [deploy.yaml]({one.engine}/{one.mode}/deploy.yaml), "
        f"[perf.yaml]({one.engine}/{one.mode}/perf.yaml) |"
        for one in recipes
    )
    first = recipes[0]
    return f"""# {first.model}

<!-- Written by tools/deploy_examples.py; `make references` updates it. -->

| engine | mode | GPUs | files |
|---|---|---|---|
{rows}

The images are those of `container/`; build and push them, and replace their names by those of your registry. The recipes are checked by
the admission rules and rendered in tests; they were not run on GPUs.

1. Create the secret `{SECRET}` with the key `HF_TOKEN` in your namespace.
2. Set `storageClassName` in `model-cache/model-cache.yaml` and apply it.
3. Apply `model-cache/model-download.yaml` and wait for the job `model-download`:
   `kubectl wait --for=condition=Complete job/model-download --timeout=6000s`.
4. Apply the `deploy.yaml` of one row. `dynamo deploy status NAME` shows its components.
5. Apply its `perf.yaml` for a load test.
"""


def contents() -> Iterator[tuple[Path, str]]:
    """Yield the path and the content of every file."""
    for engine in ("vllm", "sglang", "trtllm", "mocker"):
        for mode in MODES:
            yield ROOT / "examples" / "backends" / engine / "deploy" / f"{mode}.yaml", example(engine, mode)
        gateway = ROOT / "examples" / "backends" / engine / "deploy" / "gaie"
        for mode in GATEWAY_MODES:
            yield gateway / f"{mode}.yaml", gateway_example(engine, mode)
        yield gateway / "http-route.yaml", route(engine)
    for folder in CACHE_SIZE:
        own = [one for one in RECIPES if one.folder == folder]
        root = ROOT / "recipes" / folder
        yield root / "README.md", page(folder, own)
        yield root / "model-cache" / "model-cache.yaml", cache(folder)
        yield root / "model-cache" / "model-download.yaml", download(own[0].model)
        for one in own:
            yield root / one.engine / one.mode / "deploy.yaml", deployment(one)
            yield root / one.engine / one.mode / "perf.yaml", benchmark(one)


def main() -> int:
    """Write the files; return 1 with `--check` if one is out of date."""
    made = list(contents())
    for path, _ in made:
        path.parent.mkdir(parents=True, exist_ok=True)
    return max(write(path, content) for path, content in made)


if __name__ == "__main__":
    sys.exit(main())
