"""A column of texts in a Parquet file, a few rows at a time, with a bound on how far a small file may unpack."""

from collections.abc import Iterator
from typing import Any

from mingpt.errors import UserError
from mingpt.redact import printable
from mingpt.storage import install, unread

# A few bytes of Parquet can give each of many rows a long string. So a row group's column of more than PLAIN_BYTES is
# refused if it unpacks to more than MOST_PACKED times its size, and read row by row above USUALLY_PACKED times.
PLAIN_BYTES, USUALLY_PACKED, MOST_PACKED = 16 << 20, 20, 100
ROWS = 16  # that are unpacked at a time


def parquet_column(stream: Any, name: str, shown: str) -> tuple[int, Iterator[str]]:
    """The number of rows, and the texts of those that have one.

    stream: a seekable binary file. Raises UserError, which begins with `shown`, if it is damaged or has no such column.
    """
    table = _opened(stream, shown)
    columns = dict(zip(table.schema_arrow.names, table.schema_arrow.types, strict=True))
    if name not in columns:
        there_are = ", ".join(map(repr, list(columns)[:10]))
        raise UserError(f"{shown}: no column {name!r}; there are {there_are}: name one with --field")
    if (kind := str(columns[name])) not in ("string", "large_string", "string_view"):
        raise UserError(f"{shown}: column {name!r} is of {printable(kind)}, not of strings: name another with --field")
    return table.metadata.num_rows, _texts(table, name, shown)


def _opened(stream: Any, shown: str) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"Parquet needs the package pyarrow: {install('parquet')}") from error
    try:
        return parquet.ParquetFile(stream)
    except (ArrowException, OSError) as error:
        if unread(error):
            raise
        raise UserError(f"{shown}: not Parquet ({_first_line(error)}): give another --form") from error


def _texts(table: Any, name: str, shown: str) -> Iterator[str]:
    from pyarrow import ArrowException

    try:
        for group in range(table.num_row_groups):
            rows = _rows_at_once(table.metadata.row_group(group), name, shown)
            for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=[name]):
                for value in batch.column(0):  # not to_pylist(): thousands of rows may share one long string
                    if (text := value.as_py()) is not None:
                        yield text
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: column {name!r} is not UTF-8: convert the file") from error
    except (ArrowException, OSError) as error:
        if unread(error):
            raise
        raise UserError(f"{shown}: damaged Parquet ({_first_line(error)}): get the file again") from error


def _rows_at_once(group: Any, name: str, shown: str) -> int:
    """How many rows of a row group to unpack at a time. Raises UserError if the column is packed too densely."""
    for column in (group.column(i) for i in range(group.num_columns)):
        packed, plain = column.total_compressed_size, column.total_uncompressed_size
        if column.path_in_schema != name or plain <= PLAIN_BYTES:
            continue
        if plain > MOST_PACKED * packed:
            raise UserError(
                f"{shown}: column {name!r} is packed {packed} bytes and {plain} unpacked, more than {MOST_PACKED} "
                "times as many: write the file again in smaller row groups"
            )
        if plain > USUALLY_PACKED * packed:
            return 1
    return ROWS


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])
