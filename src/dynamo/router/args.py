"""The standalone router's flags as an argparse group, for programs that extend it."""

import argparse
from typing import Any

from dynamo import llm
from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.flags import Flag, add_flags, declared
from dynamo.common.configuration.groups.ais_perf_args import AisPerfArgGroup, AisPerfConfigBase
from dynamo.common.configuration.groups.kv_router_args import (
    KvRouterArgGroup,
    KvRouterConfigBase,
    check_indexer_and_model,
)
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.llm import KvRouterConfig
from dynamo.routing.settings import KvRouterSettings

FLAGS = (
    Flag("--endpoint", "DYN_ROUTER_ENDPOINT", None, "Endpoint of the workers: namespace.component.endpoint"),
    Flag(
        "--router-block-size",
        "DYN_ROUTER_BLOCK_SIZE",
        128,
        "Tokens of a KV block, equal to that of the workers",
        int,
        obsolete="--block-size",
    ),
    *declared(KvRouterSettings, ["--serve-indexer"]),
)


class DynamoRouterConfig(KvRouterConfigBase, AisPerfConfigBase):
    """Settings of the standalone router."""

    namespace: str
    endpoint: str
    router_block_size: int
    serve_indexer: bool = False

    def validate(self) -> None:
        """Apply the presets, resolve the namespace, and raise `ValueError` for settings that contradict each other."""
        try:
            namespace, component, name = (self.endpoint or "").split(".")
        except ValueError:
            message = f"--endpoint {self.endpoint}: must be namespace.component.endpoint (DYN_ROUTER_ENDPOINT)"
            raise ConfigError(message) from None
        self.apply_router_config()
        self.namespace = environ().get("DYN_NAMESPACE") or namespace
        self.endpoint = f"{get_worker_namespace(self.namespace)}.{component}.{name}"
        check_indexer_and_model(self)
        if self.conditional_disagg_enabled or self.conditional_disagg_config is not None:
            raise ConfigError("--router-conditional-disagg: only frontends route to workers of two types")


class DynamoRouterArgGroup(ArgGroup):
    """Flags of the standalone router."""

    name = "dynamo-router"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`."""
        add_flags(parser, "Dynamo Router Options", FLAGS)
        KvRouterArgGroup().add_arguments(parser)
        AisPerfArgGroup().add_arguments(parser)


def build_kv_router_config(router_config: DynamoRouterConfig) -> KvRouterConfig:
    """Return the `KvRouterConfig` of the flags."""
    return KvRouterConfig(**router_config.kv_router_kwargs())


def build_ais_perf_config(router_config: DynamoRouterConfig) -> Any | None:
    """Return the `AisPerfConfig` of the flags; None without the performance model."""
    if router_config.router_prefill_load_model != "ais":
        return None
    return llm.AisPerfConfig(**router_config.ais_perf_kwargs())


def parse_args(argv: list[str] | None = None) -> DynamoRouterConfig:
    """Parse a command line. Raise `ValueError` for settings that contradict each other."""
    parser = argparse.ArgumentParser(description="Standalone KV router: routes to the workers of any endpoint")
    DynamoRouterArgGroup().add_arguments(parser)
    settings = DynamoRouterConfig.from_cli_args(parser.parse_args(argv))
    settings.validate()
    return settings
