"""Where the bytes of blocks are: memory, a file, an object store. What they mean is for others to say."""
