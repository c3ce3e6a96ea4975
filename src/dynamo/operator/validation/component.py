"""Rules of one component, in a graph or in a DynamoComponentDeployment."""

from decimal import Decimal, InvalidOperation

from dynamo.operator.reconcile.runtime_version import NATIVE_PICKER, stated_version
from dynamo.operator.validation.facts import POWER_LIMIT, Findings, part
from dynamo.operator.validation.views import ComponentView

SUFFIXES = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "n", "u", "m", "k", "M", "G", "T", "P", "E")


def check_component(one: ComponentView, found: Findings, *, uses_grove: bool | None) -> None:
    """Check a component by itself."""
    if one.replicas is not None and one.replicas < 0:
        found.refuse(f"{one.path}.replicas", f"{one.replicas} must be at least 0")
    if one.node_count is not None and one.node_count < 2:
        found.refuse(f"{one.path}.multinode.nodeCount", f"{one.node_count} must be at least 2")
    _check_epp(one, found)
    _check_memory_service(one, found)
    _check_failover(one, found)
    _check_checkpoint(one, found)
    _check_power_limit(one, found)
    if one.raw.get("minAvailable") is not None and uses_grove is False:
        found.refuse(f"{one.path}.minAvailable", "is supported only with Grove")
    if one.is_alpha:
        _check_alpha_fields(one, found)
    else:
        _check_beta_fields(one, found)


def _check_epp(one: ComponentView, found: Findings) -> None:
    config = one.epp_config
    if one.type == "epp":
        if one.node_count is not None:
            found.refuse(f"{one.path}.multinode", "must be absent on a component of type epp")
        if one.replicas not in {None, 1}:
            found.refuse(f"{one.path}.replicas", f"{one.replicas} must be 1 on a component of type epp")
        _check_picker_version(one, found)
    elif config is not None:
        found.refuse(f"{one.path}.eppConfig", "may only be set on a component of type epp")
    if isinstance(config, dict):
        if (config.get("configMapRef") is None) == (config.get("config") is None):
            found.refuse(f"{one.path}.eppConfig", "exactly one of configMapRef and config must be set")
        elif config.get("configMapRef") is not None and not part(config, "configMapRef").get("name"):
            found.refuse(f"{one.path}.eppConfig.configMapRef.name", "is required")


def _check_picker_version(one: ComponentView, found: Findings) -> None:
    """Check that the picker reads a configuration exactly if it is given one, where its version is known."""
    version = stated_version(one.image, str(one.raw.get("runtimeVersionOverride") or ""))
    if version is None:
        return
    text, least = ".".join(map(str, version)), ".".join(map(str, NATIVE_PICKER))
    if version >= NATIVE_PICKER and one.epp_config is not None:
        found.refuse(f"{one.path}.eppConfig", f"must be absent from runtime {least} on; the image is of {text}")
    elif version < NATIVE_PICKER and one.epp_config is None:
        found.refuse(f"{one.path}.eppConfig", f"is required before runtime {least}; the image is of {text}")


def _check_memory_service(one: ComponentView, found: Findings) -> None:
    if one.memory_mode is None:
        return
    if not one.is_worker:
        found.refuse(one.memory_path, f"is not supported on type {one.type or 'unset'}; use worker, prefill or decode")
    if one.gpus < 1:
        found.refuse(one.memory_path, "requires a GPU limit of at least 1 on the main container")
    seen: set[str] = set()
    service = part(one.raw, "gpuMemoryService") if one.is_alpha else part(one.raw, "experimental", "gpuMemoryService")
    for index, name in enumerate(service.get("extraClientContainers") or ()):
        at = f"{one.memory_path}.extraClientContainers[{index}]"
        if name in seen:
            found.refuse(at, f"repeats {name}")
        elif name not in one.containers:
            found.refuse(at, f"{name} is not a container of the pod template")
        seen.add(name)


def _check_failover(one: ComponentView, found: Findings) -> None:
    if one.failover_mode is None:
        return
    if one.memory_mode is None:
        found.refuse(one.failover_path, "requires gpuMemoryService")
    elif one.memory_mode != one.failover_mode:
        found.refuse(f"{one.failover_path}.mode", f"must equal the mode of gpuMemoryService, {one.memory_mode}")
    if one.type and not one.is_worker:
        found.refuse(one.failover_path, f"is not supported on type {one.type}; use worker, prefill or decode")
    if one.failover_mode == "IntraPod" and one.shadows != 1:
        found.refuse(f"{one.failover_path}.numShadows", f"{one.shadows} must be 1 with mode IntraPod")


def _check_checkpoint(one: ComponentView, found: Findings) -> None:
    if one.checkpoint.get("enabled") is not True:
        return
    path = f"{one.path}.checkpoint" if one.is_alpha else f"{one.path}.experimental.checkpoint"
    if one.memory_mode == "InterPod":
        found.refuse(path, "is not supported with a gpuMemoryService of mode InterPod")
    if one.failover_mode is not None:
        found.refuse(path, "is not supported with failover")


def _check_power_limit(one: ComponentView, found: Findings) -> None:
    value = one.annotations.get(POWER_LIMIT)
    if value is None:
        return
    base = "annotations" if one.is_alpha else "podTemplate.metadata.annotations"
    if not str(value).isdigit() or int(value) < 1:
        found.refuse(f"{one.path}.{base}[{POWER_LIMIT}]", f"{value!r} must be a whole number of watts, at least 1")
    elif one.gpus < 1:
        found.refuse(f"{one.path}.{base}[{POWER_LIMIT}]", "requires a GPU limit on the main container")


def _check_beta_fields(one: ComponentView, found: Findings) -> None:
    size = one.raw.get("sharedMemorySize")
    if size is not None:
        _check_quantity(f"{one.path}.sharedMemorySize", size, found)
    sidecar = one.raw.get("frontendSidecar")
    if sidecar is not None and sidecar not in one.containers:
        found.refuse(f"{one.path}.frontendSidecar", f"{sidecar!r} is not a container of podTemplate.spec.containers")


def _check_alpha_fields(one: ComponentView, found: Findings) -> None:
    for index, mount in enumerate(one.raw.get("volumeMounts") or ()):
        at = f"{one.path}.volumeMounts[{index}]"
        if not mount.get("name"):
            found.refuse(f"{at}.name", "is required")
        if not mount.get("mountPoint") and not mount.get("useAsCompilationCache"):
            found.refuse(f"{at}.mountPoint", "is required unless useAsCompilationCache is set")
    ingress = part(one.raw, "ingress")
    if ingress.get("enabled") and not ingress.get("host"):
        found.refuse(f"{one.path}.ingress.host", "is required when ingress.enabled is true")
    memory = one.raw.get("sharedMemory")
    if isinstance(memory, dict):
        if not memory.get("disabled") and memory.get("size") in {None, ""}:
            found.refuse(f"{one.path}.sharedMemory.size", "is required unless sharedMemory.disabled is true")
        elif memory.get("size") not in {None, ""}:
            _check_quantity(f"{one.path}.sharedMemory.size", memory["size"], found)
    for name in ("dynamoNamespace", "autoscaling"):
        if one.raw.get(name) is not None:
            found.warn(f"{one.path}.{name}", "is deprecated and has no effect")


def _check_quantity(path: str, value: object, found: Findings) -> None:
    text = str(value)
    number = next((text.removesuffix(suffix) for suffix in SUFFIXES if text.endswith(suffix)), text)
    try:
        amount = Decimal(number)
    except InvalidOperation:
        found.refuse(path, f"{text!r} is not a quantity such as 8Gi")
        return
    if not amount.is_finite() or amount < 0:
        found.refuse(path, f"{text!r} must be at least 0")


def check_component_update(new: ComponentView, old: ComponentView, found: Findings, *, may_scale: bool) -> None:
    """Check a component against the one before it."""
    if (new.has_adapter or old.has_adapter) and not may_scale and new.replicas_or_default != old.replicas_or_default:
        found.refuse(
            f"{new.path}.replicas",
            f"{new.replicas_or_default}: the scaling adapter owns the replicas; "
            "change the DynamoGraphDeploymentScalingAdapter instead",
        )
    if new.is_multinode != old.is_multinode:
        found.refuse(f"{new.path}.multinode", "cannot change between one node and several after creation")
    if (new.has_topology, new.pack_domain) != (old.has_topology, old.pack_domain):
        found.refuse(f"{new.path}.topologyConstraint", "is immutable")
    if new.memory_mode != old.memory_mode and "InterPod" in {new.memory_mode, old.memory_mode}:
        found.refuse(f"{new.memory_path}.mode", "InterPod cannot be turned on or off after creation")
    if new.failover_mode != old.failover_mode and "InterPod" in {new.failover_mode, old.failover_mode}:
        found.refuse(f"{new.failover_path}.mode", "InterPod cannot be turned on or off after creation")
    elif new.failover_mode == "InterPod" and new.shadows != old.shadows:
        found.refuse(
            f"{new.failover_path}.numShadows", f"{new.shadows} cannot differ from {old.shadows} after creation"
        )
    if new.annotations.get(POWER_LIMIT) != old.annotations.get(POWER_LIMIT):
        base = "annotations" if new.is_alpha else "podTemplate.metadata.annotations"
        found.refuse(f"{new.path}.{base}[{POWER_LIMIT}]", "is immutable")
