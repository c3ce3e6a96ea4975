"""Components and contexts for the tests of workloads."""

from typing import Any

from dynamo.operator.reconcile.names import GraphContext, OperatorSettings
from dynamo.protocols.kubernetes.common import Multinode
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

CONTEXT = GraphContext(name="g", namespace="prod", settings=OperatorSettings(), worker_hash="0a1b2c3d")
MP = {"nvidia.com/dynamo-operator-origin-version": "1.6.1"}
RAY = {"nvidia.com/vllm-distributed-executor-backend": "ray"}


def worker(framework: str, *args: str, nodes: int = 2, gpus: int = 8, **fields: Any) -> ComponentSpec:
    """Return a decode component that runs a framework's module with arguments."""
    main: dict[str, Any] = {
        "name": "main",
        "image": "registry.example/worker:1",
        "command": ["python3", "-m", f"dynamo.{framework}"],
        "args": ["--model", "m", *args],
    }
    if gpus:
        main["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    main |= fields.pop("main", {})
    return ComponentSpec(
        name=fields.pop("name", "Decode"),
        type=fields.pop("type", "decode"),
        pod_template={"spec": {"containers": [main]}},
        multinode=Multinode(node_count=nodes) if nodes > 1 else None,
        **fields,
    )
