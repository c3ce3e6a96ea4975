"""Assembly of `final_config.yaml`: the picked graph, features in their order, overrides and the limit of names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.operator.reconcile.requests.result import NoGraph, overridden
from dynamo.planner.config.perf_model import AicInterpolationSpec
from dynamo.profiler.graph import features
from dynamo.profiler.graph.components import GRAPH_KIND, WORKERS, graph_of, main_container
from dynamo.profiler.search import Configuration
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject

NAMES_MAX = 45
"""Characters of the names of a graph and of a component together, the limit of pod names of grouped components."""
TRUST_FLAG = "--trust-remote-code"
TRUSTING_BACKENDS = frozenset({"vllm", "sglang"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What the result is made of."""

    spec: ProfileSpec
    config: Configuration
    backend: str
    curves: Mapping[str, Any] | None = None
    """Documents of performance data by file name."""
    interpolation: AicInterpolationSpec | None = None
    request_name: str = ""
    """Name of the DynamoGraphDeploymentRequest; empty outside of the operator."""
    suffix: Callable[[], str]
    """Returns four random hexadecimal digits for the names of new objects."""

    def picked(self) -> KubeObject:
        """Return the graph of the configuration without features."""
        return graph_of(self.spec, self.config, self.backend, self._name())

    def documents(self) -> list[KubeObject]:
        """Return ConfigMaps and the graph, which is the last. Raise `ConfigError` for an unusable override or long names."""
        spec = self.spec
        value = features.mocker_graph(spec, self._name()) if spec.uses_mocker else self.picked()
        if not spec.uses_mocker and self.backend == "trtllm":
            features.enable_chunked_prefill(value)
        if spec.uses_kv_router:
            features.enable_kv_router(value)
        others = self._with_planner(value)
        if self.curves and spec.needs_curves:
            others.append(features.add_profile_data(value, self.curves, self.suffix, for_mocker=spec.uses_mocker))
        if spec.runtime_version:
            for one in value["spec"]["components"]:
                one["runtimeVersionOverride"] = spec.runtime_version
        value = self._with_override(value)
        add_tolerations(value, spec.tolerations)
        if spec.trusts_remote_code and self.backend in TRUSTING_BACKENDS:
            trust_remote_code(value)
        check_names(value, self.request_name)
        return [*others, value]

    def _with_planner(self, value: KubeObject) -> list[KubeObject]:
        spec = self.spec
        if spec.planner is None or not spec.has_planner:
            return []
        if not spec.uses_mocker and self.backend == "vllm":
            features.enable_benchmarks(value)
        features.add_scaling_adapters(value, spec.planner)
        config = features.planner_config(spec, self.config, self.interpolation)
        return [features.add_planner(value, spec, config, self.suffix)]

    def _name(self) -> str:
        if self.request_name:
            return f"{self.request_name}-dgd"
        if self.spec.uses_mocker:
            return "mocker-disagg"
        kind = "disagg" if self.config.is_disaggregated else "agg"
        return f"{self.backend}-{kind}-{self.suffix()}{self.suffix()}"

    def _with_override(self, value: KubeObject) -> KubeObject:
        override = self.spec.graph_override
        if not override:
            return value
        if "apiVersion" not in override and "kind" not in override:
            override = {"apiVersion": V1ALPHA1, "kind": GRAPH_KIND, **override}
        try:
            return overridden(value, override)
        except NoGraph as error:
            raise ConfigError(str(error).removeprefix("spec.")) from None


def add_tolerations(value: KubeObject, tolerations: Sequence[KubeObject]) -> None:
    """Add tolerations to the pods of all components."""
    for one in value["spec"]["components"] if tolerations else ():
        pod = one.setdefault("podTemplate", {}).setdefault("spec", {})
        known = pod.get("tolerations") or []
        pod["tolerations"] = [*known, *(each for each in tolerations if each not in known)]


def trust_remote_code(value: KubeObject) -> None:
    """Let the engines execute code of the model's repository; simulated ones do not have the flag."""
    for one in value["spec"]["components"]:
        main = main_container(one)
        if one.get("type") not in WORKERS or main is None:
            continue
        args, command = main.get("args") or [], main.get("command") or []
        if "dynamo.mocker" in (*command, *args) or TRUST_FLAG in args:
            continue
        if len(command) >= 2 and command[0] in ("sh", "/bin/sh") and command[1] == "-c" and len(args) == 1:
            main["args"] = args if TRUST_FLAG in args[0] else [f"{args[0]} {TRUST_FLAG}"]
        else:
            main["args"] = [*args, TRUST_FLAG]


def check_names(value: KubeObject, request_name: str) -> None:
    """Raise `ConfigError` if the names of the graph and a component are too long together."""
    name = str(value["metadata"].get("name") or "")
    for one in value["spec"]["components"]:
        length = len(name) + len(str(one.get("name") or ""))
        if length > NAMES_MAX:
            is_given = request_name and name == f"{request_name}-dgd"
            what = f"metadata.name: {request_name!r}" if is_given else f"overrides.dgd.metadata.name: {name!r}"
            raise ConfigError(
                f"{what}: must be {length - NAMES_MAX} characters shorter: the graph {name!r} and its component "
                f"{one.get('name')!r} have {length} characters, at most {NAMES_MAX} are allowed"
            )
