"""Administration of workers in reinforcement learning."""

from dynamo.common.rl.admin import (
    RLAdminValidationError,
    RLRouteHandler,
    RLRouteRegistry,
    env_bool,
    first_endpoint_response,
    register_rl_routes,
    require_lora_load_request,
    require_lora_unload_request,
)

__all__ = [
    "RLAdminValidationError",
    "RLRouteHandler",
    "RLRouteRegistry",
    "env_bool",
    "first_endpoint_response",
    "register_rl_routes",
    "require_lora_load_request",
    "require_lora_unload_request",
]
