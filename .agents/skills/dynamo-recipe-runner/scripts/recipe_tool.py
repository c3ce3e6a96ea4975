#!/usr/bin/env python3
"""List and validate recipes: `recipe_tool.py list [--query Q] [--framework F] [--mode M] [--format table|json]`, `validate TARGET`.

The output of `validate` is JSON; the exit status is 1 for a blocker. The code is that of `dynamo recipe`.
"""

import sys

USAGE = "usage: recipe_tool.py list [--query Q] [--framework F] [--mode M] [--format table|json] | validate TARGET"


def main(argv: list[str]) -> int:
    """Run one of the two commands; return the exit status."""
    if not argv or argv[0] not in {"list", "validate"}:
        sys.stderr.write(f"{USAGE}\n")
        return 2
    try:
        from dynamo.cli.recipe import recipe
        from dynamo.core.errors import ConfigError
    except ImportError as error:
        sys.stderr.write(f"error: {error}; run this script with the Python in which dynamo is installed\n")
        return 2
    try:
        return recipe([*argv, "--json"] if argv[0] == "validate" else argv)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
