"""RouterPolicy: the YAML file of `--router-policy-config`.

    router:                      # same settings as the flags, which it overrides
      use_kv_events: true
    worker_selection:
      aggregated: steady
      instances:
        - {name: steady, type: default, parameters: {prefill_load_scale: 4, router_temperature: 0.1}}
    default_policy_family: interactive        # classes of queued requests: kv_router/policy.py
    uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
    policy_classes: [{name: chat, policy_family: interactive, cache_bucket: all}]
    models:
      big-model: {default_policy_family: …}   # replaces the classes above

The cost parameters may be those of an instance of type `default`, or of type `balanced`, this project's own.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.tracking import check_tracking
from dynamo.routing.prefill_plan import FLAG as CONDITIONAL_FLAG
from dynamo.routing.settings import SETS, DisaggregationOptions, KvOptions, KvRouterSettings

FLAG = "--router-policy-config"

PROFILE_FIELDS = ("default_policy_family", "uncached_isl_buckets", "policy_classes")
TYPES = {"default": "dynamo", "balanced": "balanced"}

PARAMETERS = {one.name for one in fields(KvOptions) if one.metadata.get("yaml") == "parameters"}
SETTINGS = {one.name for one in fields(KvRouterSettings) if one.metadata.get("yaml") == "router"}
"""Keys of `router:`."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {"serve_indexer": (False,)}
"""Keys accepted only with these values, because other values request a feature that this file cannot enable."""


class RouterPolicy:
    """Content of a policy file."""

    def __init__(self, content: Mapping[str, Any], path: str) -> None:
        """Parse the file's content. Raises `ConfigError` that names the file and the field."""
        self._path = path
        known = {"router", "worker_selection", "models", *PROFILE_FIELDS}
        self._only(content, known, "")
        self.settings = self._mapping(content.get("router"), "router")
        self._only(self.settings, SETTINGS, "router.")
        for name, allowed in WITHOUT_EFFECT.items():
            if self.settings.get(name, allowed[0]) not in allowed:
                raise ConfigError(f"{FLAG} {path}: router.{name} {self.settings[name]!r}: expected {allowed[0]!r}")
        self._selection = self._mapping(content.get("worker_selection"), "worker_selection")
        self._profile = self._profile_of(content, "")
        models = self._mapping(content.get("models"), "models")
        self._models = {
            name: self._profile_of(self._mapping(one, f"models.{name}"), f"models.{name}.")
            for name, one in models.items()
        }

    @classmethod
    def read(cls, path: str) -> "RouterPolicy":
        """Read a file. Raises `ConfigError`."""
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{FLAG} {path}: {error.strerror}") from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{FLAG} {path}: invalid YAML ({' '.join(str(error).split())})") from None
        if not isinstance(content, dict) or not content:
            raise ConfigError(
                f"{FLAG} {path}: expected a mapping with router, worker_selection, models or policy_classes"
            )
        return cls(content, path)

    def profile(self, model: str) -> PolicyProfile | None:
        """Return the queue classes of a model's requests; None if the file defines none."""
        return self._models.get(model) or self._profile

    def applied(self, config: RoutingConfig, stage: str = "aggregated", named: str | None = None) -> RoutingConfig:
        """Return a configuration with the file's settings applied; `named` is the stage's policy if a flag names it.

        Raises `ConfigError`.
        """
        kind, parameters = self._instance(stage, named)
        given = {SETS[name]: value for name, value in {**self.settings, **parameters}.items() if name in SETS}
        changes = {name: value for name, value in given.items() if not name.startswith("weights.")}
        weights: dict[str, Any] = msgspec.to_builtins(config.weights)
        weights |= {name.removeprefix("weights."): given[name] for name in given.keys() - changes.keys()}
        if kind is not None:
            changes["policy"] = TYPES[kind]
        try:
            made = msgspec.convert({**msgspec.to_builtins(config), **changes, "weights": weights}, RoutingConfig)
            made.weights.check()
            check_tracking(made.tracking_hash, made.tracking_key_file, made.tracking_key_id)
        except (msgspec.ValidationError, InvalidArgument) as error:
            raise ConfigError(f"{FLAG} {self._path}: {error}") from None
        return made

    def _instance(self, stage: str, named: str | None) -> tuple[str | None, dict[str, Any]]:
        """Return type and parameters of the policy that a stage names."""
        name = named or self._selection.get(stage)
        instances = self._selection.get("instances") or []
        self._only(self._selection, {"aggregated", "prefill", "decode", "encode", "instances"}, "worker_selection.")
        if not isinstance(instances, list) or not all(isinstance(one, dict) for one in instances):
            raise ConfigError(f"{FLAG} {self._path}: worker_selection.instances: expected a list of mappings")
        if name is None:
            return None, {}
        if name == "default":
            return "default", {}
        for one in instances:
            if one.get("name") == name:
                self._only(one, {"name", "type", "parameters"}, f"worker_selection.instances {name}: ")
                kind = one.get("type", "default")
                if kind not in TYPES:
                    raise ConfigError(
                        f"{FLAG} {self._path}: worker_selection instance {name}: type {kind!r}: expected one of {', '.join(TYPES)}"
                    )
                parameters = self._mapping(one.get("parameters"), f"{name}.parameters")
                self._only(parameters, PARAMETERS, f"{name}.parameters.")
                return kind, parameters
        raise ConfigError(f"{FLAG} {self._path}: worker_selection.{stage} {name!r}: no instance has this name")

    def _profile_of(self, content: Mapping[str, Any], where: str) -> PolicyProfile | None:
        given = {name: content[name] for name in PROFILE_FIELDS if name in content}
        if not given:
            return None
        if len(given) < len(PROFILE_FIELDS):
            missing = ", ".join(name for name in PROFILE_FIELDS if name not in given)
            raise ConfigError(f"{FLAG} {self._path}: {where}{missing} is missing: all three keys are required together")
        try:
            return msgspec.convert(given, PolicyProfile).check()
        except (msgspec.ValidationError, ConfigError) as error:
            raise ConfigError(f"{FLAG} {self._path}: {where}{error}") from None

    def _mapping(self, value: Any, where: str) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{FLAG} {self._path}: {where}: expected a mapping, found {value!r}")
        return value

    def _only(self, given: Mapping[str, Any], known: set[str], where: str) -> None:
        for name in given:
            if name not in known:
                raise ConfigError(f"{FLAG} {self._path}: {where}{name}: expected one of {', '.join(sorted(known))}")


def check_disaggregation(
    options: DisaggregationOptions, router_mode: str, config: RoutingConfig, policy: RouterPolicy | None
) -> None:
    """Raise `ConfigError` for conflicting flags, or for a policy missing in the file."""
    options.conditional(config.queue_threshold)
    if options.conditional_disagg and router_mode != "kv":
        raise ConfigError(f"{CONDITIONAL_FLAG} requires --router-mode kv")
    if options.conditional_disagg and not config.use_kv_events:
        raise ConfigError(f"{CONDITIONAL_FLAG} requires --router-kv-events")
    for worker_type in ("prefill", "decode"):
        name = options.policy_of(worker_type)
        if name is not None and router_mode != "kv":
            raise ConfigError(f"--router-{worker_type}-policy requires --router-mode kv")
        if name is not None and policy is None and name not in TYPES:
            raise ConfigError(
                f"--router-{worker_type}-policy {name}: without --router-policy-config must be one of "
                + ", ".join(TYPES)
            )
        config_of_stage(config, worker_type, policy, options)


def config_of_stage(
    config: RoutingConfig, worker_type: str, policy: RouterPolicy | None, options: DisaggregationOptions
) -> RoutingConfig:
    """Return the configuration for workers of one type. Raises `ConfigError` for a policy missing in the file."""
    name = options.policy_of(worker_type)
    stage = worker_type if worker_type in ("prefill", "decode", "encode") else "aggregated"
    if policy is not None:
        config = policy.applied(config, stage, name)
    elif name is not None:
        config = msgspec.structs.replace(config, policy="balanced" if TYPES[name] == "balanced" else "dynamo")
    if worker_type == "prefill":  # Blocks leave after the transfer: only active prefills count.
        return msgspec.structs.replace(config, track_active_blocks=False, track_output_blocks=False)
    if worker_type == "decode" and not options.conditional_disagg:  # Chosen by load alone: cache state is not needed.
        return msgspec.structs.replace(config, use_kv_events=False, use_remote_indexer=False, durable_kv_events=False)
    return config
