"""AdvertisedOptions: router settings that a worker publishes on its model card for frontends.

The frontend's own routing environment variables are not read here: a frontend may run on the same host.
"""

from dataclasses import dataclass, fields

from dynamo.core.config import option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.routing.python_config import KvRouterConfig, RouterConfig
from dynamo.routing.settings import (
    AffinityOptions,
    BusyOptions,
    KvOptions,
    without_variables,
)
from dynamo.runtime.push_router import RouterMode

MODES = {mode.value: mode for mode in RouterMode}
ANY_MODE = tuple(one.name for group in (BusyOptions, AffinityOptions) for one in fields(group))
"""Options that may be published with every mode; the others require kv mode."""


@dataclass(frozen=True, kw_only=True)  # No slots: a base class of the mocker's configuration.
@without_variables
class AdvertisedOptions(BusyOptions, AffinityOptions, KvOptions):
    """Router settings that the worker publishes (with `--router-mode`)."""

    router_mode: str | None = option(
        None,
        "--router-mode",
        None,
        "Router mode that frontends use for this model, in place of their own mode and flags",
        choices=tuple(MODES),
    )

    def routing(self) -> RouterConfig | None:
        """Return the published router settings; None without `--router-mode`. Raise `ConfigError` if invalid."""
        given = [one.name for one in fields(AdvertisedOptions) if getattr(self, one.name) != one.default]
        if self.router_mode is None:
            if given:
                raise ConfigError(f"{FLAGS[given[0]]}: requires --router-mode")
            return None
        of_kv = [name for name in given if name not in (*ANY_MODE, "router_mode")]
        mode = MODES[self.router_mode]
        if of_kv and mode is not RouterMode.KV:
            raise ConfigError(f"{FLAGS[of_kv[0]]}: requires --router-mode kv")
        try:
            settings = {one.name: getattr(self, one.name) for one in fields(KvOptions)}
            kv = KvRouterConfig(**settings) if mode is RouterMode.KV else None
            return RouterConfig(mode, kv, **{name: getattr(self, name) for name in ANY_MODE})
        except (InvalidArgument, ValueError) as error:
            raise ConfigError(f"--router-mode {self.router_mode}: {error}") from None


FLAGS: dict[str, str] = {one.name: one.metadata["flag"] for one in fields(AdvertisedOptions)}
