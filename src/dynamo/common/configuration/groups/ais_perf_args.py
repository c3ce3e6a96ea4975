"""Flags of the AISimulate performance model, by which a router predicts the duration of prefill phases."""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.config_base import ConfigBase
from dynamo.common.configuration.flags import Flag, declared
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.routing.ais_options import AisOptions, checked, read_perf_config

CONFIG_FLAG = "--ais-perf-config"
POLICIES = {"estimation_mode": "auto", "fallback_policy": "deny"}
"""Keys that a configuration contains in upstream even if they are not given."""
NEEDED = ("ais_backend", "ais_system", "ais_model_path")
NEEDED_FLAGS = "--ais-backend, --ais-system and --ais-model-path"
ACCEPT_RATES = "--ais-nextn-accept-rates"
CHANGES = {
    ACCEPT_RATES: {
        "help": "Accepted for compatibility; has no effect. Acceptance rates of draft tokens, separated by commas; "
        "the rate of each is conditional: all earlier drafts were accepted"
    }
}


def parse_ais_perf_config(value: Any) -> dict[str, Any]:
    """Return a configuration given as a mapping, an object with `to_dict`, JSON text or the path of a file."""
    if isinstance(value, str):
        return read_perf_config(value)
    content = getattr(value, "to_dict", lambda: value)()
    if not isinstance(content, Mapping):
        raise ConfigError(f"{CONFIG_FLAG} {value!r}: must be an object, JSON text or the path of a file")
    return dict(content)


class AisPerfConfigBase(ConfigBase):
    """Settings of the performance model."""

    ais_perf_config: Any = None

    def ais_perf_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `AisPerfConfig`. Raise `ValueError` if the configuration is incomplete."""
        variables = {one.metadata["env"]: one.metadata["env"].replace("_AIS_", "_AIC_") for one in fields(AisOptions)}
        for name, former in variables.items():
            if former in environ():
                raise ConfigError(f"{former} is not supported; rename it to {name}")
        names = [one.name for one in fields(AisOptions) if one.name not in ("ais_perf_config", "ais_mtp_seed")]
        given: dict[str, Any] = {name: getattr(self, name, None) for name in names}
        if self.ais_perf_config is None:
            if not all(given[name] for name in NEEDED):
                raise ConfigError(
                    f"AIS perf config requires backend, system, model: set {CONFIG_FLAG} or {NEEDED_FLAGS}"
                )
            config = AisOptions(**given).ais_config()
        elif any(value is not None for value in given.values()):
            raise ConfigError(f"{CONFIG_FLAG} cannot be combined with the other --ais- flags")
        else:
            config = checked(parse_ais_perf_config(self.ais_perf_config))
        return {"config": {**POLICIES, **config}}


class AisPerfArgGroup(ArgGroup):
    """Flags of the performance model."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`."""
        group = parser.add_argument_group("AISimulate Perf Model Options")
        names = [one.metadata["flag"] for one in fields(AisOptions)]
        for flag in declared(AisOptions, names, CHANGES):
            if flag.name == CONFIG_FLAG:
                group.add_argument(flag.name, type=_argument, default=environ().get(flag.env), help=flag.help)
            else:
                _add_both_names(group, flag)


def _argument(text: str) -> dict[str, Any]:
    """Parse the flag's value. Raise `argparse.ArgumentTypeError`, whose message argparse shows."""
    try:
        return parse_ais_perf_config(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_both_names(group: Any, flag: Flag) -> None:
    """Add `--ais-…` and its former name `--aic-…`, of which a command line may contain one."""
    either = group.add_mutually_exclusive_group()
    text = environ().get(flag.env)
    default = flag.default if text is None else flag.type(text)
    help_text = f"{flag.help} [{flag.env}]".replace("%", "%%")
    either.add_argument(flag.name, dest=flag.dest, type=flag.type, default=default, help=help_text)
    former = f"Former name of {flag.name}"
    either.add_argument(flag.obsolete, dest=flag.dest, type=flag.type, default=argparse.SUPPRESS, help=former)
