"""Start of a container's command as in the kubelet and a shell: references are expanded, then the command runs."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDER = '#!/bin/sh\nprintf "%s\\0" "$#" "${0##*/}" "$@" >> "$RECORD"\n'
REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(word: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` of known variables; `$$` is a dollar sign, and unknown references remain."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return REFERENCE.sub(value, word)


def programs(
    container: Mapping[str, Any], folder: Path, *, variables: Mapping[str, str], names: tuple[str, ...]
) -> list[list[str]]:
    """Return the programs, of those named, that a container starts, each with its arguments."""
    record = folder / "record"
    record.unlink(missing_ok=True)
    for name in names:
        path = folder / name
        if not path.exists():
            path.write_text(RECORDER)
            path.chmod(0o755)
    own = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    environment = {**own, **variables}
    words = [expand(word, environment) for word in [*container.get("command", []), *container.get("args", [])]]
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(words, env={**environment, "PATH": path, "RECORD": str(record)}, check=True, timeout=20)
    fields = iter(record.read_text().split("\0")[:-1] if record.exists() else [])
    return [[next(fields) for _ in range(int(count) + 1)] for count in fields]
