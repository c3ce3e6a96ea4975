"""Assets: the small files that a card refers to, served by the worker's own system server.

A worker with a system server publishes URLs instead of paths, so that frontends need not share its file system.
"""

import os
from collections.abc import Callable, Iterator
from urllib.parse import quote

import msgspec

from dynamo.core.config import read_bool, setting
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.model_card import ChatTemplateFile, FileReference, ModelDeploymentCard

REMOTE = ("http://", "https://")
PROCESSOR_FILE = "preprocessor_config.json"
"""Image preprocessing of a model. Cards do not refer to it: it is in the directory of the model's config.json."""
MODEL_SUFFIX = "_base"  # Upstream's name for the model itself, in place of a LoRA adapter's name.

GROUPS = ("model_info", "tokenizer", "prompt_formatter", "gen_config")
"""Fields of a card that refer to files by format."""

ShowFile = Callable[[str, str], str | None]
"""Serves the file at a path under a URL path and returns its URL; None without a system server."""


def references(card: ModelDeploymentCard) -> Iterator[tuple[str, FileReference]]:
    """Yield every file of a card, with the name of its format."""
    for group in GROUPS:
        yield from (getattr(card, group) or {}).items()
    for name, template in (card.chat_template_file or {}).items():
        yield name, template.file


def is_remote(reference: FileReference) -> bool:
    """Return whether the file is on the worker and must be fetched."""
    return reference.path.startswith(REMOTE)


def has_remote(card: ModelDeploymentCard) -> bool:
    """Return whether one of the card's files must be fetched."""
    return any(is_remote(file) for _, file in references(card))


def moved(card: ModelDeploymentCard, path_of: Callable[[str, FileReference], str]) -> ModelDeploymentCard:
    """Return the card with other file paths; `path_of` receives the format and the reference of each file."""

    def move(name: str, file: FileReference) -> FileReference:
        return msgspec.structs.replace(file, path=path_of(name, file))

    changes: dict[str, object] = {}
    for group in GROUPS:
        files = getattr(card, group)
        if files:
            changes[group] = {name: move(name, file) for name, file in files.items()}
    if card.chat_template_file:
        changes["chat_template_file"] = {
            name: ChatTemplateFile(move(name, one.file), one.is_custom) for name, one in card.chat_template_file.items()
        }
    return msgspec.structs.replace(card, **changes)


def self_hosted(
    card: ModelDeploymentCard, endpoint: EndpointId, show: ShowFile, wanted: bool | None = None
) -> ModelDeploymentCard:
    """Return the card with URLs of its local files, served by this process if it has a system server.

    `wanted` enables or disables this; None uses `DYN_SELF_HOST_METADATA`, which defaults to true.
    """
    if not (setting("DYN_SELF_HOST_METADATA", True, read_bool) if wanted is None else wanted):
        return card
    prefix = f"/v1/metadata/{endpoint.path}/{card.slug}/{MODEL_SUFFIX}"
    shown: dict[str, str] = {}

    def url_of(name: str, file: FileReference) -> str:
        if is_remote(file):
            return file.path
        word = os.path.basename(file.path)
        if shown.setdefault(word, file.path) != file.path:
            word = f"{name}-{word}"  # A template given by flag may have the same file name as a file of the model.
        return show(f"{prefix}/{quote(word)}", file.path) or file.path

    for file in (card.model_info or {}).values():
        processor = os.path.join(os.path.dirname(file.path), PROCESSOR_FILE)
        if not is_remote(file) and os.path.isfile(processor):
            show(f"{prefix}/{PROCESSOR_FILE}", processor)
    return moved(card, url_of)
