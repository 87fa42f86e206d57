"""Where in a program something is, and the error that says so."""

from dataclasses import dataclass

from anyformer.errors import AnyformerError


@dataclass(frozen=True)
class Place:
    """A line and a column, both from 1, of a file (or of a text that is no file)."""

    line: int
    column: int
    file: str = ""

    def __str__(self) -> str:
        here = f"line {self.line}, column {self.column}"
        return f"{self.file}, {here}" if self.file else here


class RaspError(AnyformerError):
    """A program in the ``.rasp`` language that cannot be read, built or run; ``place`` says where, ``message`` why."""

    def __init__(self, place: Place, message: str):
        self.place = place
        self.message = message
        super().__init__(f"{place}: {message}")

    @property
    def line(self) -> int:
        """Counted from 1."""
        return self.place.line

    @property
    def column(self) -> int:
        """Counted from 1."""
        return self.place.column
