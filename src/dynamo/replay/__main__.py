"""`python -m dynamo.replay TRACE …`: simulate a cluster under a load."""

import sys

from dynamo.core.config import exit_on_config_error
from dynamo.replay.main import main

if __name__ == "__main__":
    exit_on_config_error(lambda: main(sys.argv[1:]))
