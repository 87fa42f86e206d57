"""``anyformer rasp``: a file on an input, or the prompt."""

from typing import Any

from anyformer.console import show
from anyformer.errors import AnyformerError
from anyformer.options import Rasp
from anyformer.rasp.compiled import CompiledProgram, agree
from anyformer.rasp.compiling import compile
from anyformer.rasp.language import display
from anyformer.rasp.language.environment import chosen, load_rasp, read_input
from anyformer.rasp.language.kinds import Ran
from anyformer.rasp.language.prompt import prompt
from anyformer.rasp.sequences import Selector, Sequence
from anyformer.rasp.sets import Reals


def rasp(options: Rasp) -> tuple[dict[str, Any], int]:
    """Run the command."""
    given = None if options.input is None else read_input(options.input)
    if not options.compiled and (options.vocab is not None or options.max_length is not None):
        raise AnyformerError("rasp: --vocab and --max-length are of a compiled program; add --compiled")
    if options.file is None:
        if options.as_json or options.name is not None:
            raise AnyformerError("rasp: --json and --name need a FILE; without one there is a prompt")
        return {}, prompt(given)
    environment = load_rasp(options.file)
    program = chosen(environment, options.name)
    tokens = environment.example if given is None else given
    values = environment.run(program, tokens)
    interpreted = values.astype(int).tolist() if isinstance(program, Selector) else values
    result = {"output": interpreted, "interpreted": interpreted}
    compiled = _compiled(options, program, tokens) if options.compiled else None
    if compiled is not None:
        result |= {"output": compiled(tokens)} | _sizes(compiled)
    if not options.as_json:
        name = options.name or program.label or "out"
        lines = display.ran(name, Ran(program, tokens, values), environment.wide)
        if compiled is not None:
            lines += display.ran(f"{name}, compiled", Ran(program, tokens, result["output"]), environment.wide)
            lines.append(str(compiled))
        show("\n".join(lines))
    same = compiled is None or agree(result["output"], interpreted, compiled.error)
    return result, 0 if same else 1


def _compiled(options: Rasp, program: Sequence | Selector, tokens: list[Any]) -> CompiledProgram:
    """The program as a transformer, for the vocabulary and length of the options or else of the input."""
    if not isinstance(program, Sequence):
        raise AnyformerError("rasp: --compiled needs a sequence; a selector alone is no output, aggregate it")
    length = len(tokens) if options.max_length is None else options.max_length
    vocabulary = _vocabulary(options.vocab, tokens)
    if not isinstance(vocabulary, Reals):
        _require_kinds(vocabulary, tokens)
    return compile(program, vocabulary, length, mode=options.mode)


def _require_kinds(vocabulary: list[Any], tokens: list[Any]) -> None:
    """Raise where a token equals a word of the vocabulary but is a Boolean and that a number, or the other way round: they mean the same to
    a table, and differ in what is shown."""
    words = {word: word for word in vocabulary}
    for token in tokens:
        word = words.get(token, token)
        if isinstance(word, bool) != isinstance(token, bool):
            raise AnyformerError(
                f"rasp: the input holds {token!r} where the vocabulary has {word!r}; write both as Booleans (True,False) or as numbers (1,0)"
            )


def _vocabulary(said: str | None, tokens: list[Any]) -> list[Any] | Reals:
    if said is not None and said.startswith("reals:"):
        ends = read_input(said.removeprefix("reals:"))
        if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends):
            raise AnyformerError(f"rasp: --vocab reals: needs two numbers, as in reals:-10,10; got {said!r}")
        return Reals(*ends)
    if said is None and any(isinstance(token, float) and token != int(token) for token in tokens):
        return Reals(min(tokens), max(tokens))
    return list(dict.fromkeys(tokens if said is None else read_input(said)))


def _sizes(compiled: CompiledProgram) -> dict[str, Any]:
    return {
        "layers": compiled.layers,
        "heads": list(compiled.heads),
        "units": list(compiled.units),
        "width": compiled.width,
        "mode": compiled.mode,
        "error_bound": compiled.error,
    }
