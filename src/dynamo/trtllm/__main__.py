"""`python -m dynamo.trtllm`: a TensorRT-LLM worker."""

import sys
from collections.abc import Sequence

from dynamo.backend.process import run_worker
from dynamo.core.config import exit_on_config_error
from dynamo.trtllm.config import read_command_line
from dynamo.trtllm.engine import TrtllmEngine
from dynamo.trtllm.library import check_installed, load_library


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal and return the exit status."""
    config, patches = read_command_line(sys.argv[1:] if argv is None else argv)
    check_installed()
    library = load_library()
    return run_worker(config, lambda: TrtllmEngine(config, patches, library))


if __name__ == "__main__":
    exit_on_config_error(main)
