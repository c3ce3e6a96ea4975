"""The flag by which a frontend decodes images and videos for its workers."""

from typing import Any

from dynamo.common.configuration.utils import add_negatable_bool_argument


def add_frontend_decoding_arg(g: Any, *, env_prefix: str) -> None:
    """Add `--frontend-decoding`, whose variable is `DYN_<env_prefix>_FRONTEND_DECODING`."""
    add_negatable_bool_argument(
        g,
        flag_name="--frontend-decoding",
        env_var=f"DYN_{env_prefix}_FRONTEND_DECODING",
        default=False,
        help="Decode images and videos in the frontend and transfer them to the worker by NIXL",
    )
