"""Images as PNG files."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""Channels of an image -> number of its kind in a PNG file."""
_COMPRESSION = 3


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """The image of shape (height, width, channels) as a PNG file (https://www.w3.org/TR/png-3)."""
    height, width, channels = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    # Each row begins with the number of its filter; 0 is none.
    rows = b"".join(b"\x00" + row.tobytes() for row in image)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, _COMPRESSION)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
