"""A Parquet file has all values of all samples, whatever the types in its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.predict import prediction_writers
from trainer_cli.addons.predict.prediction_writers import ParquetWriter
from trainer_cli.errors import UserError

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'trainer-cli[parquet]'")


def rows_of(values: list[Any]) -> list[dict[str, Any]]:
    return [{"sample": sample, "output": value} for sample, value in enumerate(values)]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 2.5], [1.0, 2.0, 2.5]),
        ([None, None, 2.5], [None, None, 2.5]),
        ([[], [], [1.5]], [[], [], [1.5]]),
        ([{"a": 1}, {"a": 2}, {"b": 3}], [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": None, "b": 3}]),
        ([], []),
    ],
    ids=["numbers", "wider numbers", "none", "empty lists", "mappings", "no sample"],
)
def test_a_column_takes_the_values_of_all_samples(
    values: list[Any], expected: list[Any], in_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, file = ParquetWriter(), tmp_path / "all.parquet"
    rows = rows_of(values)
    if in_parts:
        parts = [tmp_path / f"{number}.parquet" for number in range(2)]
        for part, of_part in zip(parts, (rows[:2], rows[2:]), strict=True):
            writer.write(part, iter(of_part))
        writer.join(parts, file)
    else:
        monkeypatch.setattr(prediction_writers, "_CHUNK_ROWS", 2)
        writer.write(file, iter(rows))
        assert list(tmp_path.iterdir()) == [file]
    assert parquet.read_table(file).to_pylist() == rows_of(expected)


@pytest.mark.parametrize("chunk_rows", [1, 1024], ids=["apart", "together"])
@pytest.mark.parametrize("values", [["a", 2.5], [1, "a"], [2.5, 2**53 + 1]], ids=["text", "number", "large number"])
def test_types_that_have_nothing_in_common_are_refused(
    values: list[Any], chunk_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_writers, "_CHUNK_ROWS", chunk_rows)
    with pytest.raises(UserError, match="different types"):
        ParquetWriter().write(tmp_path / "all.parquet", iter(rows_of(values)))
    assert list(tmp_path.iterdir()) == []
