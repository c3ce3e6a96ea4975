"""Exceptions of the planner, with upstream's names, arguments and messages.

PlannerError
├── DynamoGraphDeploymentNotFoundError, DynamoGraphDeploymentNotReadyError
├── ComponentError
│   ├── SubComponentNotFoundError, DuplicateSubComponentError
│   └── PowerAnnotationMissingError, PowerAnnotationInvalidError
├── ModelNameNotFoundError, DeploymentModelNameMismatchError, UserProvidedModelNameMismatchError
├── BackendFrameworkNotFoundError, BackendFrameworkInvalidError
└── DeploymentValidationError, GPUShapeUnavailableError, EmptyTargetReplicasError, RolloutFailedError
"""

from collections.abc import Sequence

__all__ = [
    "BackendFrameworkInvalidError",
    "BackendFrameworkNotFoundError",
    "ComponentError",
    "DeploymentModelNameMismatchError",
    "DeploymentValidationError",
    "DuplicateSubComponentError",
    "DynamoGraphDeploymentNotFoundError",
    "DynamoGraphDeploymentNotReadyError",
    "EmptyTargetReplicasError",
    "GPUShapeUnavailableError",
    "ModelNameNotFoundError",
    "PlannerError",
    "PowerAnnotationInvalidError",
    "PowerAnnotationMissingError",
    "RolloutFailedError",
    "SubComponentNotFoundError",
    "UserProvidedModelNameMismatchError",
]

POWER_ANNOTATION = "dynamo.nvidia.com/gpu-power-limit"


class PlannerError(Exception):
    """Base of the planner's exceptions."""


class DynamoGraphDeploymentNotFoundError(PlannerError):
    """The parent deployment does not exist."""

    def __init__(self, deployment_name: str, namespace: str) -> None:
        self.deployment_name, self.namespace = deployment_name, namespace
        where = f"(name: '{deployment_name}' in namespace '{namespace}')"
        super().__init__(f"Parent DynamoGraphDeployment not found {where}")


class DynamoGraphDeploymentNotReadyError(PlannerError):
    """The deployment cannot be scaled now."""

    def __init__(self, deployment_name: str, namespace: str | None = None) -> None:
        self.deployment_name, self.namespace = deployment_name, namespace
        where = f" in namespace '{namespace}'" if namespace else ""
        super().__init__(f"DynamoGraphDeployment is not ready (name: '{deployment_name}'{where})")


class ComponentError(PlannerError):
    """Base of errors of a deployment's components."""


class SubComponentNotFoundError(ComponentError):
    """The deployment has no component of a role."""

    def __init__(self, sub_component_type: str) -> None:
        self.sub_component_type = sub_component_type
        super().__init__(f"DynamoGraphDeployment must contain a component with type '{sub_component_type}'")


class DuplicateSubComponentError(ComponentError):
    """The deployment has several components of a role."""

    def __init__(self, sub_component_type: str, service_names: Sequence[str]) -> None:
        self.sub_component_type, self.service_names = sub_component_type, service_names
        super().__init__(
            f"DynamoGraphDeployment must contain only one component with type '{sub_component_type}', "
            f"but found multiple: {', '.join(sorted(service_names))}"
        )


class PowerAnnotationMissingError(ComponentError):
    """A worker component has no power limit, although power budgets are enabled."""

    def __init__(self, component_name: str) -> None:
        self.component_name = component_name
        super().__init__(
            f"Component '{component_name}' has no '{POWER_ANNOTATION}' annotation on its worker podTemplate. "
            "Author the per-GPU cap on the DGD worker podTemplate.metadata.annotations."
        )


class PowerAnnotationInvalidError(ComponentError):
    """The power limit of a worker component is not a positive integer."""

    def __init__(self, component_name: str, value: str) -> None:
        self.component_name, self.value = component_name, value
        super().__init__(
            f"Component '{component_name}' has an invalid '{POWER_ANNOTATION}' annotation {value!r}; "
            "expected a positive integer number of watts."
        )


class ModelNameNotFoundError(PlannerError):
    """No component of the deployment names its model."""

    def __init__(self) -> None:
        super().__init__("Model name not found in DynamoGraphDeployment")


class DeploymentModelNameMismatchError(PlannerError):
    """Prefill and decode workers serve different models."""

    def __init__(self, prefill_model_name: str, decode_model_name: str) -> None:
        self.prefill_model_name, self.decode_model_name = prefill_model_name, decode_model_name
        self.message = (
            f"Model name mismatch in DynamoGraphDeployment: prefill model name {prefill_model_name} "
            f"!= decode model name {decode_model_name}"
        )
        super().__init__(self.message)


class UserProvidedModelNameMismatchError(PlannerError):
    """The deployment serves another model than the settings name."""

    def __init__(self, model_name: str, user_provided_model_name: str) -> None:
        self.model_name, self.user_provided_model_name = model_name, user_provided_model_name
        self.message = f"Model name {model_name} does not match expected model name {user_provided_model_name}"
        super().__init__(self.message)


class BackendFrameworkNotFoundError(PlannerError):
    """The deployment names no backend."""

    def __init__(self) -> None:
        super().__init__("Backend framework not found on DynamoGraphDeployment")


class BackendFrameworkInvalidError(PlannerError):
    """The deployment names an unknown backend."""

    def __init__(self, backend_framework: str) -> None:
        self.backend_framework = backend_framework
        super().__init__(f"Backend framework {backend_framework} is invalid")


class DeploymentValidationError(PlannerError):
    """The deployment cannot be planned; all reasons."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = errors
        super().__init__(f"Service verification failed: {'; '.join(errors)}")


class GPUShapeUnavailableError(PlannerError):
    """The operator does not report the GPUs of a component."""

    def __init__(self, component_name: str, reason: str) -> None:
        self.component_name = component_name
        self.reason = reason
        super().__init__(f"GPU shape for component '{component_name}' is unavailable: {reason}")


class EmptyTargetReplicasError(PlannerError):
    """A scale request without targets."""

    def __init__(self) -> None:
        super().__init__("target_replicas cannot be empty")


class RolloutFailedError(PlannerError):
    """A rolling update has failed; it does not recover without intervention."""

    def __init__(self, deployment_name: str, reason: str = "") -> None:
        self.deployment_name, self.reason = deployment_name, reason
        detail = f": {reason}" if reason else ""
        super().__init__(
            f"DGD '{deployment_name}' rollingUpdate.phase is Failed{detail}. "
            "Investigate the operator status and recover before restarting the planner."
        )
