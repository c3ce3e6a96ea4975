"""Command of the sample engine for images: `python -m dynamo.common.backend.sample_diffusion_main`."""

from dynamo.common.backend.run import run
from dynamo.common.backend.sample_diffusion_engine import SampleDiffusionEngine


def main() -> None:
    """Serve the sample engine until a signal."""
    run(SampleDiffusionEngine)


if __name__ == "__main__":
    main()
