"""The media of a record, as services take them."""

from __future__ import annotations

from typing import Any

from trainer_cli.loggers import Record


def convert_media(record: Record, service: Any) -> dict[str, Any]:
    """The images, histograms and tables of a record by name, as objects of W&B or of a service with its classes."""
    values = {name: service.Image(without_channel(image)) for name, image in record.images.items()}
    values.update({name: service.Histogram(np_histogram=bins) for name, bins in record.binned().items()})
    for name, table in record.tables.items():
        values[name] = service.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
    return values


def without_channel(image: Any) -> Any:
    """An image (H, W, channels), or (H, W) if it has a single channel."""
    return image[..., 0] if image.shape[-1] == 1 else image
