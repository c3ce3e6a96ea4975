#!/usr/bin/env python3
"""List copies in hot paths: `clone_inventory.py [--paths P …] [--limit N] [--format F] [--only-actionable] [--include-tests]`."""

import sys

if __name__ == "__main__":
    try:
        from dynamo.core.config import exit_on_config_error
        from dynamo.ops.clones.command import main
    except ImportError as error:
        sys.stderr.write(f"error: {error}; run this script with the Python in which dynamo is installed\n")
        sys.exit(2)
    exit_on_config_error(main)
