"""The command line: ``anyformer`` (also ``python -m anyformer``). Exit code 0: fine, 1: false, 2: unusable input."""

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from anyformer.commands import COMMANDS, Command
from anyformer.errors import AnyformerError


def _parse(arguments: Sequence[str]) -> tuple[Command, Any]:
    name, rest = arguments[0], list(arguments[1:])
    if name not in COMMANDS:
        raise AnyformerError(f"there is no command {name!r}; commands: {', '.join(COMMANDS)} (anyformer alone explains them)")
    command = COMMANDS[name]
    options, rest = (command.options, rest) if command.narrow is None else command.narrow(rest)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return command, tyro.cli(options, prog=f"anyformer {name}", args=rest, description=command.options.__doc__)
    except SystemExit as stop:
        if not stop.code:
            raise
        words = _one_line(said.getvalue()) or "these options cannot be used"
        raise AnyformerError(f"{words} ({_help_of(name, arguments[1:])} explains them)") from None


def _one_line(said: str) -> str:
    """The parser's message without its frame, its heading and its helptext."""
    words = " ".join(re.sub(r"[\u2500-\u257f]+|-{5,}", " ", said).split())
    words = re.sub(r" ?(For full helptext, |Argument helptext: ).*", "", words)
    words = re.sub(r"^(Value error (Error parsing [a-z]+: (?=[A-Z]))?|Invalid choice (?=invalid))", "", words)
    if "Unrecognized" not in words:
        words = re.sub(r"^Required options Missing from .*?: (\S+) .*", r"\1 is missing", words)
    return re.sub(r"^([A-Z][a-z ]+) \1", r"\1", words)


def _help_of(name: str, words: Sequence[str]) -> str:
    """The command line that shows the options which these words chose among."""
    chosen = list(words[:1]) if name == "train" and words and not words[0].startswith("-") else []
    if chosen and "--backbone" in words[:-1]:
        chosen += ["--backbone", words[words.index("--backbone") + 1]]
    return " ".join(["anyformer", name, *chosen, "--help"])


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Unusable input gives one line on standard error and 2; Ctrl-C gives 130."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        from anyformer.console import show_commands

        show_commands({name: (c.line, (c.options.__doc__ or "").split("Example: ")[-1].strip()) for name, c in COMMANDS.items()})
        return 0
    try:
        command, options = _parse(arguments)
        result, code = command.action(options)
        if options.as_json:
            print(json.dumps(_finite(result), allow_nan=False))
    except AnyformerError as error:
        print(f"anyformer: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RecursionError:
        print("anyformer: this machine or expression is too deep for this program; choose fewer layers", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        print(f"anyformer: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not re.search("allocate memory|out of memory", str(error)):  # torch says so in words
            raise
        print("anyformer: out of memory; choose a smaller batch, machine or task", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("anyformer: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
