"""Write the rows of a sweep as Parquet or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec

from legato.core import files
from legato.core.errors import missing_extra
from legato.report.model import SweepRow

__all__ = ["write_rows"]


def write_rows(path: Path, rows: Sequence[SweepRow]) -> None:
    """Write Parquet if the name ends in .parquet, else CSV; completely or not at all.

    Raises `FileError`, and `InputError` if pyarrow, the extra `legato[parquet]`, is not installed.
    """
    if path.suffix == ".parquet":
        files.write_bytes(path, _parquet(rows))
    else:
        files.write_text(path, _csv(rows))


def _parquet(rows: Sequence[SweepRow]) -> bytes:
    try:  # heavy, and needed for Parquet only
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise missing_extra("pyarrow", "parquet", "a .parquet file") from None

    columns = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    fields = []
    for field in msgspec.structs.fields(SweepRow):
        kinds = [kind for kind in columns if kind is field.type or kind in getattr(field.type, "__args__", ())]
        fields.append(pa.field(field.name, columns[kinds[0]], nullable=not field.required))
    table = pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows], schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _csv(rows: Sequence[SweepRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(SweepRow.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(row) for row in rows)
    return text.getvalue()
