"""ModelCard: builds a model's card from its directory, and locates a model's files by its card.

Reading and hashing the files blocks (a 7 MB tokenizer takes about 10 ms): call it at start-up or in a thread.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct

from dynamo.core.codec import UNREADABLE
from dynamo.core.config import setting
from dynamo.core.errors import ConfigError
from dynamo.protocols.model_card import ChatTemplateFile, FileReference, ModelDeploymentCard, RuntimeConfig

CHECKSUM_PREFIX = "blake3:"

TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")
"""Accepted names of a tokenizer's file in order of preference; any `*.tiktoken` comes after them."""

TOKENIZER_KEYS = ("hf_tokenizer_json", "tik_token_model")
"""Formats of a tokenizer on a card: a tokenizer.json, or a tiktoken file."""

DEFAULT_MODE_KEY = "default_thinking_mode"
"""Key of the worker's default thinking mode in a card's `runtime_data`."""

ENABLED, DISABLED, ADAPTIVE = "enabled", "disabled", "adaptive"
"""Thinking modes: whether a model reasons before it responds."""

CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Keys of the context length in a config.json, which depend on the architecture."""


class ModelFiles(Struct, frozen=True):
    """Paths of a model's small files on this machine; None for a missing file."""

    config: str
    tokenizer: str
    tokenizer_config: str | None = None
    generation_config: str | None = None
    chat_template: str | None = None

    @classmethod
    def from_dir(cls, path: str) -> "ModelFiles":
        """Return the files of a directory in Hugging Face layout. Raise `ConfigError` naming the first missing file."""
        if not os.path.isdir(path):
            raise ConfigError(f"model directory {path}: no such directory")
        config = _optional(path, "config.json")
        if config is None:
            raise ConfigError(f"model directory {path}: config.json is missing")
        return cls(
            config=config,
            tokenizer=_tokenizer_file(path, config),
            tokenizer_config=_optional(path, "tokenizer_config.json"),
            generation_config=_optional(path, "generation_config.json"),
            chat_template=_optional(path, "chat_template.jinja"),
        )

    @classmethod
    def from_card(cls, card: ModelDeploymentCard) -> "ModelFiles":
        """Return the files of a card. Raise `ConfigError` if one is not on this machine (`AssetCache` fetches it)."""
        template = None
        if card.chat_template_file:
            template = next(iter(card.chat_template_file.values())).file.path
        files = cls(
            config=_referred(card.model_info, "hf_config_json", card) or "",
            tokenizer=_referred(card.tokenizer, _tokenizer_key(card), card) or "",
            tokenizer_config=_referred(card.prompt_formatter or None, "hf_tokenizer_config_json", card),
            generation_config=_referred(card.gen_config or None, "hf_generation_config_json", card),
            chat_template=template,
        )
        if not files.config or not files.tokenizer:
            missing = "hf_tokenizer_json" if files.config else "hf_config_json"
            raise ConfigError(f"model card of {card.display_name}: has no {missing}")
        for path in (files.config, files.tokenizer, files.tokenizer_config, files.generation_config, template):
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"model card of {card.display_name}: {path} is not a file on this machine")
        return files


def build_card(
    model_dir: str,
    served_name: str,
    *,
    context_length: int,
    kv_cache_block_size: int,
    runtime_config: RuntimeConfig | None = None,
    model_type: str = "Chat | Completions",
    model_input: Literal["Tokens", "Text", "Tensor"] = "Tokens",
    worker_type: str = "aggregated",
    needs: Sequence[Sequence[str]] = (),
    migration_limit: int = 0,
    custom_template: str | None = None,
    user_data: Any = UNSET,
    router_config: dict[str, Any] | None = None,
    model_aliases: Sequence[str] = (),
) -> ModelDeploymentCard:
    """Return the card of a model directory. Raise `ConfigError` that names a missing or malformed file."""
    files = ModelFiles.from_dir(model_dir)
    template = custom_template or files.chat_template
    return ModelDeploymentCard(
        display_name=served_name,
        slug=slug_of(served_name),
        source_path=UNSET if served_name == model_dir else model_dir,
        model_info={"hf_config_json": reference(files.config)},
        tokenizer={TOKENIZER_KEYS[not files.tokenizer.endswith(".json")]: reference(files.tokenizer)},
        prompt_formatter=_keyed("hf_tokenizer_config_json", files.tokenizer_config),
        chat_template_file=UNSET
        if template is None
        else {"hf_chat_template": ChatTemplateFile(reference(template), is_custom=custom_template is not None)},
        gen_config=_keyed("hf_generation_config_json", files.generation_config),
        architectural_max_context_length=architectural_context_length(read_json(files.config)) or UNSET,
        context_length=context_length,
        kv_cache_block_size=kv_cache_block_size,
        migration_limit=migration_limit,
        model_type=model_type,
        model_input=model_input,
        worker_type=worker_type,
        needs=[list(group) for group in needs],
        user_data=user_data,
        router_config=UNSET if router_config is None else router_config,
        model_aliases=list(model_aliases) or UNSET,
        runtime_config=runtime_config or RuntimeConfig(context_length=context_length),
    )


def mdc_sum(card: ModelDeploymentCard) -> str:
    """Return 64 hex digits that are equal for workers that serve the same model in the same way.

    The sum covers the names, the contents of the files and the preparation of requests, but neither the paths of the
    files nor the size of a worker's cache.
    """
    from blake3 import blake3

    assets: list[tuple[str, str]] = []
    for group in (card.model_info, card.tokenizer, card.prompt_formatter, card.gen_config):
        assets += [(name, file.checksum) for name, file in (group or {}).items()]
    for name, template in (card.chat_template_file or {}).items():
        assets.append((name, template.file.checksum))
    subject = [
        card.display_name,
        sorted(assets),
        card.context_length,
        card.kv_cache_block_size,
        card.model_type,
        card.model_input,
        card.lora or None,
        card.runtime_config.tool_call_parser,
        card.runtime_config.reasoning_parser,
        card.runtime_config.exclude_tools_when_tool_choice_none,
    ]
    mode = card.runtime_config.runtime_data.get(DEFAULT_MODE_KEY)
    if mode is not None:
        subject.append(mode)
    return blake3(msgspec.json.encode(subject, order="sorted")).hexdigest()


def lora_name_to_id(lora_name: str) -> int:
    """Return the number that identifies an adapter in engines, the same on every worker (31 bits)."""
    from blake3 import blake3

    return int.from_bytes(blake3(lora_name.encode()).digest()[:8], "big") & 0x7FFFFFFF


def slug_of(name: str) -> str:
    """Return a model's name as in upstream's paths: lower case, anything but letters, digits, - and _ as `_`."""
    return re.sub(r"[^a-z0-9_-]", "_", name.lower()).lstrip("_")


def reference(path: str) -> FileReference:
    """Return a file's path, checksum and size. Raise `ConfigError` if it cannot be read."""
    from blake3 import blake3

    data = read_bytes(path)
    return FileReference(path=path, checksum=CHECKSUM_PREFIX + blake3(data).hexdigest(), size=len(data))


def architectural_context_length(config: Mapping[str, Any]) -> int | None:
    """Return the context length in a config.json, None if it has none."""
    for part in (config, config.get("text_config")):
        for key in CONTEXT_LENGTH_KEYS:
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    return None


def read_json(path: str) -> dict[str, Any]:
    """Return a JSON object from a file. Raise `ConfigError` with the path."""
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError(f"{path}: not a JSON object ({error})") from None


def read_bytes(path: str) -> bytes:
    """Return a file's contents. Raise `ConfigError` with the path."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _tokenizer_file(directory: str, config: str) -> str:
    """Return the tokenizer's path: in the model directory, or for gpt-oss in `TIKTOKEN_ENCODINGS_BASE`."""
    others = sorted(name for name in os.listdir(directory) if name.endswith(".tiktoken"))
    for name in (*TOKENIZER_FILES, *others):
        if (path := _optional(directory, name)) is not None:
            return path
    encodings = setting("TIKTOKEN_ENCODINGS_BASE", "", str)
    if encodings and read_json(config).get("model_type") == "gpt_oss":
        path = _optional(encodings, "o200k_base.tiktoken")
        if path is None:
            raise ConfigError(f"TIKTOKEN_ENCODINGS_BASE={encodings!r}: o200k_base.tiktoken is missing")
        return path
    raise ConfigError(f"model directory {directory}: tokenizer.json is missing, and so is a tiktoken file")


def _tokenizer_key(card: ModelDeploymentCard) -> str:
    return next((key for key in TOKENIZER_KEYS if key in (card.tokenizer or {})), TOKENIZER_KEYS[0])


def _optional(directory: str, name: str) -> str | None:
    path = os.path.join(directory, name)
    return path if os.path.isfile(path) else None


def _keyed(name: str, path: str | None) -> Any:
    return UNSET if path is None else {name: reference(path)}


def _referred(assets: Mapping[str, FileReference] | None, name: str, card: ModelDeploymentCard) -> str | None:
    file = (assets or {}).get(name)
    if file is None:
        if assets:
            raise ConfigError(f"model card of {card.display_name}: {next(iter(assets))} is not supported, only {name}")
        return None
    return file.path
