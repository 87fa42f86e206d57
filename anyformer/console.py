"""What commands print for people: tables and progress bars. Quiet where the output is no terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from anyformer.backbones.machine import Machine
from anyformer.memory import approximate, human_bytes
from anyformer.program import Program

OUT = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
if not OUT.is_terminal:
    OUT.width = 160  # a file or a pipe has room for whole tables
SHOWN = ("passed", "max_abs_error", "max_pattern_error", "dtype", "sequences")
MOST_BLOCKS, MOST_JSON_BLOCKS = 64, 10_000


def show(text: str) -> None:
    """Print a line as it is."""
    OUT.print(text, markup=False)


def show_commands(commands: dict[str, tuple[str, str]]) -> None:
    """The table of commands: each with one line and one example."""
    show("anyformer: a fixed transformer can be any transformer; its input embedding is the program\n")
    for name, (line, example) in commands.items():
        show(f"  {name:<10} {line}\n             {example}")
    show("\nanyformer COMMAND --help explains a command; --json prints one JSON object.")


@contextmanager
def demo_progress(quiet: bool) -> Iterator[Any]:
    """A bar for each target while it trains; calls ``report(task, step, steps, loss, accuracy, seconds_left)``."""
    if quiet or not OUT.is_terminal:
        if not quiet:
            show("training two targets, one to two minutes ...")
        yield None
        return
    columns = (
        TextColumn("training {task.description:<8}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=OUT) as progress:
        bars: dict[str, Any] = {}

        def report(task: str, step: int, steps: int, loss: float, accuracy: float, seconds_left: float) -> None:
            figures = f"accuracy {100 * accuracy:5.1f} %  loss {loss:.3f}"
            if task not in bars:
                bars[task] = progress.add_task(task, total=steps, figures=figures)
            progress.update(bars[task], completed=step, figures=figures)

        yield report


@contextmanager
def train_progress(quiet: bool, name: str) -> Iterator[Any]:
    """A bar for a run: loss, accuracy, steps a second, time left; calls ``report(Progress)``."""
    if quiet or not OUT.is_terminal:
        if not quiet:
            show(f"training run {name} ...")
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=OUT) as progress:
        bar = progress.add_task(name[:8], total=None, figures="")

        def report(news: Any) -> None:
            left = timedelta(seconds=round(news.seconds_left))
            loss = "" if news.loss is None else f"loss {news.loss:.4f}  "
            accuracy = "" if news.accuracy is None else f"accuracy {100 * news.accuracy:.1f} %  "
            figures = f"{news.step}/{news.steps}  {loss}{accuracy}{news.steps_per_second:,.1f} steps/s  {left}"
            progress.update(bar, completed=news.step, total=news.steps, figures=figures)

        yield report


def show_demo(result: dict[str, Any]) -> None:
    """The demo's table."""
    ones = f"{result['nonzero_weights']:,} weights that are 1, all others 0"
    show(f"one fixed machine: {result['backbone']}, width {result['width']}, {ones}, sha256 {result['sha256'][:12]}...")
    table = Table(
        "program",
        "target accuracy",
        "on the machine",
        "worst output error",
        "worst pattern error",
        "dense 0/1 machine",
        "verified",
    )
    for p in result["programs"]:
        table.add_row(
            p["task"],
            f"{p['target_accuracy']:.2f} %",
            f"{p['program_accuracy']:.2f} %",
            f"{p['max_abs_error']:.1e} ({p['dtype']})",
            f"{p['max_pattern_error']:.1e}",
            f"agrees to {p['literal_error']:.1e}",
            "yes" if p["passed"] else "NO",
        )
    OUT.print(table)
    show(
        f"machine unchanged: {'yes' if result['backbone_unchanged'] else 'NO'}.   wrote {result['folder']}/overview.png, targets, programs"
    )
    show(f'next: anyformer run {result["folder"]}/programs/dyck --tokens "( ( ) ) ?"')


def show_run(result: dict[str, Any], confidence: list[float]) -> None:
    """Position, token, prediction."""
    table = Table("position", "token", "prediction", "probability")
    for i, (token, predicted) in enumerate(zip(result["tokens"], result["predictions"], strict=True)):
        table.add_row(str(i + 1), token, predicted, f"{confidence[i]:.3f}")
    OUT.print(table)


def describe(program: Program) -> dict[str, Any]:
    """A program in plain data: machine, class, sizes, blocks of coordinates."""
    machine: Machine = program.machine()
    machine.check(program)
    blocks = [
        {"block": b.what, "path": list(b.path), "start": b.start, "count": b.count}
        for b in islice(machine.blocks(), MOST_JSON_BLOCKS)
    ]
    return {
        "machine": repr(machine),
        "backbone": machine.name,
        "width": machine.width,
        "fingerprint": program.fingerprint,
        "class": machine.network_class.to_json(),
        "vocab": program.vocab,
        "token_names": None if program.token_names is None else list(program.token_names),
        "dtype": str(program.dtype).removeprefix("torch."),
        "parameters": program.parameters,
        "token_columns": program.tokens.shape[1],
        "position_rows": 0 if program.positions is None else program.positions.shape[0],
        "constant_columns": 0 if program.constants is None else program.constants.shape[0],
        "readout": None if program.readout is None else list(program.readout.shape),
        "norms": 0 if program.norms is None else len(program.norms),
        "cost": asdict(machine.cost()),
        "blocks": blocks,
        "provenance": program.provenance,
        "report": program.report,
    }


def show_description(result: dict[str, Any]) -> None:
    """The same for people."""
    show(result["machine"])
    show(f"fingerprint {result['fingerprint']}")
    for s, stage in enumerate(result["class"]["stages"]):
        banks = "  +  ".join(
            _operator(b["operator"]) + ("" if b["map"] == "general" else f" [{b['map']} map]") for b in stage["branches"]
        )
        show(f"  stage {s + 1}: {banks}")
    names = " ".join(result["token_names"] or []) or "no token names"
    show(f"{result['vocab']} tokens: {names}")
    show(
        f"{result['parameters']:,} numbers ({result['dtype']}): {result['token_columns']} token columns, {result['position_rows']} position "
        f"rows, {result['constant_columns']} constant columns{_own_tables(result)}"
    )
    table = Table("coordinates", "what", "path")
    for block in result["blocks"][:MOST_BLOCKS]:
        last = block["start"] + block["count"] - 1
        table.add_row(f"{block['start']}..{last}", block["block"], ", ".join(block["path"]) or "root")
    OUT.print(table)
    if len(result["blocks"]) > MOST_BLOCKS:
        show(f"and {len(result['blocks']) - MOST_BLOCKS} more blocks (--json prints them)")
    report = result["report"]
    if report is None:
        learned = result["provenance"].get("made_by") == "training"
        show("learned: there is no target to verify it against" if learned else "not verified")
        return
    show(
        "verified: "
        + ", ".join(f"{k}={report[k]:.1e}" if isinstance(report[k], float) else f"{k}={report[k]}" for k in SHOWN if k in report)
    )


def _own_tables(result: dict[str, Any]) -> str:
    """What only programs of a machine for learning bring."""
    readout = "" if result["readout"] is None else f", read-out {' x '.join(map(str, result['readout']))}"
    return readout + (f", {result['norms']} norms" if result["norms"] else "")


def _operator(data: dict[str, Any]) -> str:
    simple = ", ".join(
        f"{k}={_operator(v) if isinstance(v, dict) else v}"
        for k, v in data.items()
        if k != "type" and v not in (None, False) and not isinstance(v, list)
    )
    return f"{data['type']}({simple})"


def show_cost(result: dict[str, Any]) -> None:
    """One row a machine; below, why a machine has none."""
    table = Table(
        Column("machine", no_wrap=True), "width", "recommended", "width x length", "stages", "non-zero weights", "a token row"
    )
    reasons = []  # why a machine has no width, and notes on those that have one
    for name, sizes in result["backbones"].items():
        if sizes["width"] is None:
            reasons.append(f"{name}: none; {sizes['reason']}")
            continue
        if "note" in sizes:
            reasons.append(f"{name}: {sizes['note']}")
        numbers = [approximate(sizes[k]) for k in ("state", "depth", "nonzero_weights")]
        recommended = approximate(sizes.get("recommended", sizes["width"]))
        table.add_row(name, approximate(sizes["width"]), recommended, *numbers, human_bytes(sizes["bytes"]))
    OUT.print(table)
    for reason in reasons:
        show(reason)
    show(
        f"lower bound for attention-only machines of this depth that match attention: width >= H^(L/2) = {approximate(result['lower_bound'])}"
    )


def show_tasks(result: dict[str, Any]) -> None:
    """One row a task: sizes, and the accuracy of each baseline in per cent; below, what the rules are."""

    def cell(scores: dict[str, float]) -> str:
        first, *others = (f"{100 * share:.1f}" for share in scores.values())
        return first + "".join(f" ({name} {share})" for name, share in zip(list(scores)[1:], others, strict=True))

    table = Table("task", "tokens", "length", "constant", "position", "position and own token")
    rules = []
    for task in result["tasks"]:
        found = task["baselines"]
        table.add_row(
            task["name"],
            str(task["vocab"]) if task["used"] == task["vocab"] else f"{task['used']} of {task['vocab']}",
            str(task["length"]),
            *(cell(found[kind]) for kind in ("constant", "position", "own_token")),
        )
        rules += [f"{task['name']}, rule {name!r}: {cell(scores)}" for name, scores in found["rules"].items()]
    OUT.print(table)
    for rule in rules:
        show(rule)


@contextmanager
def reproduce_progress(quiet: bool, runs: int) -> Iterator[Any]:
    """A bar over the runs of a table; calls ``report(name, result or reason)``."""
    if quiet or not OUT.is_terminal:
        if not quiet:
            show(f"{runs} runs (finished ones are read) ...")
        yield None
        return
    with Progress(
        TextColumn("runs"), BarColumn(), TextColumn("{task.fields[last]}"), TimeRemainingColumn(), console=OUT
    ) as progress:
        bar = progress.add_task("runs", total=runs, last="")

        def report(name: str, outcome: Any) -> None:
            said = outcome if isinstance(outcome, str) else f"accuracy {100 * outcome.history.accuracies[-1]:.1f} %"
            progress.update(bar, advance=1, last=f"{name}: {said}")

        yield report


@contextmanager
def counted_progress(what: str, quiet: bool) -> Iterator[Any]:
    """A bar; calls ``report(done, of, what was done last)``."""
    if quiet or not OUT.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[last]}"), TimeRemainingColumn())
    with Progress(*columns, console=OUT) as progress:
        bar = progress.add_task(what, total=None, last="")

        def report(done: int, of: int, last: str) -> None:
            progress.update(bar, completed=done, total=of, last=last)

        yield report


def show_table(name: str, result: dict[str, Any], folder: Any) -> None:
    """The rows of a table that were run, and the runs that failed."""
    from anyformer.experiments.report import spelled

    table = Table("task", "variant", "model", "m", "ours (%)", "letters", "paper", "best trivial", "profile")
    for row in result["rows"]:
        if row.accuracy:
            best = max(row.baselines.values())
            paper = "" if row.paper is None else f"{row.paper:.1f}"
            figures = (spelled(row.accuracy), spelled(row.accuracy_letters) if row.accuracy_letters else "", paper, f"{best:.1f}")
            table.add_row(row.task, row.norm, row.model, str(row.m), *figures, row.profile)
    OUT.print(table)
    empty = sum(not row.accuracy for row in result["rows"])
    show(f"{empty} of {len(result['rows'])} rows were not run" if empty else "every row was run")
    show_failures(result["failures"])
    show(f"wrote {folder / name}.json, {name}.md and figures")


def show_failures(failures: dict[str, str]) -> None:
    """A line a run that failed."""
    for run, reason in failures.items():
        show(f"run {run} failed: {reason}")


def show_limits(result: dict[str, Any]) -> None:
    """The tables of ``anyformer limits``."""
    show("width over the lower bound H^(L/2) (attention only; docs/limits.md has a stronger bound and both proofs)")
    standing = result["lower_bound"]["standing"]
    machines = list(dict.fromkeys(name for row in standing for name, s in row["machines"].items() if s["width"] is not None))
    table = Table("H, L, d, d_in", "H^(L/2)", "our bound", *machines)
    for row in standing:
        sizes = [row["machines"][name] for name in machines]
        cells = ["none" if s["width"] is None else f"{s['over_bound']:,.4g} x" for s in sizes]
        what = ", ".join(str(row[k]) for k in ("heads", "layers", "head_dim", "features"))
        table.add_row(what, approximate(row["bound"]), approximate(row["our_bound"]), *cells)
    OUT.print(table)
    below = result["below_width"]
    show(
        f"below N: largest attention error on new inputs (bound {below['lower_bound']}, count of unknowns {below['counted_width']}, "
        f"attention's reads {below['attention_reads']}, N = {below['required_reads']})"
    )
    table = Table("width", "optimised: least", "median of seeds", "least squares, attention", "the program")
    for row in below["curve"]:
        found = row["optimised"]
        errors = (found["min"], found["median"], row["attention_only"]["median"], row["compiled"]["median"])
        table.add_row(str(row["width"]), *(f"{e:.1e}" for e in errors))
    OUT.print(table)
    for row in below["counts"]:
        what = ", ".join(str(row[k]) for k in ("heads", "layers", "head_dim", "features"))
        show(
            f"  ({what}): count {row['counted_width']}; least error one below {row['one_below']:.1e}, at it {row['at_count']:.1e}, one "
            f"above {row['one_above']:.1e}"
        )
    norm = result["layer_norm"]
    worst, constant = (min(row[k] / row["floor"] for row in norm["fits"]) for k in ("error", "error_with_constant"))
    show(
        f"LayerNorm over all m coordinates: the best error found is at least {worst:.3g} times |b - beta U| "
        f"({constant:.3g} times with a constant feature); a norm over D reads: {norm['norm_operator_error']:.1e}"
    )
    for position, verdict in norm["verified"].items():
        passed = "verified" if verdict["passed"] else "NOT verified"
        show(f"  a {position}-LayerNorm target with biases: {passed}, largest error {verdict['max_abs_error']:.1e}")
    weights = result["random_weights"]
    determinants = ", ".join(f"{k.replace('_', ' ')} {w['determinant']:+d}" for k, w in weights["witness"].items())
    show(f"determinant of R_all of the 0/1 machine, in integers: {determinants}")
    for name in ("least", "recommended"):
        c = weights["condition"][name]
        show(
            f"  log10 cond(R_all) of {weights['condition']['seeds']} backbones, m = {c['width']}: {c['smallest']:.2f} to {c['largest']:.2f}, "
            f"median {c['median']:.2f}"
        )
    for name in ("ordinary", "enough"):
        r = weights["random_mlp"][name]
        show(f"  random MLP of {r['units']} units: rank {r['rank']} of {r['reads']} reads, relative residual {r['residual']:.1e}")
    wrote = f"{result['folder']}/limits.json, below_width.png, conditioning.png, layer_norm.png"
    show(f"laws hold: {'yes' if result['passed'] else 'NO'}.   wrote {wrote}")
