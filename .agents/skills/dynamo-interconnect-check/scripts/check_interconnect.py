#!/usr/bin/env python3
"""Check the interconnect: `check_interconnect.py env RECIPE | node | nixl [--namespace N --pod P] [--json]`; exit status 1 for a fail."""

import sys

if __name__ == "__main__":
    try:
        from dynamo.core.config import exit_on_config_error
        from dynamo.ops.interconnect.command import main
    except ImportError as error:
        sys.stderr.write(f"error: {error}; run this script with the Python in which dynamo is installed\n")
        sys.exit(2)
    exit_on_config_error(main)
