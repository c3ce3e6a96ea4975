"""Checks of a node's interconnect from the outputs of its tools. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynamo.ops.interconnect.recipe_env import FALLBACK, ucx_rows
from dynamo.ops.redaction import redacted_value
from dynamo.ops.report import CheckRow, CheckStatus, failed, passed, skipped, warned

NODE_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "ibstat": ("ibstat",),
    "ports": (
        "sh",
        "-c",
        "grep -H . /sys/class/infiniband/*/ports/*/state /sys/class/infiniband/*/ports/*/rate 2>/dev/null",
    ),
    "peermem": ("sh", "-c", "cat /proc/modules"),
    "gdrcopy": ("sh", "-c", "ls /dev/gdrdrv"),
    "topology": ("nvidia-smi", "topo", "-m"),
    "efa": ("fi_info", "-p", "efa"),
    "memlock": ("sh", "-c", "ulimit -l"),
    "ucx": ("ucx_info", "-d"),
    "environment": ("env",),
}
"""Commands of the node checks; all of them only read."""
NIXL_IMPORT = """
import importlib.metadata, json
found = {}
try:
    import nixl
    from nixl._api import nixl_agent, nixl_agent_config
    found["version"] = next((importlib.metadata.version(n) for n in ("nixl", "nixl-cu12", "nixl-cu13") if n in
        {d.metadata["Name"] for d in importlib.metadata.distributions()}), "?")
    agent = nixl_agent("check", nixl_agent_config(backends=[]))
    found["plugins"] = list(agent.get_plugin_list())
    agent.create_backend("UCX")
    found["backends"] = ["UCX"]
except Exception as error:  # The boundary of the probe: whatever nixl raises is its finding.
    found["error"] = type(error).__name__ + ": " + " ".join(str(error).split())
print(json.dumps(found))
"""
"""Program that imports NIXL, lists its plugins and makes a UCX backend."""
SHOWN = re.compile(r"(UCX|NCCL|NIXL|FI|EFA)_\w+")
SLOW_GB_S = 1.0
"""Rate below which a transfer within one node is not served by shared memory, NVLink or RDMA."""
UNLIMITED_KIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """Output of one command; `status` 127 means that the tool is not installed."""

    status: int
    text: str


MISSING = ToolOutput(status=127, text="")


def node_rows(outputs: Mapping[str, ToolOutput]) -> list[CheckRow]:
    """Return the rows of a node's network, GPUs and limits."""
    return [
        _link_row(outputs),
        _module_row(outputs.get("peermem", MISSING)),
        _gdrcopy_row(outputs.get("gdrcopy", MISSING)),
        _topology_row(outputs.get("topology", MISSING)),
        _efa_row(outputs.get("efa", MISSING)),
        _memlock_row(outputs),
        *_environment_rows(outputs.get("environment", MISSING)),
        _expected_row(outputs),
    ]


def active_links(outputs: Mapping[str, ToolOutput]) -> tuple[int, int]:
    """Return the number of active links and of all links."""
    text = outputs.get("ibstat", MISSING).text
    states = re.findall(r"^\s*State:\s*(\w+)", text, re.MULTILINE)
    if not states:
        states = re.findall(r"/state:\d+:\s*(\w+)", outputs.get("ports", MISSING).text)
    return sum(one.upper() == "ACTIVE" for one in states), len(states)


def _link_row(outputs: Mapping[str, ToolOutput]) -> CheckRow:
    active, total = active_links(outputs)
    if not total:
        return skipped("links", "no InfiniBand or RoCE device")
    rates = re.findall(
        r"Rate:\s*(\d+)|/rate:(\d+)", outputs.get("ibstat", MISSING).text + outputs.get("ports", MISSING).text
    )
    numbers = {int(one or other) for one, other in rates}
    speed = f", {max(numbers)} Gb/s" if numbers else ""
    if not active:
        return failed("links", f"none of {total} links is active", "check cables and the subnet manager")
    if active < total:
        return warned(
            "links",
            f"{active} of {total} links are active{speed}",
            "check the others, or leave them out of UCX_NET_DEVICES",
        )
    return passed("links", f"{active} links are active{speed}")


def _has_gpus(output: ToolOutput) -> int:
    return len(re.findall(r"^GPU\d+", output.text, re.MULTILINE))


def _module_row(output: ToolOutput) -> CheckRow:
    if output.status == MISSING.status or not output.text:
        return skipped("peermem", "the list of modules cannot be read")
    if re.search(r"^nvidia\s", output.text, re.MULTILINE) is None:
        return skipped("peermem", "no NVIDIA driver is loaded")
    if re.search(r"^nvidia_peermem\s", output.text, re.MULTILINE):
        return passed("peermem", "nvidia_peermem is loaded")
    return warned(
        "peermem", "nvidia_peermem is not loaded", "run on the host: modprobe nvidia-peermem; not needed with DMA-BUF"
    )


def _gdrcopy_row(output: ToolOutput) -> CheckRow:
    if output.status == 0 and "gdrdrv" in output.text:
        return passed("gdrcopy", "/dev/gdrdrv is there")
    return skipped("gdrcopy", "no /dev/gdrdrv; small transfers take longer without GDRCopy")


def _topology_row(output: ToolOutput) -> CheckRow:
    gpus = _has_gpus(output)
    if output.status != 0 or not gpus:
        return skipped("nvlink", "nvidia-smi shows no GPUs")
    if gpus == 1:
        return passed("nvlink", "one GPU")
    if re.search(r"\bNV\d+\b", output.text):
        return passed("nvlink", f"NVLink between {gpus} GPUs")
    return warned(
        "nvlink", f"{gpus} GPUs without NVLink", "expect PCIe rates between them; check nvidia-smi nvlink --status"
    )


def _efa_row(output: ToolOutput) -> CheckRow:
    if output.status == 0 and "provider: efa" in output.text:
        return passed("efa", "the EFA provider is available; NIXL uses its LIBFABRIC backend")
    return skipped("efa", "no EFA provider")


def _memlock_row(outputs: Mapping[str, ToolOutput]) -> CheckRow:
    limit = outputs.get("memlock", MISSING).text.strip()
    if not limit or not active_links(outputs)[1]:
        return skipped("memlock", f"{limit} KiB; no device registers memory" if limit else "the limit cannot be read")
    if limit == "unlimited" or (limit.isdigit() and int(limit) >= UNLIMITED_KIB):
        return passed("memlock", f"{limit} KiB may be locked" if limit.isdigit() else "unlimited")
    return warned(
        "memlock", f"{limit} KiB may be locked", "add IPC_LOCK, or raise ulimit -l: RDMA registers locked memory"
    )


def variables_of(output: ToolOutput) -> dict[str, str]:
    """Return the variables of the transfer libraries, without secrets."""
    pairs = (line.partition("=") for line in output.text.splitlines())
    return {name: redacted_value(name, value) for name, _, value in pairs if SHOWN.fullmatch(name)}


def _environment_rows(output: ToolOutput) -> Iterator[CheckRow]:
    found = variables_of(output)
    if found:
        yield passed("variables", ", ".join(f"{name}={value}" for name, value in sorted(found.items())))
    else:
        yield skipped("variables", "no UCX, NCCL or NIXL variable is set")
    yield from ucx_rows("variables", found)
    if found.get("NCCL_IB_DISABLE") == "1":
        yield failed("variables", "NCCL_IB_DISABLE=1: collectives use TCP", "remove it, or set it to 0")


def _expected_row(outputs: Mapping[str, ToolOutput]) -> CheckRow:
    """Compare the transports that the hardware provides with those that UCX offers."""
    ucx = outputs.get("ucx", MISSING)
    if ucx.status != 0:
        return skipped("transports", "ucx_info is not installed")
    seen = set(re.findall(r"Transport:\s*(\S+)", ucx.text))
    active, _ = active_links(outputs)
    rdma = {one for one in seen if one.split("_")[0] in {"rc", "dc", "ud", "srd"}}
    if active and not rdma:
        return failed(
            "transports",
            f"links are active, UCX offers {', '.join(sorted(seen)) or 'nothing'}: {FALLBACK}",
            "install UCX with verbs",
        )
    return passed("transports", f"expected {'RDMA' if active else 'no RDMA'}, UCX offers {', '.join(sorted(seen))}")


def nixl_rows(outputs: Mapping[str, ToolOutput]) -> list[CheckRow]:
    """Return the rows of NIXL: import and plugins, a transfer between two processes, and log lines."""
    rows = []
    found = _json(outputs.get("nixl"))
    if not found:
        return [skipped("nixl", "no Python with NIXL's check"), *_log_rows(outputs)]
    if "error" in found:
        text = str(found["error"])
        if "ModuleNotFoundError" in text:
            return [skipped("nixl", f"not installed: {text}"), *_log_rows(outputs)]
        return [failed("nixl", text, "check the NIXL release and its plugins (NIXL_PLUGIN_DIR)"), *_log_rows(outputs)]
    plugins = found.get("plugins")
    names = ", ".join(str(one) for one in plugins) if isinstance(plugins, list) else "none"
    rows.append(passed("nixl", f"{found.get('version')}; plugins: {names}"))
    rows.append(_transfer_row(outputs.get("transfer", MISSING)))
    return [*rows, *_log_rows(outputs)]


def _transfer_row(output: ToolOutput) -> CheckRow:
    found = _json(output)
    if not found and output.status in {0, MISSING.status}:
        return skipped("transfer", "not measured")
    if not found:
        lines = output.text.strip().splitlines() or ["no output"]
        return failed("transfer", lines[-1], "check UCX_TLS, UCX_NET_DEVICES and the locked-memory limit")
    rate = float(str(found["gb_per_s"]))
    size = int(str(found["bytes"])) >> 20
    text = f"{rate:.2f} GB/s: {found['rounds']} reads of {size} MiB between two processes, {found['backend']}"
    if rate < SLOW_GB_S:
        return warned("transfer", text, f"expected more than {SLOW_GB_S:g} GB/s within a node; {FALLBACK}")
    return passed("transfer", text)


def _log_rows(outputs: Mapping[str, ToolOutput]) -> Iterator[CheckRow]:
    text = outputs.get("logs", MISSING).text
    if "NET/Socket" in text and "NET/IB" not in text:
        yield warned("nccl", "the log shows NET/Socket: collectives use TCP", "check NCCL_IB_HCA and NCCL_IB_DISABLE")
    elif "NET/IB" in text:
        yield passed("nccl", "the log shows NET/IB")
    if re.search(r"Backend UCX was instantiated|Initialized NIXL agent", text):
        yield passed("nixl log", "the engine made a NIXL agent")


def _json(output: ToolOutput | None) -> dict[str, object]:
    lines = [] if output is None else [line for line in output.text.splitlines() if line.startswith("{")]
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


WORDS = {CheckStatus.PASS: "ok", CheckStatus.WARN: "warn", CheckStatus.FAIL: "fail", CheckStatus.SKIP: "skipped"}
"""Words of `check_interconnect.py`."""


def script_values(rows: Sequence[CheckRow]) -> list[dict[str, str]]:
    """Return the rows as the script prints them: check, result and one line of detail."""
    return [
        {
            "check": row.check,
            "result": WORDS[row.status],
            "detail": row.evidence + (f"; {row.remedy}" if row.remedy else ""),
        }
        for row in rows
    ]
