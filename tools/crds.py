"""Write the CustomResourceDefinitions of deploy/crds from the API types; with `--check` report whether they are current."""

import sys
from pathlib import Path

import yaml
from tools.pages import ROOT, write

from dynamo.protocols.kubernetes.crds import manifests

FOLDER = ROOT / "deploy" / "crds"
HEAD = "# Written by tools/crds.py from src/dynamo/protocols/kubernetes; `make references` updates it.\n"


class PlainDumper(yaml.SafeDumper):
    """YAML without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Write every repeated value in full: kubectl refuses none, but people do not follow anchors."""
        return True


def contents() -> dict[Path, str]:
    """Return the content of every file."""
    return {
        FOLDER / name: HEAD + yaml.dump(crd, Dumper=PlainDumper, sort_keys=False, width=120)
        for name, crd in manifests()
    }


def main() -> int:
    """Write the files; return 1 with `--check` if one is out of date."""
    return max(write(path, content) for path, content in contents().items())


if __name__ == "__main__":
    sys.exit(main())
