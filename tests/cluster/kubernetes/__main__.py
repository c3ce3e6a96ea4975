"""Run the API server of the tests: `python -m tests.cluster.kubernetes --port 0`."""

import argparse
import tempfile
from pathlib import Path

from tests.cluster.kubernetes.running import run_in_foreground

parser = argparse.ArgumentParser(prog="python -m tests.cluster.kubernetes", description=__doc__)
parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 selects a free one")
parser.add_argument(
    "--folder", type=Path, help="folder of the kubeconfig and of certificates; a temporary one by default"
)
parser.add_argument("--tls", action="store_true", help="serve HTTPS with a certificate made at start")
parser.add_argument("--no-controllers", action="store_true", help="run no controllers, as a bare kube-apiserver")
parser.add_argument("--ready-seconds", type=float, default=0.0, help="seconds until a pod is ready")

if __name__ == "__main__":
    arguments = parser.parse_args()
    place = arguments.folder or Path(tempfile.mkdtemp(prefix="kubernetes-"))
    run_in_foreground(
        place,
        arguments.port,
        controllers=not arguments.no_controllers,
        tls=arguments.tls,
        ready_s=arguments.ready_seconds,
    )
