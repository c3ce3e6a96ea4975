"""Facts about the machine, the interpreter, the GPUs and the installed packages."""

import importlib.metadata
import logging
import platform
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree as ET

logger = logging.getLogger(__name__)

NVIDIA_SMI_S = 5.0  # A hanging driver must not delay the start.
GPU_FIELDS = {
    "name": "product_name",
    "memory_total": "fb_memory_usage/total",
    "board_part_number": "board_part_number",
    "gpu_part_number": "gpu_part_number",
}


def get_system_info() -> dict[str, Any]:
    """Return the platform and the host's name."""
    return {
        "platform": platform.platform(),
        "architecture": platform.architecture(),
        "processor": platform.processor() or "unknown",
        "hostname": platform.node(),
        "os_name": platform.system(),
        "os_release": platform.release(),
        "os_version": platform.version(),
    }


def get_runtime_info() -> dict[str, Any]:
    """Return the interpreter and the command line."""
    version = sys.version_info
    return {
        "python_version": sys.version,
        "python_version_info": {"major": version.major, "minor": version.minor, "micro": version.micro},
        "python_executable": sys.executable,
        "command_line_args": sys.argv,
    }


def get_gpu_info() -> dict[str, Any] | None:
    """Return the GPUs that `nvidia-smi` reports; None without one."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "-q", "-x"],  # noqa: S607 -- found on PATH, as in containers
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
        root = ET.fromstring(found.stdout)  # noqa: S314 -- output of the driver
    except (OSError, subprocess.SubprocessError, ET.ParseError) as error:
        logger.debug("no GPU information: %s", error)
        return None
    driver = root.findtext("driver_version") or "unknown"
    gpus = []
    for gpu in root.findall("gpu"):
        fields = {name: gpu.findtext(path) for name, path in GPU_FIELDS.items()}
        gpus.append({"driver_version": driver, **{name: text for name, text in fields.items() if text is not None}})
    return {"gpus": gpus, "count": len(gpus)} if gpus else None


def get_package_info() -> dict[str, str]:
    """Return the installed distributions with their versions."""
    return {package.name: package.version for package in importlib.metadata.distributions()}
