"""The prompt: reads statements, shows what they define on the current example, and says under which column something is wrong."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.rasp.language import display
from anyformer.rasp.language.environment import Environment, Left
from anyformer.rasp.language.evaluator import Drawing
from anyformer.rasp.language.kinds import Ran
from anyformer.rasp.language.parser import Unfinished, parse
from anyformer.rasp.language.places import RaspError
from anyformer.rasp.sequences import Selector, Sequence

FIRST, NEXT = ">> ", ".. "
WELCOME = "RASP: statements end with ';'. Ctrl-C drops what is half written, Ctrl-D leaves. Example: "


class Prompt:
    """A conversation: ``read(prompt)`` gives a line (or raises EOFError), ``write(line)`` shows one."""

    def __init__(self, read: Callable[[str], str] = input, write: Callable[[str], Any] = print, quiet: bool = False):
        self.environment = Environment()
        self.read = read
        self.write = write
        self.quiet = quiet
        self.lines: list[str] = []
        self.complaints = 0

    def start(self, example: list[Any] | None = None) -> None:
        """Go on until the input ends or ``exit`` is said."""
        if example is not None:
            self.environment.examples = {"s-op": example, "selector": example}
        if not self.quiet:
            self.write(WELCOME + display.written(self.environment.example))
        start = 0
        while True:
            try:
                line = self.read("" if self.quiet else NEXT if len(self.lines) > start else FIRST)
            except EOFError:
                self._finish(start)
                return
            except KeyboardInterrupt:
                self.write("")
                start = len(self.lines)
                continue
            self.lines.append(line)
            try:
                self._say("\n" * start + "\n".join(self.lines[start:]))
            except Unfinished:
                continue
            except Left:
                return
            start = len(self.lines)

    def _finish(self, start: int) -> None:
        """The input has ended, perhaps in the middle of a statement."""
        if not self.quiet:
            self.write("")
        try:
            parse("\n" * start + "\n".join(self.lines[start:]))
        except Unfinished as error:
            self._complain(error)

    def _say(self, text: str) -> None:
        try:
            for statement in parse(text):
                loads = statement.data == "load"
                for name, value in self.environment.execute(statement):
                    self._show(name, value, brief=loads)
        except Unfinished as error:
            if error.place.file:  # the statement is whole, the file that it loads is not
                self._complain(error)
            else:
                raise
        except AnyformerError as error:
            self._complain(error)
        except KeyboardInterrupt:
            self.write("interrupted")

    def _show(self, name: str, value: Any, brief: bool) -> None:
        """A value; an expression on the current example, unless examples are off or a file is being loaded."""
        if isinstance(value, (Sequence, Selector)):
            which = "selector" if isinstance(value, Selector) else "s-op"
            if brief or not self.environment.shows[which]:
                lines = [f"{'selector' if which == 'selector' else 'sequence'} {name}"]
            else:
                tokens = self.environment.examples[which]
                result = Ran(value, tokens, self.environment.run(value, tokens))
                lines = display.ran(name, result, self.environment.wide)
        elif isinstance(value, Drawing):
            lines = display.drawing(name, value)
        elif isinstance(value, Ran):
            lines = [] if brief else display.ran(name, value, self.environment.wide)
        else:
            lines = display.value(name, value)
        for line in lines:
            self.write(line)

    def _complain(self, error: AnyformerError) -> None:
        """The line that is wrong, a caret under the column, and why."""
        self.complaints += 1
        if isinstance(error, RaspError):
            line = self._source(error)
            if line is not None:
                before = "".join(c if c == "\t" else " " for c in line[: error.column - 1])
                self.write(line)
                self.write(f"{before}^")
        self.write(f"error: {error}")

    def _source(self, error: RaspError) -> str | None:
        lines = self.lines
        if error.place.file:
            try:
                lines = Path(error.place.file).read_text(encoding="utf-8").split("\n")
            except OSError:
                return None
        return lines[error.line - 1] if error.line <= len(lines) else None


def prompt(example: list[Any] | None = None) -> int:
    """Converse on the terminal, with the history of earlier conversations; without one, read statements and print their values. The exit
    code: 2 where there is no terminal and a statement could not be run."""
    at_terminal = sys.stdin.isatty()
    history = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "anyformer" / "rasp_history"
    keep = _remember(history) if at_terminal else None
    conversation = Prompt(quiet=not at_terminal)
    try:
        conversation.start(example)
    finally:
        if keep is not None:
            keep()
    return 2 if conversation.complaints and not at_terminal else 0


def _remember(history: Path) -> Callable[[], None] | None:
    """Let ``input`` edit lines and recall earlier ones; returns what writes them down. None where there is no readline."""
    try:
        import readline
    except ImportError:
        return None
    if history.is_file():
        readline.read_history_file(history)

    def keep() -> None:
        try:
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(history)
        except OSError as error:
            print(f"the history was not written: {error}", file=sys.stderr)

    return keep
