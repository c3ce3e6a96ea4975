"""Caches in memory."""

from dynamo.common.memory.multimodal_embedding_cache_manager import MultimodalEmbeddingCacheManager

__all__ = ["MultimodalEmbeddingCacheManager"]
