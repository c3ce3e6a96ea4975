"""Hub: resolves a path or a name on the Hugging Face hub to a model's directory."""

import os
from collections.abc import Sequence

from dynamo.core.errors import ConfigError

HUB_NAME_PARTS_MAX = 2  # `owner/name`, or a bare `name`.


WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf", "*.msgpack", "*.h5", "*.onnx", "original/*")
TWICE = ("*.bin", "*.pth", "*.gguf", "original/*")
"""Formats of weights that repositories contain in addition to safetensors."""


def resolve_model(name_or_dir: str, *, weights: bool = True) -> str:
    """Return an existing directory unchanged; otherwise the hub's snapshot of that name, downloaded if it is not cached.

    Without `weights` only the small files are fetched. Blocks during the download. Raise `ConfigError` with a message of
    one line if there is neither directory nor snapshot.
    """
    path = os.path.expanduser(name_or_dir)
    if os.path.isdir(path):
        return os.path.abspath(path)
    if os.path.exists(path):
        raise ConfigError(f"model {name_or_dir}: is a file; give its directory")
    if path.startswith((".", os.sep)) or path.count("/") >= HUB_NAME_PARTS_MAX:
        raise ConfigError(f"model {name_or_dir}: no such directory")
    return _download(name_or_dir, TWICE if weights else WEIGHTS)


def _download(name: str, ignored: Sequence[str]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return str(snapshot_download(name, ignore_patterns=list(ignored)))
    except HFValidationError:
        reason = "no such directory, and not a valid name on the Hugging Face hub"
    except GatedRepoError:
        reason = "the repository is gated: accept its terms on the hub and log in (`hf auth login`)"
    except RepositoryNotFoundError:
        reason = "no such directory, and no such repository on the Hugging Face hub (private ones need `hf auth login`)"
    except LocalEntryNotFoundError:
        reason = "no such directory, not in the local cache, and the Hugging Face hub is unreachable"
    except EntryNotFoundError as error:
        reason = _first_line(error)
    except OSError as error:  # The hub's HTTP errors, a full disk, no network.
        reason = f"failed to download from the Hugging Face hub: {_first_line(error)}"
    raise ConfigError(f"model {name}: {reason}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
