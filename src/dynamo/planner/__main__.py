"""`python -m dynamo.planner`."""

from dynamo.core.config import exit_on_config_error
from dynamo.planner.process import main

if __name__ == "__main__":
    exit_on_config_error(main)
