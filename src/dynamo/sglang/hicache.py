"""HicacheLayout: page names of SGLang's shared store, published for the routers (`kv_router.hicache` reads it)."""

import json
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.kv_router.hicache import HicacheLayout


def layout_of(args: Any, *, is_mla: bool, is_eagle: bool, events_endpoint: str | None) -> dict[str, Any] | None:
    """Return the layout for the card; None without a Mooncake store. Raise `ConfigError`.

    `args` are SGLang's `ServerArgs`.
    """
    if args.hicache_storage_backend != "mooncake":
        return None
    extra = _extra(args.hicache_storage_backend_extra_config)
    lcm = extra.get("tp_lcm_size")
    lcm = lcm if isinstance(lcm, int) and not isinstance(lcm, bool) else None
    tag = extra.get("extra_backend_tag")
    name = args.served_model_name
    parts = [*([] if tag is None else [str(tag)]), *([name.replace("/", "-")] if name else [])]
    layout = HicacheLayout(
        page_size=args.page_size or 1,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        is_mla_model=is_mla,
        is_eagle=is_eagle,
        tp_lcm_size=lcm,
        should_split_heads=bool(
            not is_mla
            and args.hicache_mem_layout == "page_head"
            and lcm is not None
            and lcm > args.tp_size
            and lcm % args.tp_size == 0
        ),
        extra_backend_tag=tag if isinstance(tag, str) and tag else None,
        key_prefix="_".join(parts) or None,
        kv_events_endpoint=events_endpoint,
    )
    found: dict[str, Any] = msgspec.to_builtins(layout)
    return found


def _extra(text: str | None) -> dict[str, Any]:
    """Return the store's own settings. A file name is ignored; the engine reads the file."""
    if not text or text.startswith("@"):
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--hicache-storage-backend-extra-config: not JSON: {error}") from None
    return found if isinstance(found, dict) else {}
