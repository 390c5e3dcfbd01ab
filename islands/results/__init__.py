"""What a run leaves behind: its folder, its tables, its summary, and what the terminal shows."""

from islands.results.result import Result
from islands.results.tables import SCHEMAS, TRACE, TableWriter, read_table

__all__ = ["SCHEMAS", "TRACE", "Result", "TableWriter", "read_table"]
