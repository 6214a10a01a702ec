"""Pictures into one animated file that a browser shows by itself."""

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["webp"]

_FRAME_MS = 60
_LAST_MS = 900
_QUALITY = 60


def webp(frames: Sequence[NDArray[np.uint8]]) -> bytes:
    """Returns the frames, uint8 [height, width, 3] each, as an animated WebP that begins again for ever."""
    images = [Image.fromarray(frame) for frame in frames]
    durations = [_FRAME_MS] * (len(images) - 1) + [_LAST_MS]
    file = io.BytesIO()
    images[0].save(
        file, "WEBP", save_all=True, append_images=images[1:], duration=durations, loop=0, quality=_QUALITY, method=4
    )
    return file.getvalue()
