"""An image of a confusion matrix, with its labels, its numbers and a scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SMALLEST_CELL = 16
"""Pixels of a cell's side that a number needs."""
_FONT_SIZE = 10
_GAP = 4
_SCALE_WIDTH = 12
_LONGEST_LABEL = 16
_DARK = (8, 64, 129)
"""The colour of a share of 1; that of 0 is white."""


def draw_matrix(
    counts: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], labels: Sequence[str], cell: int
) -> NDArray[np.uint8]:
    """Draw a square matrix: rows are true classes, columns predicted ones.

    Args:
        counts: the numbers in the cells; a number that does not fit is left out.
        shares: the shade of each cell, from 0 to 1.
        cell: pixels of a cell's side.

    Returns:
        RGB values of shape (3, height, width).
    """
    # Here, not above: it is needed only if something is drawn.
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_FONT_SIZE)
    names = [label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…" for label in labels]
    matrix_left = matrix_top = _GAP * 2 + round(max(map(font.getlength, names)))
    side = cell * len(names)
    scale_left = matrix_left + side + 2 * _GAP
    image = Image.new("RGB", (scale_left + _SCALE_WIDTH + 6 * _GAP, matrix_top + side + 2 * _GAP), "white")
    draw = ImageDraw.Draw(image)
    for row, name in enumerate(names):
        middle = row * cell + cell // 2
        draw.text((matrix_left - _GAP, matrix_top + middle), name, "black", font, anchor="rm")
        # Turned, so that a long label is as wide as its cell.
        turned = Image.new("RGB", (matrix_top, _FONT_SIZE + _GAP), "white")
        ImageDraw.Draw(turned).text((_GAP, turned.height // 2), name, "black", font, anchor="lm")
        image.paste(turned.rotate(90, expand=True), (matrix_left + middle - turned.height // 2, 0))
    for row, (numbers, shades) in enumerate(zip(counts, shares, strict=True)):
        for column, (count, share) in enumerate(zip(numbers, shades, strict=True)):
            x, y = matrix_left + column * cell, matrix_top + row * cell
            draw.rectangle((x, y, x + cell - 1, y + cell - 1), _shade(share), "#d0d0d0")
            if font.getlength(str(count)) <= cell - 2:
                colour = "white" if share > 0.5 else "black"
                draw.text((x + cell // 2, y + cell // 2), str(count), colour, font, anchor="mm")
    for y in range(side):
        draw.line(
            (scale_left, matrix_top + y, scale_left + _SCALE_WIDTH, matrix_top + y), _shade(1 - y / max(side - 1, 1))
        )
    for text, y, anchor in (("1", matrix_top, "lt"), ("0", matrix_top + side, "lb")):
        draw.text((scale_left + _SCALE_WIDTH + _GAP, y), text, "black", font, anchor=anchor)
    return np.asarray(image).transpose(2, 0, 1)


def _shade(share: float) -> tuple[int, int, int]:
    """The colour of a share, from white for 0 to `_DARK` for 1."""
    red, green, blue = (round(255 + (dark - 255) * share) for dark in _DARK)
    return red, green, blue
