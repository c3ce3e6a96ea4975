from collections.abc import Callable
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.search import EngineChoice
from dynamo.profiler.spec import ProfileSpec
from dynamo.profiler.thorough.cluster import ClusterDeployer
from dynamo.protocols.kubernetes.common import decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

NO_CLIENT: Any = None
TP2 = EngineChoice(parallel=PickedParallelConfig(tp=2), batch=512, max_tokens=32768)
TOLERATION = {"key": "gpu", "operator": "Exists"}


def deployer(spec: ProfileSpec, prefix: str = "profile") -> ClusterDeployer:
    return ClusterDeployer(NO_CLIENT, spec, "space", prefix, 60)


def test_candidate_is_a_frontend_and_one_engine(spec_of: Callable[..., ProfileSpec]) -> None:
    job = {"template": {"spec": {"tolerations": [TOLERATION]}}}
    spec = spec_of(backend="vllm", overrides={"profilingJob": job, "trustRemoteCode": True})
    value = deployer(spec).graph(TP2)
    graph = decode(DynamoGraphDeployment, value)
    assert graph.metadata.name == "profile-tp2"
    frontend, worker = value["spec"]["components"]
    assert (frontend["type"], worker["type"], worker["replicas"]) == ("frontend", "worker", 1)
    pod = worker["podTemplate"]["spec"]
    assert pod["tolerations"] == [TOLERATION]
    args = pod["containers"][0]["args"]
    assert args[args.index("--tensor-parallel-size") + 1] == "2"
    assert "--trust-remote-code" in args


def test_long_name_is_refused(spec_of: Callable[..., ProfileSpec]) -> None:
    with pytest.raises(ConfigError, match="characters shorter"):
        deployer(spec_of(backend="vllm"), "x" * 40).graph(TP2)
