"""Environment of a recipe's workers: the UCX, NIXL and NCCL variables, capabilities and resources that RDMA needs. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo.operator.validation.facts import part
from dynamo.operator.validation.views import ComponentView
from dynamo.ops.recipes.parts import SourcedObject, components, flag_value, main_container, tokens_of
from dynamo.ops.report import CheckRow, failed, passed, skipped, warned

CRITICAL = ("UCX_TLS", "UCX_NET_DEVICES", "NCCL_IB_HCA")
"""Variables without which the library chooses, which may be TCP."""
RDMA_TRANSPORTS = frozenset({"rc", "rc_x", "rc_mlx5", "rc_v", "dc", "dc_x", "dc_mlx5", "ud", "ib", "srd", "all"})
CUDA_TRANSPORTS = ("cuda_copy", "cuda_ipc")
RECOMMENDED = {
    "UCX_RNDV_SCHEME": "get_zcopy",
    "UCX_RNDV_THRESH": "0",
    "UCX_IB_REG_METHODS": "odp,rcache",
}
RDMA_RESOURCES = ("rdma/", "vpc.amazonaws.com/efa", "nvidia.com/rdma", "nvidia.com/hostdev")
FALLBACK = "transfers over TCP take tens of seconds for a long prompt"


def rows_of_graph(graph: SourcedObject) -> list[CheckRow]:
    """Return the rows of every worker of a graph that transfers blocks or spans nodes."""
    rows: list[CheckRow] = []
    graph_env = variables_of(part(graph.value, "spec").get("env") or part(graph.value, "spec").get("envs") or ())
    for one in components(graph):
        if not one.is_worker:
            continue
        if not transfers(one):
            rows.append(skipped(f"env {one.name}", "one node and both phases in one worker: no transfers"))
            continue
        container = main_container(one)
        own = variables_of(container.get("env") or one.raw.get("envs") or ())
        rows += rows_of_worker(one.name, {**graph_env, **own})
        rows += _pod_rows(one, container)
    return rows or [skipped("env", "no workers")]


def transfers(component: ComponentView) -> bool:
    """Return whether a worker exchanges blocks or tensors with another one."""
    words = tokens_of(component)
    mode = flag_value(words, "--disaggregation-mode")
    is_phase = (
        component.type in {"prefill", "decode"} or mode in {"prefill", "decode"} or "--is-prefill-worker" in words
    )
    return is_phase or component.is_multinode


def variables_of(entries: Sequence[Any]) -> dict[str, str]:
    """Return the variables with a literal value."""
    return {
        str(one["name"]): str(one.get("value") or "") for one in entries if isinstance(one, Mapping) and "value" in one
    }


def rows_of_worker(name: str, variables: Mapping[str, str]) -> Iterator[CheckRow]:
    """Yield the rows of one worker's environment."""
    check = f"env {name}"
    missing = [one for one in CRITICAL if one not in variables]
    if missing:
        yield warned(
            check, f"not set: {', '.join(missing)}", "set them to the transports and devices of the RDMA network"
        )
    else:
        yield passed(check, ", ".join(f"{one}={variables[one]}" for one in CRITICAL))
    yield from ucx_rows(check, variables)
    if variables.get("NCCL_IB_DISABLE") == "1":
        yield failed(check, "NCCL_IB_DISABLE=1: collectives use TCP", "remove it, or set it to 0")
    for key, value in RECOMMENDED.items():
        if key in variables and variables[key] != value:
            yield warned(check, f"{key}={variables[key]}", f"the tested value is {value}")


def ucx_rows(check: str, variables: Mapping[str, str]) -> Iterator[CheckRow]:
    """Yield the rows of the transport list."""
    text = variables.get("UCX_TLS")
    if text is None:
        return
    if text.startswith("^"):
        yield skipped(check, f"UCX_TLS={text}: a list of excluded transports")
        return
    names = {one.strip() for one in text.split(",") if one.strip()}
    if not names & RDMA_TRANSPORTS:
        yield failed(check, f"UCX_TLS={text} has no RDMA transport: {FALLBACK}", "add rc_x or dc_x")
    absent = [one for one in CUDA_TRANSPORTS if one not in names and not names & {"all", "cuda"}]
    if absent:
        yield warned(check, f"UCX_TLS={text} lacks {', '.join(absent)}", "add them: blocks are in GPU memory")


def _pod_rows(component: ComponentView, container: Mapping[str, Any]) -> Iterator[CheckRow]:
    check = f"pod {component.name}"
    added = part(container, "securityContext", "capabilities").get("add") or ()
    if "IPC_LOCK" in added or part(container, "securityContext").get("privileged"):
        yield passed(check, "may lock memory (IPC_LOCK)")
    else:
        yield warned(check, "the capability IPC_LOCK is not added", "add it: RDMA registers locked memory")
    limits = {**part(container, "resources", "limits"), **part(component.raw, "resources", "limits", "custom")}
    found = [key for key in limits if key.startswith(RDMA_RESOURCES)]
    if found:
        yield passed(check, f"requests {', '.join(found)}")
    else:
        yield warned(check, "no RDMA device is requested", "request one, such as rdma/ib, with the number of GPUs")
