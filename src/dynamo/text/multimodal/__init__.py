"""Multimodal inputs: images, videos and audio of a request, and their effect on block hashes."""
