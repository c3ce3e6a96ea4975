"""Groups of flags: runtime, HTTP client, router."""

from dynamo.common.configuration.groups.http_args import HttpArgGroup, HttpConfigBase
from dynamo.common.configuration.groups.kv_router_args import KvRouterArgGroup, KvRouterConfigBase
from dynamo.common.configuration.groups.router_args import RouterArgGroup, RouterConfigBase
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig

__all__ = [
    "DynamoRuntimeArgGroup",
    "DynamoRuntimeConfig",
    "HttpArgGroup",
    "HttpConfigBase",
    "KvRouterArgGroup",
    "KvRouterConfigBase",
    "RouterArgGroup",
    "RouterConfigBase",
]
