"""Allocator of receive buffers within one tensor."""

from collections import OrderedDict
from typing import Any

from dynamo.common.multimodal.embedding_base import MonolithicCounter


class RingBuffer:
    """Allocator of contiguous regions of one tensor, freed in the order of their allocation."""

    BufferId = int

    def __init__(self, buffer_size: int) -> None:
        import torch  # Imported here: workers without embeddings have no PyTorch.

        self.buffer_tensor = torch.zeros(buffer_size, dtype=torch.int8)
        self._size = buffer_size
        self._counter = MonolithicCounter()
        self._live: OrderedDict[int, tuple[int, int]] = OrderedDict()  # Begin and end, oldest first.
        self._released: set[int] = set()

    def __repr__(self) -> str:
        return f"RingBuffer(size={self._size}, buffers={list(self._live.values())}, released={len(self._released)})"

    def get_buffer(self, size: int) -> tuple[int | None, Any | None]:
        """Return the id and the region, of type int8; None for both if no region is free."""
        if size < 1:
            raise ValueError(f"size {size}: must be 1 or more bytes")
        begin = self._free_offset(size)
        if begin is None:
            return None, None
        buffer_id = self._counter.get_next_id()
        self._live[buffer_id] = (begin, begin + size)
        return buffer_id, self.buffer_tensor[begin : begin + size]

    def release_buffer(self, buffer_id: int) -> None:
        """Release a region. It is free once all older ones are released."""
        if buffer_id in self._live:
            self._released.add(buffer_id)
            self._flush_freed_list()

    def _free_offset(self, size: int) -> int | None:
        """Return where a region of this size may begin."""
        if not self._live:
            return 0 if size <= self._size else None
        oldest = next(iter(self._live.values()))[0]
        newest = next(reversed(self._live.values()))[1]
        if newest <= oldest:  # Wrapped: only the gap before the oldest region is free.
            return newest if size <= oldest - newest else None
        if size <= self._size - newest:
            return newest
        return 0 if size <= oldest else None

    def _flush_freed_list(self) -> None:
        while self._live and (oldest := next(iter(self._live))) in self._released:
            self._released.discard(oldest)
            del self._live[oldest]
