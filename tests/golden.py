"""Golden files: expected objects as YAML. `UPDATE_GOLDEN=1 make test ARGS=FILE` writes them; review the difference."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class GoldenDumper(yaml.SafeDumper):
    """YAML without references, and with scripts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


GoldenDumper.add_representer(str, _text)


def check_golden(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Compare objects with a golden file."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.dump(value, Dumper=GoldenDumper, sort_keys=False, width=120, allow_unicode=True))
    assert yaml.safe_load(path.read_text()) == value
