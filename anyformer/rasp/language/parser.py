"""Text to syntax tree, by ``grammar.lark``; what cannot be read is a :class:`RaspError` that says what was expected there."""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedToken
from lark.lark import PostLex

from anyformer.rasp.language.places import Place, RaspError

VALUES = {"NAME", "NUMBER", "STRING", "LPAR", "LSQB", "LBRACE", "NOT"}
OPERATORS = {"AND", "OR", "IN", "IF", "PERCENT", "STAR", "SLASH", "POWER", "COMPARE"}
RESERVED = {"AND", "OR", "NOT", "IN", "IF", "ELSE", "FOR", "DEF", "RETURN"}
SPELLED = {
    "SEMICOLON": "';'",
    "COMMA": "','",
    "COLON": "':'",
    "EQUAL": "'='",
    "LPAR": "'('",
    "RPAR": "')'",
    "LSQB": "'['",
    "RSQB": "']'",
    "LBRACE": "'{'",
    "RBRACE": "'}'",
    "NAME": "a name",
    "STRING": "a string",
    "IN": "'in'",
    "FOR": "'for'",
    "ELSE": "'else'",
    "RETURN": "'return'",
}


class Unfinished(RaspError):
    """The text ends in the middle of a statement: at a prompt, the next line may go on."""


class _Lines(PostLex):
    """``set example VALUE`` needs no semicolon: it ends with its line, unless a bracket is open."""

    always_accept = ()

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        """The tokens, with a ``_LINE_END`` behind each such command. ``depth`` counts its open brackets; elsewhere it is None."""
        last, depth = Token("", ""), None
        for token in stream:
            if depth == 0 and last.type != "SET_EXAMPLE" and token.line != last.end_line:
                yield Token.new_borrow_pos("_LINE_END", "", last)
                depth = None
            if token.type in ("SET_EXAMPLE", "SEMICOLON"):
                depth = 0 if token.type == "SET_EXAMPLE" else None
            elif depth is not None:
                depth += (token.type in ("LPAR", "LSQB", "LBRACE")) - (token.type in ("RPAR", "RSQB", "RBRACE"))
            last = token
            yield token
        if depth == 0 and last.type != "SET_EXAMPLE":
            yield Token.new_borrow_pos("_LINE_END", "", last)


@cache
def _lark(start: str) -> Lark:
    grammar = files("anyformer.rasp.language").joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(
        grammar, parser="lalr", lexer="basic", start=start, postlex=_Lines(), propagate_positions=True, maybe_placeholders=True
    )


def parse(text: str, file: str = "") -> list[Tree]:
    """The statements of a program."""
    return list(_parse(text, file, "start").children)  # type: ignore[arg-type]


def parse_expression(text: str, file: str = "") -> Tree:
    """One expression, without a semicolon."""
    return _parse(text, file, "expression")


def _parse(text: str, file: str, start: str) -> Tree:
    try:
        return _lark(start).parse(text)
    except UnexpectedCharacters as error:
        place, character = Place(error.line, error.column, file), text[error.pos_in_stream or 0]
        if character == '"':
            raise RaspError(place, 'this string does not end; close it with " on the same line') from None
        hint = '; a string stands in double quotes: "..."' if character == "'" else ""
        raise RaspError(place, f"{character!r} has no meaning in this language{hint}") from None
    except UnexpectedToken as error:
        raise _explained(error.token, *_before(error.token, text, start), text, file) from None


def _before(token: Token, text: str, start: str) -> tuple[Token | None, set[str]]:
    """What stands before a token that cannot stand there, and what could."""
    parser, previous = _lark(start).parse_interactive(text), None
    for other in parser.iter_parse():
        if token.type != "$END" and other.start_pos == token.start_pos and other.type == token.type:
            break
        previous = other
    return previous, parser.accepts()


def _explained(token: Token, previous: Token | None, expected: set[str], text: str, file: str) -> RaspError:
    wanted = _spelled(expected)
    if token.type == "$END":
        lines = text.rstrip().split("\n")
        return Unfinished(Place(len(lines), len(lines[-1]) + 1, file), f"the text ends here, but {wanted} is expected")
    if "SEMICOLON" in expected and previous is not None and (token.line or 1) > (previous.end_line or 1):
        place = Place(previous.end_line or 1, previous.end_column or 1, file)
        return RaspError(place, "';' is missing at the end of this statement")
    place = Place(token.line or 1, token.column or 1, file)
    if token.type == "_LINE_END":
        place = Place(token.end_line or 1, token.end_column or 1, file)
        return RaspError(place, f"the line ends here, but {wanted} is expected")
    hint = "; compare with ==" if token.type == "EQUAL" and "COMPARE" in expected else ""
    if token.type in RESERVED:
        hint = f"; {str(token)!r} is a reserved word"
    return RaspError(place, f"expected {wanted}, got {str(token)!r}{hint}")


def _spelled(expected: set[str]) -> str:
    """The kinds of token in words."""
    words = []
    if expected.issuperset(VALUES):
        words.append("a statement" if "DEF" in expected else "a value")
        expected = expected - VALUES - {"PLUS", "MINUS", "DEF", "FOR", "COMPARE"}
    if expected.issuperset(OPERATORS):
        words.append("an operator")
        expected = expected - OPERATORS - {"PLUS", "MINUS", "LPAR", "LSQB"}
    words += [SPELLED[kind] for kind in sorted(expected) if kind in SPELLED]
    return " or ".join(words) if words else "something else"
