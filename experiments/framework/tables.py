"""Tables for readers, which can be shown as Markdown, as HTML and in a terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], left: int | None = 1
) -> str:
    """A table in Markdown.

    Args:
        left: number of leading columns that are text, aligned on the left; None: all.
    """
    words = len(head) if left is None else left
    rule = "|" + "---|" * words + "--:|" * (len(head) - words)
    first, *others = (f"| {' | '.join(map(_escaped, cells))} |" for cells in (head, *rows))
    return "\n".join([first, rule, *others])


def _escaped(cell: object) -> str:
    return " ".join(str(cell).split()).replace("|", "\\|")


class ResultTable(NamedTuple):
    """A table for readers.

    Attributes:
        note: what it shows, in Markdown.
        head: names of its columns.
        rows: cells, shown as text; without rows only the note is shown.
        left: number of leading columns that are text, aligned on the left; None: all.
    """

    note: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    left: int | None = 1

    def markdown(self) -> str:
        """Note and table as Markdown, which the report renders as HTML."""
        table = markdown_table(self.head, self.rows, self.left) if self.rows else ""
        return "\n\n".join(filter(None, [self.note, table]))

    def rich(self) -> Table:
        """The table for a terminal, without the note."""
        table = Table(box=SIMPLE_HEAD)
        words = len(self.head) if self.left is None else self.left
        for index, name in enumerate(self.head):
            table.add_column(name, justify="left" if index < words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        return table
