"""Encoding of images."""

import io
from typing import Any


def encode_to_png_bytes(image: Any) -> bytes:
    """Return an image, an array of height × width × channels, as PNG. Raise `RuntimeError` if it is no image."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError("PNG encoding requires Pillow: pip install pillow") from None
    with io.BytesIO() as file:
        try:
            Image.fromarray(image).save(file, "PNG")
        except (AttributeError, OSError, TypeError, ValueError, UnidentifiedImageError) as error:
            raise RuntimeError(f"cannot encode {type(image).__name__} as PNG: {error}") from error
        return file.getvalue()
