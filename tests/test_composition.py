"""Known composition: the tree of a declared graph is the target, outputs and patterns, and its width is that of the graph.

Targets are random networks many of whose products are exactly zero: every branch reads and writes a few features of its own.
"""

import json
from functools import cache
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyformer as af
from anyformer.backbones import Composed, Composition, PathTree, folding
from anyformer.backbones.composed import ComposedRecipe
from anyformer.backbones.composed_tree import ComposedTree
from anyformer.backbones.composition import Ports, product_sizes
from anyformer.backbones.layouts import enumerate_composed_names
from anyformer.cli import main
from anyformer.conformance import close
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LinearMap, LowRankMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Cache, Causal, Gate, Identity, Normed, RMSNorm
from anyformer.targets.reading import network_class, read

README = Path(__file__).parent.parent / "README.md"
D = 4
KINDS = (
    "attention only",
    "residual",
    "residual bias",
    "carrier",
    "pre-norm",
    "pre-norm bias",
    "post-norm",
    "gates",
    "two residuals",
)


class Scattered:
    """A random network of a kind whose branches read and write random features; some exact zeros in every product."""

    def __init__(self, kind: str, heads: int, layers: int, seed: int, share: float):
        self.kind, self.heads, self.share = kind, heads, share
        self.generator = torch.Generator().manual_seed(seed)
        self.constant = kind in ("residual bias", "carrier", "pre-norm bias", "post-norm", "gates")
        self.width = D + self.constant
        stages = [stage for _ in range(layers) for stage in self.layer()]
        table, places = self.draw(3, D) * self.some(D), self.draw(4, D) * self.some(D)
        if self.constant:
            table, places = torch.cat((table, torch.ones(3, 1)), 1), torch.cat((places, torch.zeros(4, 1)), 1)
        self.network = Network(
            table, tuple(stages), self.masked(self.width, 3), places if seed % 2 else None, constant=self.constant
        )

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def some(self, size: int) -> torch.Tensor:
        return (torch.rand(size, generator=self.generator) < self.share).double()

    def masked(self, rows: int, columns: int) -> torch.Tensor:
        return self.draw(rows, columns) * self.some(rows)[:, None] * self.some(columns)

    def written(self, rows: int) -> torch.Tensor:
        """A map that writes some features, never the constant one."""
        matrix = self.masked(rows, self.width) / 2
        if self.constant:
            matrix[:, -1] = 0
        return matrix

    def maps(self, count: int) -> LinearMap:
        if torch.rand(1, generator=self.generator) < 0.5:
            return DenseMap(torch.stack([self.written(self.width) for _ in range(count)]))
        left = torch.stack([self.masked(self.width, 2) for _ in range(count)])
        return LowRankMap(left, torch.stack([self.written(2) for _ in range(count)]))

    def residual(self) -> Branch:
        shift = self.written(1)[0] if self.constant and torch.rand(1, generator=self.generator) < 0.7 else None
        return Branch(Identity(), None, IdentityMap(self.width, shift))

    def carrier(self) -> Branch:
        row = self.written(1)
        row[:, -1] = 1
        return Branch(Identity(), None, ConstantMap(self.width, row))

    def attention(self) -> Branch:
        operator = Attention(self.heads, 2, mask=Causal())
        if self.kind.startswith("pre-norm"):
            operator = Normed(operator, RMSNorm(D, 0.1), bias=self.constant)
        probes = torch.stack([self.masked(self.width, operator.reads) for _ in range(self.heads)], 1)
        probes[:-1, :, list(operator.constant_reads)] = 0
        return Branch(operator, probes.flatten(1), self.maps(self.heads))

    def layer(self) -> list[Stage]:
        heads = self.attention()
        shared = self.masked(self.width, D) if heads.operator.shared else None
        match self.kind:
            case "attention only":
                return [Stage((heads,))]
            case "carrier":
                return [Stage((heads, self.carrier()))]
            case "post-norm":
                norm = Branch(RMSNorm(D, 0.1), self.masked(self.width, D), DenseMap(self.written(self.width)[None]))
                return [Stage((self.residual(), heads)), Stage((norm, self.carrier()))]
            case "gates":
                rows = torch.cat((self.written(1), self.written(1)))
                plain = Branch(Gate(2, "sigmoid"), self.masked(self.width, 2), ConstantMap(self.width, rows))
                gated = Branch(Gate(2, "sigmoid"), self.masked(self.width, 2), self.maps(2))
                return [Stage((heads, self.residual())), Stage((plain, self.residual(), gated))]
            case "two residuals":
                return [Stage((self.residual(), heads, self.residual()))]
        return [Stage((self.residual(), heads), shared)]


def scattered(kind: str, heads: int = 2, layers: int = 2, seed: int = 0, share: float = 0.5) -> Network:
    return Scattered(kind, heads, layers, seed, share).network


def inputs(network: Network, seed: int = 0):
    tokens = torch.randint(3, (3, 4), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, :2] = mask[2, 3:] = False
    return dict(tokens=tokens), dict(tokens=tokens, mask=mask)


def composed(target, tolerance: float = 0.0) -> Composed:
    return Composed.for_class(target, composition=Composition.of(target, tolerance))


# --- the theorem --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=max(8, settings.default.max_examples // 3))
@given(
    heads=st.integers(1, 3),
    layers=st.integers(1, 2),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.8, 0.5, 0.3]),
)
def test_every_form_is_the_target(kind, heads, layers, seed, share):
    network = scattered(kind, heads, layers, seed, share)
    machine = composed(network)
    full = PathTree.for_class(network)
    program = af.compile(network, machine)
    literal = machine.literal() if machine.width <= 200 else None
    for batch in inputs(network, seed):
        patterns: list[torch.Tensor] = []
        expected = network.run(**batch, patterns=patterns)
        trace = machine.trace(**batch, program=program)
        close(trace.logits, expected)
        close(trace.patterns, patterns)
        if literal is not None:
            seen: list[torch.Tensor] = []
            close(literal(**batch, program=program, patterns=seen), expected)
            close(seen, patterns)
    columns, places = machine.tree_columns(program)
    theirs = af.compile(network, full)
    close(columns, theirs.embedding, 1e-12)  # what has no coordinate is 0 in the path tree
    everything = ComposedTree(machine.network_class, Composition())
    at = [i for _, to, n in machine.tree.inside(everything, 0, machine.tree.first, -1) for i in range(to, to + n)]
    constant = full.tree.constant_columns()[at].nonzero()[:, 0]
    assert constant.tolist() == ([] if program.constant_at is None else program.constant_at.tolist())
    assert (places is None) == (theirs.position_embedding is None)
    if places is not None:
        close(places, theirs.position_embedding, 1e-12)
    assert machine.width <= full.width


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_layout_is_the_walk_of_the_graph(kind, seed):
    """Width, blocks and coordinates against names that are enumerated path by path; costs against the dense matrices."""
    network = scattered(kind, seed=seed)
    machine = composed(network)
    names = enumerate_composed_names(machine.network_class, machine.recipe.composition)
    assert machine.width == len(names) == machine.tree.total
    blocks = list(machine.blocks())
    assert [b.start for b in blocks] == [sum(c.count for c in blocks[:i]) for i in range(len(blocks))]
    assert sum(b.count for b in blocks) == machine.width
    seen = [machine.coordinate(i) for i in range(machine.width)]
    assert len(set(map(str, seen))) == machine.width
    assert [len(c.path) for c in seen] == [len(name[1]) for name in names]
    assert [c.path for c in seen] == [b.path for b in blocks for _ in range(b.count)]
    cost = machine.cost(5)
    assert cost.nonzero_weights == sum(int(m.count_nonzero()) for m in machine.literal().matrices().values())
    assert (cost.width, cost.state, cost.bytes) == (machine.width, 5 * machine.width, 4 * machine.width)
    for s, step in enumerate(machine.tree.plan.steps):
        assert sum(segment.length for segment in step.segments) == machine.tree.width(s + 1, machine.tree.roots[s + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_literal_matrices_are_zeros_and_ones(kind):
    literal = composed(scattered(kind, seed=4)).literal()
    for matrix in literal.matrices().values():
        assert bool(((matrix == 0) | (matrix == 1)).all())
    for layer in literal.layers:
        for bank in layer.banks:
            routes = bank.R_V if hasattr(bank, "R_V") else torch.stack((bank.up.T, bank.down))
            assert not routes.numel() or int(routes.sum(-1).max()) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_structure_is_read_off_by_its_definition(kind, seed):
    """Port by port against dense matrix products, written down from the definition."""
    network = scattered(kind, seed=seed)
    composition, ports = Composition.of(network), Ports(network.network_class)
    assert composition.feeds is not None

    def matrices(s: int, bank: int) -> torch.Tensor:
        branch = network.stages[s].branches[bank]
        dense = branch.map.to_dense().double()
        return dense - torch.eye(dense.shape[1]) if network.network_class.stages[s].branches[bank].is_residual else dense

    for writer, ranges in zip(ports.all_writers(), composition.feeds, strict=True):
        rows = [network.embedding] + ([] if network.positions is None else [network.positions])
        written = torch.cat(rows) if writer.what == "embedding" else matrices(writer.stage, writer.bank)[writer.branch]
        for reader, first, last in ports.readers(writer.stage):
            if reader.what == "outputs":
                products = (written @ network.readout).T
            elif reader.what == "norm":
                products = (written @ network.stages[reader.stage].shared).T
            elif reader.what == "reads":
                own = network.stages[reader.stage].branches[reader.bank].probes.unflatten(1, (-1, last - first))
                products = (written @ own[:, reader.branch]).T
            else:
                products = (written @ matrices(reader.stage, reader.bank)[reader.branch])[None].flatten(1)
            fed = [bool(row.any()) for row in products]
            assert fed == [any(a <= i < b for a, b in ranges) for i in range(first, last)], (writer, reader)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_declaration_it_is_the_path_tree(kind):
    network = scattered(kind, seed=1)
    machine, full = Composed.for_class(network), PathTree.for_class(network)
    assert machine.recipe.composition == Composition() and machine.width == full.width
    assert machine.cost(3) == full.cost(3)
    mine, theirs = af.compile(network, machine), af.compile(network, full)
    assert torch.equal(mine.embedding, theirs.embedding)
    for batch in inputs(network):
        assert torch.equal(machine(**batch, program=mine), full(**batch, program=theirs))
    if kind != "two residuals":  # the path tree keeps one skip
        assert torch.equal(machine.literal().U, full.literal().U)
    assert [b.start for b in machine.blocks()] == [b.start for b in full.blocks() if b.count]


def test_a_dense_target_needs_all_paths():
    target = af.Transformer(vocab=3, heads=2, layers=3, head_dim=2, features=4)
    assert Composition.of(target) == Composition() == Composition.where(target, lambda writer, reader: True)
    everything = Composition.where(target, lambda writer, reader: True, tolerance=0.5)
    assert everything == Composition(None, 0.5)


def test_a_target_that_says_nothing_needs_no_width():
    network = scattered("residual")
    silent = Network(network.embedding, network.stages, torch.zeros(D, 3, dtype=torch.float64))
    machine = Composed.for_class(silent, composition=Composition.of(silent))
    assert not any(b.what == "output" for b in machine.blocks())
    tokens = torch.tensor([[0, 2, 1]])
    close(machine(tokens, af.compile(silent, machine)), torch.zeros(1, 3, 3, dtype=torch.float64))
    nothing = Composed.for_class(silent, composition=Composition.where(silent, lambda writer, reader: False))
    assert nothing.width == 0 and list(nothing.blocks()) == []
    with pytest.raises(OutsideClass, match="the embedding feeds"):
        af.compile(silent, nothing)


# --- the class whose width falls from H^L to linear ---------------------------------------------------------------------------


@cache
def parallel_chains(heads: int, layers: int, block: int = 2, **options) -> af.Transformer:
    """A transformer whose head h reads and writes the h-th block of features alone, with logits of moderate size."""
    size = heads * block
    sizes = dict(vocab=5, heads=heads, layers=layers, head_dim=2, features=size, value_dim=block) | options
    target = af.Transformer(**sizes).double()
    generator = torch.Generator().manual_seed(heads + layers)
    own = torch.arange(size)[None] // block  # the block of a feature
    with torch.no_grad():
        for parameter in target.parameters():
            scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        target.embedding.weight *= size**0.5
        for layer in target.blocks:
            a = layer.attention
            for linear, width in ((a.W_Q, 2), (a.W_K, 2), (a.W_V, block), (a.W_O, block)):
                linear.weight *= (torch.arange(len(linear.weight)) // width)[:, None] == own
            for linear in (a.W_V, a.W_O):  # orthogonal, so that deep chains keep their size
                left, _, right = torch.linalg.svd(linear.weight)
                linear.weight.copy_((left @ right) * (own == own.T))
    return target


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 9, 12])
def test_parallel_chains_have_linear_width(layers):
    """2Hd + H ((L - 1) 2d + d_in), where the path tree has 2Hd (H^L - 1)/(H - 1) + H^L d_in."""
    H, d, d_in = 3, 2, 5
    target = parallel_chains(H, layers)
    declared = Composition.chains(target)
    assert Composition.of(target) == declared
    machine = Composed.for_class(target, composition=declared)
    assert machine.width == 2 * H * d + H * ((layers - 1) * 2 * d + d_in)
    assert PathTree.width_of(PathTree.recipe_for(network_class(target))) == H * 2 * d * (H**layers - 1) // 2 + H**layers * d_in
    af.verify(af.compile(target, machine), target, sequences=1, length=4).raise_if_not()


def test_the_readme_states_the_width():
    config = af.TransformerConfig(vocab=30, heads=2, layers=4, head_dim=30, features=30)
    machine = Composed.for_class(config, composition=Composition.chains(config))
    assert f"| 2280 if everything feeds everything, {machine.width} for two parallel chains |" in README.read_text(
        encoding="utf-8"
    )


def test_forty_layers_of_four_heads():
    target = parallel_chains(4, 40)
    machine = Composed.for_class(target, composition=Composition.of(target))
    assert machine.width == 4 * (40 * 4 + 5) and "width 660, all paths: 1.2e+25" in repr(machine)
    verdict = af.verify(af.compile(target, machine), target, sequences=1, length=3).raise_if_not()
    assert verdict.patterns % 160 == 0
    with torch.no_grad():
        assert 1e-2 < float(target(torch.tensor([[0, 1, 2]])).abs().max()) < 1e2


def test_declared_chains_with_a_residual_are_polynomial():
    """The residual passes everything on, but a head's output goes to the next layer's head and to the outputs alone: one path for
    every head and every two layers, where it starts and where it ends."""
    H, d, d_in = 4, 2, 6
    for L in (1, 10, 40):
        config = af.TransformerConfig(vocab=d_in, heads=H, layers=L, head_dim=d, features=8, residual=True)
        recipe = Composed.recipe_for(network_class(config), Composition.chains(config))
        paths = H * (d_in * L * (L + 1) // 2 + 2 * d * L * (L - 1) // 2)
        assert Composed.cost_of(recipe, 1).width == 2 * H * d * L + d_in + paths


# --- targets of our own, verified against their own forward -------------------------------------------------------------------

OWN = {
    "rope residual": dict(residual=True, positions="rope"),
    "pre-norm gated": dict(residual=True, norm="rms", mlp=2, gated=True),
    "learned": dict(residual=True, positions="learned", max_length=6),
    "gpt": dict(residual=True, norm="layer", bias=True, mlp=1, positions="learned", max_length=6),
    "post-norm": dict(residual=True, norm="rms", norm_position="post"),
    "hard alibi": dict(attention="hard", positions="alibi"),
}


@pytest.mark.parametrize("kind", OWN)
def test_zeroed_transformers_are_verified(kind):
    target = parallel_chains(2, 2, **OWN[kind])
    machine, full = composed(target), PathTree.for_class(target)
    assert machine.width < full.width
    program = af.compile(target, machine)
    af.verify(program, target, sequences=2, length=6).raise_if_not()
    single = af.compile(target, machine, dtype=torch.float32)
    assert torch.equal(single.embedding, program.embedding.float())


def test_specialise_from_the_narrow_program(tmp_path):
    target = parallel_chains(2, 2, residual=True, norm="rms")
    program = af.compile(target, composed(target))
    program.save(tmp_path / "p")
    again = af.load(tmp_path / "p")
    tokens = torch.tensor([[0, 4, 2, 2]])
    assert torch.equal(af.run(again, tokens), af.run(program, tokens)) and again.machine() == program.machine()
    fast = af.specialize(again)
    close(fast(tokens), target(tokens), 1e-9)
    assert isinstance(fast, af.Transformer) and fast.config.features == target.config.features


def test_gradients_are_those_within_the_class():
    """As functions of the weights that the structure leaves free: a product that is declared zero has no gradient."""
    network = read(parallel_chains(2, 2, residual=True))
    residual, heads = network.stages[1].branches
    table = network.embedding.detach().clone().requires_grad_()
    probes = heads.probes.detach().clone().requires_grad_()
    free = Branch(heads.operator, probes * (heads.probes.detach() != 0), heads.map)
    target = Network(table, (network.stages[0], Stage((residual, free))), network.readout)
    machine, tokens = composed(target), torch.tensor([[0, 4, 2, 2]])
    weights = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)
    outputs = machine(tokens, af.compile(target, machine)), target.run(tokens)
    through, own = (torch.autograd.grad((y * weights).sum(), (table, probes), retain_graph=True) for y in outputs)
    close(through, own, 1e-9)
    assert all(bool(g.any()) for g in through)


def test_a_batch_is_run_in_blocks_of_rows(monkeypatch):
    network = scattered("gates", seed=3)
    machine = composed(network)
    program, batch = af.compile(network, machine), inputs(network)[1]
    together = machine(**batch, program=program)
    monkeypatch.setattr(folding, "BLOCK_BYTES", 4 * machine.width * 4)
    close(machine(**batch, program=program), together, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_go_on_from_a_cache(kind):
    """Heads whose children differ are contracted in parts, each of which remembers its own values."""
    network = scattered(kind, heads=3, seed=7)
    machine = composed(network)
    program, batch = af.compile(network, machine), inputs(network)[1]
    cache = Cache()
    steps = [{k: v[:, a:b] for k, v in batch.items()} for a, b in ((0, 1), (1, 3), (3, 4))]
    logits = torch.cat([machine(**step, program=program, cache=cache) for step in steps], 1)
    close(logits[batch["mask"]], machine(**batch, program=program)[batch["mask"]])


def test_the_path_tree_of_a_wide_class_is_refused_by_memory():
    target = parallel_chains(4, 40)
    program = af.compile(target, composed(target))
    with pytest.raises(AnyformerError, match=r"this program in the 1\.2e\+25 columns of the path tree needs .* of memory"):
        af.specialize(program)


# --- declarations -------------------------------------------------------------------------------------------------------------


def test_a_wrong_declaration_is_refused_with_the_products():
    target = af.Transformer(vocab=5, heads=3, layers=2, head_dim=2, features=6).double()
    machine = Composed.for_class(target, composition=Composition.chains(target))
    message = (
        r"outside of the declared composition: 12 products should be zero: head \d of layer 1 attention feeds the (reads|value) of "
        r"head \d of layer 2 attention \(relative size \d\.\de-0\d\); .*; and 7 more$"
    )
    with pytest.raises(OutsideClass, match=message) as refusal:
        af.compile(target, machine)
    assert len(refusal.value.reasons) == 6


def test_one_wrong_product_is_named():
    target = parallel_chains(3, 2)
    machine, wrong = composed(target), parallel_chains.__wrapped__(3, 2)
    with torch.no_grad():
        wrong.blocks[1].attention.W_Q.weight[4, 0] = 1e-7  # head 3 reads the block of head 1
    assert Composition.of(wrong) != Composition.of(target)
    message = r"1 products should be zero: head 1 of layer 1 attention feeds the reads of head 3 of layer 2 attention \(relative size \d"
    with pytest.raises(OutsideClass, match=message):
        af.compile(wrong, machine)


def test_targets_outside_of_the_class_are_refused_as_by_every_machine():
    machine = composed(parallel_chains(3, 2))
    with pytest.raises(OutsideClass, match="outside of the class of this composition machine: 3 stages, the machine has 2"):
        af.compile(parallel_chains(3, 3), machine)


def test_a_tolerance_neglects_and_says_how_much():
    """Products that are zero but for rounding cost no exactness; larger ones are an approximation, and verification says so."""
    exact = parallel_chains(3, 3)
    for noise, passes in ((1e-15, True), (1e-3, False)):
        noisy = parallel_chains.__wrapped__(3, 3)
        with torch.no_grad():
            for layer in noisy.blocks:
                layer.attention.W_O.weight += noise * torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)
        assert Composition.of(noisy) == Composition()
        machine = composed(noisy, tolerance=10 * noise)
        assert machine.width == composed(exact).width and machine != composed(exact)
        program = af.compile(noisy, machine)
        neglected = program.provenance["largest_neglected_product"]
        assert 0 < neglected <= 10 * noise and program.provenance["neglected_products"] == 24
        verdict = af.verify(program, noisy, sequences=2, length=5)
        assert verdict.passed is passes and verdict.max_abs_error < 100 * noise
        with pytest.raises(OutsideClass, match="24 products should be zero"):
            af.compile(noisy, composed(exact))
    assert "neglected_products" not in af.compile(exact, composed(exact)).provenance


def test_relative_sizes_are_products_of_norms():
    network = scattered("residual")
    matrix = network.stages[0].branches[1].map.to_dense()[1]
    probes = network.stages[1].branches[1].probes
    sizes = next(sizes for writer, sizes in product_sizes(network) if (writer.stage, writer.bank, writer.branch) == (0, 1, 1))
    expected = (matrix @ probes).norm(dim=0) / (matrix.norm() * probes.norm(dim=0))
    close(sizes[: probes.shape[1]], expected.nan_to_num(nan=0.0), 1e-12)


def test_underflow_is_no_zero():
    network = af.Network(
        torch.full((2, 2), 1e-170, dtype=torch.float64), (), torch.full((2, 1), 1e-110, dtype=torch.float64)
    )  # the product is 2e-280, its square no number
    assert Composition.of(network) == Composition()


def test_json_round_trip(tmp_path):
    machine = composed(scattered("pre-norm bias", seed=2))
    again = ComposedRecipe.from_json(json.loads(json.dumps(machine.recipe.to_json())))
    assert again == machine.recipe and hash(again) == hash(machine.recipe) and again.digest() == machine.fingerprint
    assert again.machine() == machine and again.machine_width() == machine.width
    other = ComposedRecipe(machine.network_class, Composition())
    assert other != machine.recipe and other.digest() != machine.fingerprint


TWO = af.TransformerConfig(vocab=5, heads=2, layers=2, head_dim=2, features=4)
REFUSALS = {
    r"Composition: tolerance must be a number in \[0, 1\), got 1$": lambda: Composition(tolerance=1),
    r"Composition: tolerance must be a number in \[0, 1\), got True": lambda: Composition(tolerance=True),
    r"Composition: tolerance must be .*, got 'no'": lambda: Composition.of(af.Transformer(TWO), "no"),
    r"Composition: feeds must be a tuple of ranges for every writer, or None, got 7": lambda: Composition(7),
    r"Composition: writer 1 needs ranges .* apart from each other, got \(\(0, 2\), \(2, 3\)\)": lambda: Composition(
        ((), ((0, 2), (2, 3)))
    ),
    r"Composition: writer 0 needs ranges .*, got \(\(3, 3\),\)": lambda: Composition((((3, 3),),)),
    r"Composition: writer 0 needs ranges .*, got \(\(-1, 3\),\)": lambda: Composition((((-1, 3),),)),
    r"Composition: writer 0 needs ranges .*, got \(\(0, 1.5\),\)": lambda: Composition((((0, 1.5),),)),
    r"another class: it has 2 writers, the class has 5 \(the embedding and every branch\)": lambda: Composed.for_class(
        TWO, composition=Composition(((), ()))
    ),
    r"another class: head 2 of layer 1 attention feeds port 11, it reaches 10 ports": lambda: Composed.for_class(
        TWO, composition=Composition(((), (), ((0, 11),), (), ()))
    ),
    r"parallel chains need attention-only stages: stage 2 is more than one bank of bare heads": lambda: Composition.chains(
        af.TransformerConfig(vocab=5, heads=2, layers=1, head_dim=2, features=4, residual=True, mlp=1, gated=True)
    ),
    r"a composition machine takes no option width; it takes composition": lambda: Composed.for_class(TWO, width=3),
    r"Composed is made from a recipe, got NetworkClass": lambda: Composed(network_class(TWO)),
    r"coordinate must lie in 0\.\.25, got 26": lambda: Composed.for_class(TWO, composition=Composition.chains(TWO)).coordinate(
        26
    ),
    r"composition must be a Composition, got 'chains'": lambda: Composed.for_class(TWO, composition="chains"),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    jaxtyping.config.update("jaxtyping_disable", True)  # what a user meets
    try:
        with pytest.raises(AnyformerError, match=message):
            REFUSALS[message]()
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_a_huge_declared_class_costs_no_memory():
    config = af.TransformerConfig(vocab=50, heads=12, layers=30, head_dim=64, features=768, residual=True)
    known = network_class(config)
    declared = Composition.where(known, lambda writer, reader: reader.what == "outputs" or writer.what == "embedding")
    tree = ComposedTree(known.for_tree(), declared)
    assert tree.total == 30 * 12 * (128 + 50) + 50  # every layer reads the embedding, every head feeds the outputs


# --- on the command line ------------------------------------------------------------------------------------------------------


def call(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_line(capsys, tmp_path):
    target = parallel_chains(3, 4)
    target.save(tmp_path / "t")
    compile_it = ("compile", tmp_path / "t", "--backbone", "composition", "-o")
    code, out, _ = call(capsys, *compile_it, tmp_path / "p")
    assert code == 0 and "width 63, all paths: 885" in out.replace("\n", " ") and "verification passed" in out
    code, out, _ = call(capsys, *compile_it, tmp_path / "p", "--json")
    assert code == 0 and (json.loads(out)["width"], json.loads(out)["path_tree_width"]) == (63, 885)
    assert call(capsys, "verify", tmp_path / "p", tmp_path / "t")[0] == 0
    code, out, _ = call(capsys, "inspect", tmp_path / "p")
    assert code == 0 and "head 3, head 3, head 3, head 3" in out
    with torch.no_grad():
        noisy = parallel_chains.__wrapped__(3, 4)
        for layer in noisy.blocks:
            layer.attention.W_O.weight += 1e-3
    noisy.save(tmp_path / "n")
    rough = ("compile", tmp_path / "n", "-o", tmp_path / "q", "--composition-tolerance", "0.1")
    code, out, _ = call(capsys, *rough, "--backbone", "composition")
    assert code == 1 and "verification FAILED" in out and "largest neglected product: 0.00" in out
    assert af.load(tmp_path / "q").report["passed"] is False
    code, _, err = call(capsys, *rough)
    assert code == 2 and "a path-tree machine takes no option composition" in err
    code, out, _ = call(capsys, "cost", "--heads", "2", "--layers", "4", "--head-dim", "30", "--features", "30")
    assert code == 0 and "if everything feeds everything" in out
