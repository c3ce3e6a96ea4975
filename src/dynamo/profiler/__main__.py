"""`python -m dynamo.profiler`."""

import sys

from dynamo.profiler.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
