"""Multimodal inputs: references, decoded media, routing and caches of encoder outputs, transfers of embeddings.

Names are imported lazily, on first access: the transfers of embeddings require pydantic, loaders do not.
"""

from dynamo.core.lazy import lazy_names

_HERE = "dynamo.common.multimodal"
_PUBLIC = {
    "AsyncEncoderCache": f"{_HERE}.async_encoder_cache",
    "AudioLoader": f"{_HERE}.audio_loader",
    "EmbeddingTransferMode": "dynamo.common.constants",
    "ImageLoader": f"{_HERE}.image_loader",
    "VideoLoader": f"{_HERE}.video_loader",
} | dict.fromkeys(
    (
        "EMBEDDING_RECEIVER_FACTORIES",
        "EMBEDDING_SENDER_FACTORIES",
        "AbstractEmbeddingReceiver",
        "AbstractEmbeddingSender",
        "LocalEmbeddingReceiver",
        "LocalEmbeddingSender",
        "NixlReadEmbeddingReceiver",
        "NixlReadEmbeddingSender",
        "NixlWriteEmbeddingReceiver",
        "NixlWriteEmbeddingSender",
        "TransferRequest",
    ),
    f"{_HERE}.embedding_transfer",
)

__all__, __getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
