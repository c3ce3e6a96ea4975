"""Assets: the small files a card refers to, shown by the worker's own system server (serving-plane.md §2.4).

A worker that has a system server publishes URLs in place of paths, so that frontends need not share its file system.
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
"""How a model's images are cut up. Cards do not refer to it: it lies beside the model's config.json, wherever that is."""
MODEL_SUFFIX = "_base"  # Upstream's word for the model itself, where a LoRA adapter would have its name.

GROUPS = ("model_info", "tokenizer", "prompt_formatter", "gen_config")
"""The fields of a card that refer to files by format."""

ShowFile = Callable[[str, str], str | None]
"""Shows a file at a path and returns its URL; None where nothing is shown."""


def references(card: ModelDeploymentCard) -> Iterator[tuple[str, FileReference]]:
    """Every file of a card, with the name of its format."""
    for group in GROUPS:
        yield from (getattr(card, group) or {}).items()
    for name, template in (card.chat_template_file or {}).items():
        yield name, template.file


def is_remote(reference: FileReference) -> bool:
    """Whether the file lies on the worker and must be fetched."""
    return reference.path.startswith(REMOTE)


def has_remote(card: ModelDeploymentCard) -> bool:
    """Whether one of the card's files must be fetched."""
    return any(is_remote(file) for _, file in references(card))


def moved(card: ModelDeploymentCard, path_of: Callable[[str, FileReference], str]) -> ModelDeploymentCard:
    """The same card with its files elsewhere; `path_of` is given each one's format and reference."""

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
    """The card with its local files shown by this process, where that has a system server and is not told otherwise.

    `wanted` is the worker's own word; without one `DYN_SELF_HOST_METADATA` decides, true by default.
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
            word = f"{name}-{word}"  # A template given by flag may be called like a file of the model.
        return show(f"{prefix}/{quote(word)}", file.path) or file.path

    for file in (card.model_info or {}).values():
        beside = os.path.join(os.path.dirname(file.path), PROCESSOR_FILE)
        if not is_remote(file) and os.path.isfile(beside):
            show(f"{prefix}/{PROCESSOR_FILE}", beside)
    return moved(card, url_of)
