"""Flags of routers of any mode, for frontends and for workers that declare their own routing."""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.config_base import ConfigBase
from dynamo.common.configuration.flags import Flag, add_flags, declared
from dynamo.common.configuration.groups.kv_router_args import KvRouterArgGroup, KvRouterConfigBase
from dynamo.common.configuration.utils import add_argument
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.llm import KvRouterConfig, RouterConfig, RouterMode
from dynamo.routing.settings import AffinityOptions, BusyOptions

logger = logging.getLogger(__name__)

ROUTER_MODE_MAP: dict[str, str] = {
    "round-robin": "RoundRobin",
    "random": "Random",
    "power-of-two": "PowerOfTwoChoices",
    "kv": "KV",
    "direct": "Direct",
    "least-loaded": "LeastLoaded",
    "device-aware-weighted": "DeviceAwareWeighted",
}
THRESHOLDS = {
    "active_decode_blocks_threshold": 1.0,
    "active_prefill_tokens_threshold": math.inf,
    "active_prefill_tokens_threshold_frac": sys.float_info.max,
}
"""Limits above which workers are busy, and their maxima."""
IGNORED_DISAGG = "%s is deprecated and ignored: requests have two phases where prefill workers are registered"
IGNORED_ADMISSION = "%s is no longer supported and is ignored: set the --active-…-threshold flags"

# fmt: off
FRONTEND_FLAGS = (
    Flag("--router-min-initial-workers", "DYN_ROUTER_MIN_INITIAL_WORKERS", 0, "Workers to wait for at the start; 0 does not wait",
        int, "min_initial_workers"),
)
# fmt: on
FLAGS = (
    *declared(AffinityOptions, ["--router-session-affinity-ttl-secs", "--router-session-affinity-mode"]),
    *declared(BusyOptions, [f"--{name.replace('_', '-')}" for name in THRESHOLDS]),
)


class _IgnoredAdmissionControl(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        logger.warning(IGNORED_ADMISSION, "--admission-control")


class _IgnoredDisagg(argparse.BooleanOptionalAction):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        logger.warning(IGNORED_DISAGG, option_string)
        super().__call__(parser, namespace, values, option_string)


class RouterConfigBase(ConfigBase):
    """Settings of a router of any mode."""

    router_mode: str
    min_initial_workers: int
    enforce_disagg: bool
    session_affinity_ttl_secs: int | None
    session_affinity_mode: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None

    def router_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `RouterConfig` that do not belong to one mode."""
        names = (*THRESHOLDS, "session_affinity_ttl_secs", "session_affinity_mode")
        return {name: getattr(self, name) for name in names}

    def _limits(self) -> dict[str, float]:
        """Return the flags of the limits that are set, with their values."""
        values = {name: getattr(self, name) for name in THRESHOLDS}
        return {f"--{name.replace('_', '-')}": value for name, value in values.items() if value is not None}

    def validate_rejection_thresholds(self) -> None:
        """Raise `ValueError` for a limit outside its range."""
        for flag, value in self._limits().items():
            maximum = THRESHOLDS[flag.removeprefix("--").replace("-", "_")]
            if not 0 <= value <= maximum:
                bound = f"between 0 and {maximum:g}" if maximum == 1 else "a finite number of at least 0"
                raise ConfigError(f"{flag} {value}: must be {bound}")

    def log_rejection_thresholds(self) -> None:
        """Log the limits in force."""
        limits = ", ".join(f"{flag}={value}" for flag, value in self._limits().items())
        if limits:
            logger.info("requests are rejected while all workers are above %s", limits)
        else:
            logger.info("busy-worker rejection disabled")


class RouterArgGroup(ArgGroup):
    """Flags of a router; `include_frontend_only` adds those that workers do not have."""

    def __init__(self, *, default_router_mode: str | None, include_frontend_only: bool) -> None:
        self.default_router_mode = default_router_mode
        self.include_frontend_only = include_frontend_only

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`."""
        for env, message in (("DYN_ADMISSION_CONTROL", IGNORED_ADMISSION), ("DYN_ENFORCE_DISAGG", IGNORED_DISAGG)):
            if env in environ():
                logger.warning(message, env)
        mode = Flag(
            "--router-mode",
            "DYN_ROUTER_MODE",
            self.default_router_mode,
            "Choice of a worker: by turn, at random, by load, by cached blocks, or by the request",
            choices=tuple(ROUTER_MODE_MAP),
        )
        first = FRONTEND_FLAGS if self.include_frontend_only else ()
        group = add_flags(parser, "Router Options", (*first, mode, *FLAGS))
        if not self.include_frontend_only:
            return
        group.add_argument(
            "--admission-control",
            choices=("token-capacity", "none"),
            action=_IgnoredAdmissionControl,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        add_argument(
            group,
            flag_name="--enforce-disagg",
            env_var="DYN_ENFORCE_DISAGG",
            default=False,
            help="Accepted for compatibility; has no effect",
            arg_type=None,
            action=_IgnoredDisagg,
        )


class WorkerRouterConfig(RouterConfigBase, KvRouterConfigBase):
    """Routing policy on the model card of a worker; it replaces that of frontends for this model."""

    min_initial_workers: int = 0
    enforce_disagg: bool = False


class RouterConfigSource(Protocol):
    """A configuration from which a `RouterConfig` can be built."""

    def router_kwargs(self) -> dict[str, Any]: ...

    def kv_router_kwargs(self) -> dict[str, Any]: ...


def add_worker_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the router flags of a worker."""
    groups = RouterArgGroup(default_router_mode=None, include_frontend_only=False), KvRouterArgGroup()
    for group in groups:
        group.add_arguments(parser)


def _worker_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_worker_router_arguments(parser)
    return parser


def parse_worker_router_config(argv: Sequence[str]) -> tuple[WorkerRouterConfig, list[str]]:
    """Return a worker's routing, and the arguments that are not router flags."""
    known, others = _worker_parser().parse_known_args([*argv])
    return WorkerRouterConfig.from_cli_args(known), others


def register_worker_router_help(parser: argparse.ArgumentParser) -> None:
    """List the router flags of a worker in the help of `parser`, which does not parse them itself."""
    shown = parser.add_argument_group("Routing of this worker's model, published on its card; replaces the frontends'")
    shown._group_actions += [action for action in _worker_parser()._actions if action.option_strings]


def build_router_config(config: RouterConfigSource | None) -> RouterConfig | None:
    """Return the `RouterConfig` of the flags; None without a router mode. Raise `ValueError` for an unknown mode."""
    name = getattr(config, "router_mode", None)
    if config is None or name is None:
        return None
    if name == "kv":
        return RouterConfig(RouterMode.KV, KvRouterConfig(**config.kv_router_kwargs()), **config.router_kwargs())
    return RouterConfig(_mode(name), **config.router_kwargs())


def _mode(name: str) -> RouterMode:
    """Return a mode. Raise `ConfigError` for an unknown name."""
    if name in ROUTER_MODE_MAP:
        return getattr(RouterMode, ROUTER_MODE_MAP[name])
    raise ConfigError(f"unknown router mode {name}: expected {', '.join(ROUTER_MODE_MAP)}")
