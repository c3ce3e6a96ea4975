#!/usr/bin/env python3
"""Check a frontend: `check_router_health.py --base-url URL [--retries N] [--timeout S] [--mode MODE] [MODEL]`; exit status 1 on FAIL."""

import sys

if __name__ == "__main__":
    try:
        from dynamo.core.config import exit_on_config_error
        from dynamo.ops.router_check import main
    except ImportError as error:
        sys.stderr.write(f"error: {error}; run this script with the Python in which dynamo is installed\n")
        sys.exit(2)
    exit_on_config_error(main)
