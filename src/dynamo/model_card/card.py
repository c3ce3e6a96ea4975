"""ModelCard: builds a model's card from its directory, and finds a model's files from its card.

Reading and hashing the files blocks (a 7 MB tokenizer takes about 10 ms): call it at start-up or in a thread.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from dynamo.core.codec import UNREADABLE
from dynamo.core.config import setting
from dynamo.core.errors import ConfigError
from dynamo.model_card.thinking import DEFAULT_MODE_KEY
from dynamo.protocols.model_card import ChatTemplateFile, FileReference, ModelDeploymentCard, RuntimeConfig

CHECKSUM_PREFIX = "blake3:"

TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")
"""What a tokenizer's file may be called, the best first; any `*.tiktoken` comes after them."""

TOKENIZER_KEYS = ("hf_tokenizer_json", "tik_token_model")
"""Under what a card refers to it: a tokenizer.json, or a tiktoken file."""

CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Under which of these a config.json states its context length depends on the architecture."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's small files lie on this machine; None where the model has no such file."""

    config: str
    tokenizer: str
    tokenizer_config: str | None = None
    generation_config: str | None = None
    chat_template: str | None = None

    @classmethod
    def from_dir(cls, path: str) -> "ModelFiles":
        """The files of a directory in Hugging Face layout. Raises `ConfigError` naming the first that is missing."""
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
        """The files a card refers to. Raises `ConfigError` for one that is not on this machine (`AssetCache`)."""
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
            raise ConfigError(f"model card of {card.display_name}: it refers to no {missing}")
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
    """The card of a model directory. Raises `ConfigError` that names the file that is missing or broken."""
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
    """64 hex digits that are equal for workers that serve the same model in the same way.

    It covers what a frontend needs to agree on: the names, the contents of the files and how a request is prepared;
    not where the files lie nor how large one worker's cache is.
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


def slug_of(name: str) -> str:
    """A model's name as upstream spells it in paths: lower case, anything but letters, digits, - and _ as `_`."""
    return re.sub(r"[^a-z0-9_-]", "_", name.lower()).lstrip("_")


def reference(path: str) -> FileReference:
    """A file's path, checksum and size. Raises `ConfigError` if it cannot be read."""
    from blake3 import blake3

    data = read_bytes(path)
    return FileReference(path=path, checksum=CHECKSUM_PREFIX + blake3(data).hexdigest(), size=len(data))


def architectural_context_length(config: Mapping[str, Any]) -> int | None:
    """The context length a config.json states, None where it states none."""
    for part in (config, config.get("text_config")):
        for key in CONTEXT_LENGTH_KEYS:
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    return None


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file. Raises `ConfigError` with the path."""
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError(f"{path}: not a JSON object ({error})") from None


def read_bytes(path: str) -> bytes:
    """A file's contents. Raises `ConfigError` with the path."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _tokenizer_file(directory: str, config: str) -> str:
    """Where a model's tokenizer lies: in its directory, or for gpt-oss in `TIKTOKEN_ENCODINGS_BASE`."""
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
    raise ConfigError(f"model directory {directory}: tokenizer.json is missing, and there is no tiktoken file")


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
