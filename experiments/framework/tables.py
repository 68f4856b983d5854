"""Tables for people: in Markdown and in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], left: int | None = 1
) -> str:
    """A table in Markdown.

    Args:
        left: how many of the first columns are words, aligned on the left; None: all.
    """
    words = len(head) if left is None else left
    rule = "|" + "---|" * words + "--:|" * (len(head) - words)
    first, *others = ("| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows))
    return "\n".join([first, rule, *others])


class Shown(NamedTuple):
    """A table to be read, by people.

    Attributes:
        note: what it says.
        left: how many of the first columns are words.
    """

    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def markdown(self) -> str:
        """As Markdown."""
        return f"{self.note}\n\n{markdown_table(self.head, self.rows, self.left)}"

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(box=SIMPLE_HEAD)
        for index, name in enumerate(self.head):
            table.add_column(name, justify="left" if index < self.left else "right")
        for row in self.rows:
            table.add_row(*row)
        return table
