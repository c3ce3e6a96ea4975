"""Command of the sample engine for tokens: `python -m dynamo.common.backend.sample_main --model-name DIRECTORY`."""

from dynamo.common.backend.run import run
from dynamo.common.backend.sample_engine import SampleLLMEngine


def main() -> None:
    """Serve the sample engine until a signal."""
    run(SampleLLMEngine)


if __name__ == "__main__":
    main()
