"""`python -m dynamo.global_planner`."""

from dynamo.core.config import exit_on_config_error
from dynamo.global_planner.main import main

if __name__ == "__main__":
    exit_on_config_error(main)
