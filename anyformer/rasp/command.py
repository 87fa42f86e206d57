"""``anyformer rasp``: a file on an input, or the prompt."""

from typing import Any

from anyformer.errors import AnyformerError
from anyformer.options import Rasp
from anyformer.rasp.language import display
from anyformer.rasp.language.environment import chosen, load_rasp, read_input
from anyformer.rasp.language.kinds import Ran
from anyformer.rasp.language.prompt import prompt
from anyformer.rasp.sequences import Selector


def rasp(options: Rasp) -> tuple[dict[str, Any], int]:
    """Run the command."""
    given = None if options.input is None else read_input(options.input)
    if options.file is None:
        if options.as_json or options.name is not None:
            raise AnyformerError("rasp: --json and --name need a FILE; without one there is a prompt")
        prompt(given)
        return {}, 0
    environment = load_rasp(options.file)
    program = chosen(environment, options.name)
    tokens = environment.example if given is None else given
    values = environment.run(program, tokens)
    interpreted = values.astype(int).tolist() if isinstance(program, Selector) else values
    result = {"output": interpreted, "interpreted": interpreted}
    if not options.as_json:
        from anyformer.console import show

        name = options.name or program.label or "out"
        show("\n".join(display.ran(name, Ran(program, tokens, values), environment.wide)))
    return result, 0
