"""`python -m dynamo.epp`."""

from dynamo.core.config import exit_on_config_error
from dynamo.epp.main import main

if __name__ == "__main__":
    exit_on_config_error(main)
