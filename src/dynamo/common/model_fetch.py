"""Download of models, in a subprocess where the process is captured by a snapshot."""

import asyncio
import json
import logging
import sys

from dynamo import llm
from dynamo.common.snapshot.lifecycle import is_snapshot_enabled

logger = logging.getLogger(__name__)

NGC_URI_PREFIX = "ngc://"
PROGRAM = """
import asyncio, json, sys
from dynamo.llm import fetch_model
name, ignore_weights = json.loads(sys.argv[1])
path = asyncio.run(fetch_model(name, ignore_weights))
print(json.dumps({"path": str(path)}))
"""
ERROR_CHARS = 2000


def needs_local_model_path(model: str) -> bool:
    """Return whether an engine cannot download a model itself."""
    return model.startswith(NGC_URI_PREFIX)


async def fetch_model_in_subprocess(remote_name: str, ignore_weights: bool = False) -> str:
    """Download a model in another process, so that none of its connections is captured. Raise `RuntimeError`."""
    arguments = json.dumps([remote_name, ignore_weights])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        cause = errors.decode(errors="replace")[-ERROR_CHARS:].strip()
        raise RuntimeError(f"cannot fetch model {remote_name!r}: exit code {process.returncode}: {cause}")
    path: str = json.loads(out.splitlines()[-1])["path"]
    return path


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Download a model and return its directory."""
    if is_snapshot_enabled():
        return await fetch_model_in_subprocess(remote_name, ignore_weights)
    return str(await llm.fetch_model(remote_name, ignore_weights))
