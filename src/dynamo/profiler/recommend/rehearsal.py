"""Rehearsal: the recommended deployment with simulated engines, which needs no GPUs and runs with `dynamo serve -f`."""

from pathlib import Path

from dynamo.core.errors import ConfigError
from dynamo.profiler import curves
from dynamo.profiler.graph.components import component, container, graph, main_container
from dynamo.profiler.graph.features import set_env
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.recommend.output import roles
from dynamo.profiler.recommend.simulation import BLOCK_TOKENS, CandidateDeployment
from dynamo.profiler.search import EngineChoice
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import KubeObject

NAME = "rehearsal"
FOLDER = "mocker"
"""Folder of the performance curves that the simulated engines read."""
PREFILL_POINTS, DECODE_POINTS = 400, 6
"""Prompt lengths are many because the mocker takes the next longer one; decode points are fitted."""
CONTEXT_MIN = 2048
"""Least context of the curves, for models that state none."""


def write_curves(directory: Path, prefill: AnalyticEngine, decode: AnalyticEngine) -> Path:
    """Write the curves of the recommended engines and return their folder. Raise `ConfigError` if they cannot be written."""
    context = max(CONTEXT_MIN, prefill.shape.max_context)
    folder = directory.absolute() / FOLDER
    try:
        curves.write(
            folder,
            curves.estimated_prefill(prefill, context, PREFILL_POINTS),
            curves.estimated_decode(decode, context, DECODE_POINTS),
        )
    except OSError as error:
        raise ConfigError(f"--output-dir {directory}: {error.strerror or error}") from None
    return folder


def rehearsal_graph(
    spec: ProfileSpec, candidate: CandidateDeployment, engines: dict[str | None, AnalyticEngine], folder: Path
) -> KubeObject:
    """Return the graph; `engines`: the performance model of each role, `folder`: their curves."""
    frontend = component("Frontend", "frontend", 1, container(spec.image, ["python3", "-m", "dynamo.frontend"], []))
    main = main_container(frontend)
    assert main is not None
    for name, value in candidate.router.variables().items():
        set_env(main, name, value)
    components = [frontend]
    for role, choice in roles(candidate):
        args = _mocker_args(spec, role, choice, engines[role], folder)
        worker = container(spec.image, ["python3", "-m", "dynamo.mocker"], args)
        components.append(component(role or "worker", role or "worker", choice.replicas, worker))
    for one in components:
        del one["podTemplate"]["spec"]["containers"][0]["envFrom"]  # Nothing is read from the hub with a token.
    return graph(NAME, components)


def _mocker_args(
    spec: ProfileSpec, role: str | None, choice: EngineChoice, engine: AnalyticEngine, folder: Path
) -> list[str]:
    ranks = engine.parallel.dp
    model = ["--model-path", str(Path(spec.model).absolute())] if Path(spec.model).is_dir() else []
    values = {
        "--model-name": spec.model,
        "--planner-profile-data": folder,
        "--num-gpu-blocks-override": max(1, engine.kv_tokens() // ranks // BLOCK_TOKENS),
        "--block-size": BLOCK_TOKENS,
        "--max-num-seqs": choice.batch,
        "--max-num-batched-tokens": choice.max_tokens,
    }
    found = model + [str(word) for pair in values.items() for word in pair]
    found += ["--data-parallel-size", str(ranks)] if ranks > 1 else []
    return found + (["--disaggregation-mode", role] if role else [])
