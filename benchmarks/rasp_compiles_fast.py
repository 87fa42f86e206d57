"""Claims: compiled RASP against tracr on tracr's own library: compiled 20 times faster, no larger, called 10 times faster.

length, reverse, fraction of previous, sort unique, histogram, shuffle-Dyck; vocabulary 3 to 8, up to 5 and 10 tokens. Needs the extra
``bench`` (tracr-pypi); without it the claims about growth alone are checked. A *cold compile* is a fresh process: imports are excluded on both
sides, the program is built, compiled and run once on one input (tracr's JAX compilation takes place there, and so does our check against the
interpreter); nothing is cached. Sizes: width of the stream (the constant, and tracr's BOS, counted), layers, MLP units of the widest layer,
numbers in all. A *call* takes one sequence and gives decoded values, as each library ships it; the model alone, tracr's under ``jax.jit``, is
printed beside it, for one sequence and a batch. One thread each. Growth: seconds of the processor against the maximum length, and
against the number of dependent aggregates.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import reduce

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

from measure import claim, finish, medians

from anyformer import rasp
from anyformer.rasp import EQ, LEQ, LT, aggregate, indices, length, select, selector_width, tokens, where

LENGTHS = (5, 10)
BATCH = 256
GROWTH = (8, 32, 128, 512)


def shuffle_dyck(pairs: tuple[str, ...]) -> rasp.Sequence:
    """Whether no pair's balance is ever negative and all are 0 at the end; the same answer everywhere."""
    before = select(indices, indices, LEQ)
    balances = [aggregate(before, where(tokens == p[0], 1, where(tokens == p[1], -1, 0))) for p in pairs]
    negative = reduce(lambda a, b: a | b, [b < 0 for b in balances])
    zero = reduce(lambda a, b: a & b, [b == 0 for b in balances])
    return (selector_width(select(negative, True, EQ)) == 0) & aggregate(select(indices, length - 1, EQ), zero)


def ours(name: str) -> rasp.Sequence:
    """The program, built anew."""
    return {
        "length": lambda: selector_width(select(indices, indices, rasp.TRUE)),
        "reverse": lambda: aggregate(select(indices, length - 1 - indices, EQ), tokens),
        "fraction": lambda: aggregate(select(indices, indices, LEQ), where(tokens == "a", 1, 0)),
        "sort unique": lambda: aggregate(select(selector_width(select(tokens, tokens, LT)), indices, EQ), tokens),
        "histogram": lambda: selector_width(select(tokens, tokens, EQ)),
        "shuffle-Dyck": lambda: shuffle_dyck(("()", "{}")),
    }[name]()


VOCABULARY: dict[str, tuple] = {
    "length": tuple("abc"),
    "reverse": tuple("abcde"),
    "fraction": tuple("abc"),
    "sort unique": tuple(range(1, 9)),
    "histogram": tuple("abcd"),
    "shuffle-Dyck": tuple("(){}"),
}


def example(name: str, n: int) -> list:
    """An input of length n (of different tokens where the program needs that)."""
    vocab = VOCABULARY[name]
    return [vocab[(3 * i) % len(vocab)] for i in range(min(n, len(vocab)) if name == "sort unique" else n)]


def theirs(name: str):
    """tracr's library program."""
    from tracr.compiler import lib
    from tracr.rasp import rasp as their

    return {
        "length": lib.make_length,
        "reverse": lambda: lib.make_reverse(their.tokens),
        "fraction": lambda: lib.make_frac_prevs((their.tokens == "a").named("is_a")),
        "sort unique": lambda: lib.make_sort_unique(their.tokens, their.tokens),
        "histogram": lib.make_hist,
        "shuffle-Dyck": lambda: lib.make_shuffle_dyck(pairs=["()", "{}"]),
    }[name]()


def compile_ours(name: str, n: int) -> tuple:
    program = rasp.compile(ours(name), VOCABULARY[name], n)
    return program, program(example(name, n))


def compile_theirs(name: str, n: int) -> tuple:
    from tracr.compiler import compiling

    model = compiling.compile_rasp_to_model(theirs(name), set(VOCABULARY[name]), n, compiler_bos="BOS")
    return model, model.apply(["BOS", *example(name, n)]).decoded[1:]


def cold(side: str, name: str, n: int) -> None:
    """In a fresh process: print the seconds of one cold compile, the output and the sizes."""
    if side == "theirs":
        import haiku  # noqa: F401
        import jax  # noqa: F401
        from tracr.compiler import compiling, lib  # noqa: F401
    began = time.perf_counter()
    made, out = (compile_ours if side == "ours" else compile_theirs)(name, n)
    seconds = time.perf_counter() - began
    if side == "ours":
        sizes = [made.width, made.layers, max(made.units), made.parameters]
    else:
        config, numbers = made.model_config, sum(v.size for part in made.params.values() for v in part.values())
        sizes = [made.params["token_embed"]["embeddings"].shape[1], config.num_layers, config.mlp_hidden_size, numbers]
    print(json.dumps({"seconds": seconds, "out": [float(v) if isinstance(v, (int, float)) else v for v in out], "sizes": sizes}))


def fresh(side: str, name: str, n: int) -> dict:
    done = subprocess.run([sys.executable, __file__, side, name, str(n)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def same(a: list, b: list) -> bool:
    """Whether two outputs agree: tracr's numbers are float32 behind a softmax of finite scale."""
    return len(a) == len(b) and all(abs(x - y) < 1e-4 if isinstance(x, float) else x == y for x, y in zip(a, b, strict=True))


def forwards(name: str, n: int) -> dict[str, float]:
    """Median seconds, taking turns: a call on one sequence (encoded, run, decoded) of each, and the model alone on encoded ones, tracr's under
    ``jax.jit`` (its own ``apply`` is not), ours in float32 as tracr's is."""
    import jax
    import torch

    model, _ = compile_theirs(name, n)
    program = rasp.compile(ours(name), VOCABULARY[name], n)
    module = rasp.to_module(rasp.compile(ours(name), VOCABULARY[name], n, dtype="float32"))
    sequence = example(name, n)
    run = jax.jit(lambda t: model.forward(model.params, t).unembedded_output)
    rows = {size: jax.numpy.array([model.input_encoder.encode(["BOS", *sequence])] * size) for size in (1, BATCH)}
    ids = {size: program.encode([sequence] * size) for size in rows}

    def modules(size: int) -> torch.Tensor:
        with torch.no_grad():
            return module(ids[size])

    return medians(
        20,
        ours=lambda: program(sequence),
        theirs=lambda: model.apply(["BOS", *sequence]),
        ours_1=lambda: modules(1),
        theirs_jit_1=lambda: run(rows[1]).block_until_ready(),
        ours_batch=lambda: modules(BATCH),
        theirs_jit_batch=lambda: run(rows[BATCH]).block_until_ready(),
    )


def growth() -> list[bool]:
    """Seconds of the processor (a busy machine does not count) against the maximum length, and against the size of the program."""
    claims = []
    for name in VOCABULARY:
        seconds = []
        for n in GROWTH:
            seconds.append(processor_seconds(lambda n=n: rasp.compile(ours(name), VOCABULARY[name], n)))  # noqa: B023
        shown = ", ".join(f"{s:.3f}" for s in seconds)
        print(f"{name:13s} max_length {GROWTH}: {shown} s; from first to last as n^{power(GROWTH, seconds):.2f}", flush=True)
        claims.append(claim(f"{name}: seconds for {GROWTH[-1]} tokens", seconds[-1], 3.0))
    sizes, seconds = (4, 16, 64, 256), []
    for size in sizes:
        seconds.append(processor_seconds(lambda size=size: rasp.compile(chain(size), "abcd", 10)))
    times = ", ".join(f"{s:.3f}" for s in seconds)
    print(f"chains of {sizes} aggregates: {times} s; from first to last as size^{power(sizes, seconds):.2f}")
    claims.append(claim("seconds for a chain of 256 aggregates, 256 layers", seconds[-1], 10.0))
    return claims


def processor_seconds(job: Callable[[], object]) -> float:
    """Median of three."""
    times = []
    for _ in range(3):
        began = time.process_time()
        job()
        times.append(time.process_time() - began)
    return sorted(times)[1]


def chain(size: int) -> rasp.Sequence:
    """``size`` times: the token of the position before, cyclic in the first four positions; one layer each."""
    out = tokens
    for i in range(size):
        out = aggregate(select(indices, (indices + 1 + i % 3) % 10, EQ), out, default="a")
    return out


def power(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """The exponent of the growth from the first to the last size."""
    return math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])


def against_tracr() -> list[bool]:
    claims, table, wrong, total = [], [], [], {"ours": [0, 0, 0, 0], "theirs": [0, 0, 0, 0]}
    for n in LENGTHS:
        for name in VOCABULARY:
            first = {side: fresh(side, name, n) for side in ("ours", "theirs")}
            meant = rasp.interpret(ours(name), example(name, n))
            assert same(meant, first["ours"]["out"]), (name, n, first["ours"])
            if not same(meant, first["theirs"]["out"]):
                wrong.append(f"{name}, {n} tokens: {first['theirs']['out']} for {meant}")
            seconds = {side: run["seconds"] for side, run in first.items()}
            for side in first:
                total[side] = [a + b for a, b in zip(total[side], first[side]["sizes"], strict=True)]
            ratio = seconds["theirs"] / seconds["ours"]
            table.append((name, n, ratio, first["ours"]["sizes"], first["theirs"]["sizes"]))
            print(
                f"{name:13s} up to {n:2d} tokens: compile {seconds['ours']:.3f} s, tracr {seconds['theirs']:.2f} s ({ratio:.0f} times); "
                f"width, layers, units, numbers: {first['ours']['sizes']}, tracr {first['theirs']['sizes']}"
            )
    claims.append(
        claim("tracr's cold compile / ours, the least of all programs", min(row[2] for row in table), 20, at_least=True)
    )
    for i, what in enumerate(("width of the stream", "layers", "MLP units")):
        claims.append(
            claim(f"{what}: ours / tracr's, the largest of all programs", max(a[i] / max(b[i], 1) for *_, a, b in table), 1)
        )
        claims.append(claim(f"{what}: ours / tracr's, all programs together", total["ours"][i] / total["theirs"][i], 0.999))
    print(f"outputs that differ from the program's meaning: ours none, tracr's {'; '.join(wrong) or 'none'}")
    ratios = []
    for name in VOCABULARY:
        times = forwards(name, LENGTHS[-1])
        pairs = (("ours", "theirs"), ("ours_1", "theirs_jit_1"), ("ours_batch", "theirs_jit_batch"))
        ratios.append([times[b] / times[a] for a, b in pairs])
        print(f"{name:13s} up to {LENGTHS[-1]} tokens: " + ", ".join(f"{side} {1e3 * s:.2f} ms" for side, s in times.items()))
    least = [min(column) for column in zip(*ratios, strict=True)]
    claims.append(claim("tracr's apply / our call on one sequence, the least of all programs", least[0], 10, at_least=True))
    print(
        f"tracr under jax.jit / our module, the least of all programs: one sequence {least[1]:.2f}, a batch of {BATCH} {least[2]:.2f}"
    )
    return claims


if __name__ == "__main__":
    if len(sys.argv) == 4:
        cold(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        sys.exit()
    claims = growth()
    try:
        import tracr  # noqa: F401
    except ImportError:
        print("tracr is not installed (pip install 'anyformer[bench]'): the claims against it were not checked")
    else:
        claims += against_tracr()
    finish(*claims)
