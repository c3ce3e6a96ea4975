"""ConfigBase: a configuration whose attributes are the parsed arguments and the defaults of its annotations."""

import argparse
import inspect
from typing import Self


class ConfigBase:
    """Configuration with annotated attributes, of which those with a value have it as the default."""

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return an instance with all attributes of `args`, and the default of each attribute that it lacks."""
        config = cls.__new__(cls)
        for base in reversed(cls.__mro__):  # A subclass's default replaces that of its base.
            for name in inspect.get_annotations(base):
                if not name.startswith("_") and name in vars(base):
                    setattr(config, name, vars(base)[name])
        for name, value in vars(args).items():
            setattr(config, name, value)
        return config

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({values})"
