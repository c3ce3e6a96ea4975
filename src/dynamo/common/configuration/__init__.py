"""Configuration of components as argparse groups: `ArgGroup` declares flags, `ConfigBase` holds their values."""

from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.config_base import ConfigBase
from dynamo.common.configuration.utils import add_argument, add_negatable_bool_argument, env_or_default

__all__ = ["ArgGroup", "ConfigBase", "add_argument", "add_negatable_bool_argument", "env_or_default"]
