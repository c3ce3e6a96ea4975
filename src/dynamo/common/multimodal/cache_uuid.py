"""Cache UUIDs of media, for engines that do not support them."""

import msgspec

from dynamo.core.errors import InvalidArgument


class MediaUuids(msgspec.Struct):
    """Cache UUIDs of a request by kind of media, one for each item; null where an item has none."""

    by_kind: dict[str, list[None]] | None


def reject_unsupported_multimodal_uuids(multi_modal_uuids: object) -> None:
    """Raise `ValueError` if a request names a cache UUID."""
    try:
        msgspec.convert({"by_kind": multi_modal_uuids}, MediaUuids)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"cache UUIDs of media are supported only by the vLLM backend ({error})") from None
