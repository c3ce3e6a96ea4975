"""Media that a frontend decoded, read by NIXL into an array."""

from typing import Any
from uuid import uuid4

import numpy as np

MEMORY = {"Dram": "cpu", "Vram": "cuda"}
"""Memory types of NIXL's descriptors, and their devices in `dynamo.nixl_connect`."""


def create_nixl_connector() -> Any:
    """Return a connector. Imported here: it requires pydantic and NIXL, which most workers do not use."""
    from dynamo.nixl_connect import Connector

    return Connector()


async def read_decoded_media_via_nixl(
    connector: Any, decoded_meta: dict[str, Any], return_metadata: bool = False
) -> Any:
    """Return the array that a frontend describes, with `return_metadata` as a tuple with the metadata of the media.

    `decoded_meta` has the frontend's agent (`nixl_metadata`), the region (`nixl_descriptor`: addr, size, mem_type,
    device_id), `shape`, `dtype` in NumPy's name in capitals, and `metadata`.
    """
    from dynamo.nixl_connect import Descriptor, OperationKind, RdmaMetadata, SerializedDescriptor

    array = np.empty(decoded_meta["shape"], decoded_meta["dtype"].lower())
    region = decoded_meta["nixl_descriptor"]
    if region["size"] != array.nbytes:
        raise ValueError(f"region of {region['size']} bytes: expected {array.nbytes} for the shape {array.shape}")
    kind = MEMORY[region["mem_type"]]
    device = kind if kind == "cpu" else f"{kind}:{region['device_id']}"
    remote = RdmaMetadata(
        descriptors=[SerializedDescriptor(device=device, ptr=region["addr"], size=region["size"])],
        nixl_metadata=decoded_meta["nixl_metadata"],
        notification_key=str(uuid4()),
        operation_kind=int(OperationKind.READ),
    )
    with await connector.begin_read(remote, Descriptor((array, "cpu"))) as reading:
        await reading.wait_for_completion()
    return (array, decoded_meta.get("metadata")) if return_metadata else array
