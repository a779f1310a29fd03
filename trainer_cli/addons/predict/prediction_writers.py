"""Formats of the files that `train predict` writes: JSON lines, Parquet, and the base class of a user's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from trainer_cli.errors import UserError
from trainer_cli.loggers import import_extra
from trainer_cli.strict_json import strict_json

_CHUNK_ROWS = 1024
"""Rows that a ParquetWriter holds in memory: all samples of a stream are one part."""


class PredictionWriter:
    """Writes JSON lines: for each sample a line with its number and the outputs as numbers and lists of numbers. NaN
    and infinity are the texts "nan", "inf" and "-inf", as in metrics.jsonl.

    A subclass writes another format, and is named by `predict.writer`.
    """

    suffix = ".jsonl"

    def write(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of a part into a new file. A row has `sample`, and outputs as tensors or as the model returned
        them, in memory of the host.
        """
        with open(path, "wb") as file:
            for row in rows:
                values = {name: _plain(value) for name, value in row.items()}
                file.write(strict_json(values).encode() + b"\n")

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Write one file of all parts, in their order."""
        with open(path, "wb") as file:
            for part_file in parts:
                with open(part_file, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)


def _plain(value: Any) -> Any:
    """A value as numbers, strings, lists and mappings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class ParquetWriter(PredictionWriter):
    """Writes Parquet, with a column for each output. Needs the extra `parquet`.

    A column has one type for all samples: of numbers the wider one, and of mappings all their keys.
    """

    suffix = ".parquet"

    def write(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows as files of a limited number of rows, which are then joined."""
        arrow, parquet = import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")
        remaining, chunks = iter(rows), list[Path]()
        try:
            # Without any rows, too, there is one file.
            while (chunk := list(islice(remaining, _CHUNK_ROWS))) or not chunks:
                chunks.append(path.with_name(f"{path.name}.{len(chunks)}"))
                values = [{name: _plain(value) for name, value in row.items()} for row in chunk]
                with _types_reported(arrow):
                    table = arrow.Table.from_pylist(values)
                parquet.write_table(table, chunks[-1])
            if len(chunks) > 1:
                parts = [*chunks]
                chunks.append(path.with_name(f"{path.name}.joined"))
                self.join(parts, chunks[-1])
            chunks[-1].replace(path)
        finally:
            for file in chunks:
                file.unlink(missing_ok=True)

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Write one file of all parts, with columns that can hold the values of each."""
        arrow, parquet = import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")
        # A part knows the types of its own samples alone: a list that is empty in all of them has none.
        with _types_reported(arrow):
            schema = arrow.unify_schemas(map(parquet.read_schema, parts), promote_options="permissive")
        with parquet.ParquetWriter(path, schema) as file:
            for part_file in parts:
                source = parquet.ParquetFile(part_file)
                for number in range(source.num_row_groups):
                    table = source.read_row_group(number)
                    if table.schema != schema:
                        with _types_reported(arrow):
                            table = arrow.Table.from_pylist(table.to_pylist(), schema=schema)
                    file.write_table(table)


@contextmanager
def _types_reported(arrow: Any) -> Iterator[None]:
    """Report values of one column that have no common type as a UserError."""
    try:
        yield
    except (arrow.ArrowTypeError, arrow.ArrowInvalid) as error:
        raise UserError(
            f"the samples have values of different types: {error}",
            where="predict.outputs",
            cure="Write JSON lines (predict.writer=null), or select other outputs.",
        ) from error
