"""ArgGroup: the interface of a group of command-line flags."""

import argparse
from abc import ABC, abstractmethod


class ArgGroup(ABC):
    """Flags of one subject, which a component adds to its parser."""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`, without any other effect."""
