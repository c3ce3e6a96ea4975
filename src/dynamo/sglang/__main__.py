"""`python -m dynamo.sglang`: an SGLang worker."""

import sys
from collections.abc import Sequence

from dynamo.backend.process import run_worker
from dynamo.core.config import exit_on_config_error
from dynamo.sglang.config import engine_arguments, read_command_line
from dynamo.sglang.engine import SglangEngine
from dynamo.sglang.library import check_installed, load_library


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal and return the exit status."""
    config, rest = read_command_line(sys.argv[1:] if argv is None else argv)
    check_installed()
    library = load_library()
    args = library.read_server_args(engine_arguments(config, rest))
    if args.node_rank > 0:
        library.Engine(server_args=args)  # Computes for the first node, and returns when that has ended.
        return 0
    return run_worker(config, lambda: SglangEngine(config, args, library))


if __name__ == "__main__":
    exit_on_config_error(main)
