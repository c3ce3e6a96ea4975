"""`python -m dynamo.vllm`: a vLLM worker."""

import sys
from collections.abc import Sequence

from dynamo.backend.engine import LLMEngine
from dynamo.backend.process import run_worker
from dynamo.core.config import exit_on_config_error
from dynamo.vllm.config import read_command_line, read_engine_args
from dynamo.vllm.embedding_engine import VllmEmbeddingEngine
from dynamo.vllm.engine import VllmEngine
from dynamo.vllm.library import check_installed, load_library


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal and return the exit status."""
    check_installed()
    config, rest = read_command_line(sys.argv[1:] if argv is None else argv)
    library = load_library()
    args = read_engine_args(library, rest)
    if config.headless:
        library.run_headless(rest)
        return 0

    def make() -> LLMEngine:
        if config.embedding_worker:
            return VllmEmbeddingEngine(config, args, library)
        return VllmEngine(config, args, library)

    return run_worker(config, make)


if __name__ == "__main__":
    exit_on_config_error(main)
