"""RouterOptions: the flags of `python -m dynamo.router`."""

from dataclasses import dataclass, fields
from typing import ClassVar

from dynamo.core.config import option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.protocols.discovery import EndpointId
from dynamo.routing.policy_file import RouterPolicy
from dynamo.routing.settings import DisaggregationOptions, KvRouterOptions, as_unsupported, check_files, router_config
from dynamo.runtime.config import RuntimeOptions

DEFAULT_BLOCK_SIZE = 128  # Upstream's default.
UNSUPPORTED = tuple(as_unsupported(one) for one in fields(DisaggregationOptions) if one.name != "enforce_disagg")
"""Upstream's flags of routers that route to workers of two types; this one routes to one endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(RuntimeOptions, KvRouterOptions):
    """Standalone KV router: routes to the workers of any endpoint, for callers other than frontends."""

    COMMON: ClassVar = (
        "--endpoint",
        "--router-block-size",
        "--router-policy",
        "--router-kv-overlap-score-credit",
        "--router-temperature",
        "--discovery-backend",
        "--request-plane",
    )
    endpoint: str | None = option(
        None, "--endpoint", "DYN_ROUTER_ENDPOINT", "Endpoint of the workers: namespace.component.endpoint"
    )
    block_size: int = option(
        DEFAULT_BLOCK_SIZE,
        "--router-block-size",
        "DYN_ROUTER_BLOCK_SIZE",
        "Tokens of a KV block; must equal the workers' block size",
        aliases=["--block-size"],
    )

    def __post_init__(self) -> None:
        if self.endpoint is None:
            raise ConfigError("--endpoint is missing: expected namespace.component.endpoint (DYN_ROUTER_ENDPOINT)")
        try:
            EndpointId.parse(self.endpoint)
        except InvalidArgument as error:
            raise ConfigError(f"--endpoint {self.endpoint}: {error}") from None
        if self.block_size < 1:
            raise ConfigError(f"--router-block-size {self.block_size}: must be at least 1")
        check_files(self.meaning()[0])

    def target(self) -> EndpointId:
        """Return the workers' endpoint."""
        assert self.endpoint is not None, "checked by __post_init__"
        return EndpointId.parse(self.endpoint)

    def meaning(self) -> tuple[RoutingConfig, PolicyProfile | None]:
        """Return the router configuration of the flags, and the policy file's. Raises `ConfigError`."""
        config = router_config(self, self.block_size)
        if self.router_policy_config is None:
            return config, None
        policy = RouterPolicy.read(self.router_policy_config)
        return policy.applied(config), policy.profile("")
