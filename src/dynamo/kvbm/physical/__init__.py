"""Storage of the bytes of blocks: memory, a file, an object store, without interpreting them."""
