"""`python -m dynamo.operator`."""

from dynamo.core.config import exit_on_config_error
from dynamo.operator.process import main

if __name__ == "__main__":
    exit_on_config_error(main)
