"""`python -m dynamo.profiler`."""

import signal
import sys

from dynamo.core.config import exit_on_config_error
from dynamo.profiler.main import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # The end of its pod ends the candidates, as Ctrl-C does.
    exit_on_config_error(lambda: main(sys.argv[1:]))
