"""Write the rows of a sweep to a Parquet or CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from legato.core import files
from legato.core.axes import SWEPT
from legato.core.errors import missing_extra
from legato.reports.model import SweepRow

__all__ = ["Row", "write_rows"]


class Row(Protocol):
    """A row of a sweep of workloads or of whole jobs."""

    @property
    def columns(self) -> dict[str, Any]: ...


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as Parquet if the name ends in .parquet (only for workloads), or else as CSV.

    An error leaves no partial file. Raises `FileError`, and `InputError` if pyarrow (the extra `legato[parquet]`) is
    not installed.
    """
    if path.suffix == ".parquet":
        files.write_bytes(path, _parquet(rows))
    else:
        _write_csv(path, [flat for row in rows for flat in _flat(row.columns)])


def _flat(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a row: one, or, for jobs that share a network, one for each job."""
    jobs = columns.pop("jobs", None)
    return [columns] if jobs is None else [columns | job for job in jobs]


def _parquet(rows: Sequence[Row]) -> bytes:
    try:  # slow to import, and only Parquet needs it
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise missing_extra("pyarrow", "parquet", "a .parquet file") from None

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    kinds = {field.name: field.type for field in msgspec.structs.fields(SweepRow)}
    kinds |= {axis.field: type(axis.usual) for axis in SWEPT}
    fields = []
    for name in rows[0].columns:
        kind = kinds[name]  # a type, or a union of a type and None
        fields.append(pa.field(name, types.get(kind) or types[kind.__args__[0]], nullable=kind not in types))
    table = pa.Table.from_pylist([row.columns for row in rows], schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write these rows, or nothing. A column that a row lacks is empty in this row. Raises `FileError`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(path, text.getvalue())
