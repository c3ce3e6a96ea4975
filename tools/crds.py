"""Write deploy/crds from the API types and deploy/operator/rbac.yaml from the operator's rights; `--check` compares them."""

import sys
from pathlib import Path
from typing import Any

import yaml
from tools.pages import ROOT, write

from dynamo.operator import rbac
from dynamo.protocols.kubernetes.crds import manifests

RIGHTS = ROOT / "deploy" / "operator" / "rbac.yaml"
FOLDER = ROOT / "deploy" / "crds"
HEAD = "# Written by tools/crds.py from src/dynamo/protocols/kubernetes; `make references` updates it.\n"
RIGHTS_HEAD = "# Written by tools/crds.py from src/dynamo/operator/rbac.py; `make references` updates it.\n"


class PlainDumper(yaml.SafeDumper):
    """YAML without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Write every repeated value in full: kubectl refuses none, but people do not follow anchors."""
        return True


def contents() -> dict[Path, str]:
    """Return the content of every file."""
    options: dict[str, Any] = {"Dumper": PlainDumper, "sort_keys": False, "width": 120}
    return {
        **{FOLDER / name: HEAD + yaml.dump(crd, **options) for name, crd in manifests()},
        RIGHTS: RIGHTS_HEAD + yaml.dump_all(rbac.manifest(), **options),
    }


def main() -> int:
    """Write the files; return 1 with `--check` if one is out of date."""
    return max(write(path, content) for path, content in contents().items())


if __name__ == "__main__":
    sys.exit(main())
