"""Multimodal inputs: references, decoded media, routing and caches of encoder outputs."""

from dynamo.common.multimodal.async_encoder_cache import AsyncEncoderCache
from dynamo.common.multimodal.audio_loader import AudioLoader
from dynamo.common.multimodal.image_loader import ImageLoader
from dynamo.common.multimodal.video_loader import VideoLoader

__all__ = ["AsyncEncoderCache", "AudioLoader", "ImageLoader", "VideoLoader"]
