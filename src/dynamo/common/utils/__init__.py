"""Small helpers of workers and components, one module per subject."""

from dynamo.common.utils import (
    endpoint_types,
    engine_response,
    namespace,
    nvtx_utils,
    paths,
    prometheus,
    runtime,
    time_section,
)

__all__ = [
    "endpoint_types",
    "engine_response",
    "namespace",
    "nvtx_utils",
    "paths",
    "prometheus",
    "runtime",
    "time_section",
]
