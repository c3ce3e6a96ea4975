"""Host arena: contiguous memory for all blocks of the host tier; pages are allocated when first written."""

import mmap

import numpy as np

from dynamo.kvbm.physical.layout import BlockLayout, Bytes


class HostArena:
    """Blocks at page boundaries, at fixed addresses: nothing is allocated or moved later."""

    def __init__(self, layout: BlockLayout, blocks: int, memory: Bytes | None = None) -> None:
        """`memory`: memory of the caller, which other processes may map."""
        self.layout = layout
        self.blocks = blocks
        self._stride = layout.stride_bytes
        if memory is None:
            # A private mapping, invisible to other processes; pages are allocated when touched.
            own = mmap.mmap(-1, max(1, blocks) * self._stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = np.frombuffer(own, np.uint8)
        assert memory.nbytes >= blocks * self._stride, "the memory is too small for the blocks"
        self._bytes = memory
        self._used = layout.block_bytes

    @property
    def memory(self) -> Bytes:
        """All of the memory, to be registered with a transfer library or pinned for a device."""
        return self._bytes

    def raw(self, slot: int) -> Bytes:
        """Return a block's bytes."""
        start = slot * self._stride
        return self._bytes[start : start + self._used]

    def padded(self, slot: int) -> Bytes:
        """Return a block's bytes up to the page boundary."""
        start = slot * self._stride
        return self._bytes[start : start + self._stride]

    def array(self, slot: int) -> "np.typing.NDArray[np.generic]":
        """Return a block in the device's layout."""
        return self.raw(slot).view(self.layout.dtype).reshape(self.layout.shape)
