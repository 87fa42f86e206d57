"""Conformance: name an operator or a task, inherit the suite of laws that every one keeps.

    class TestMyOperator(OperatorConformance):          class TestMyTask(TaskConformance):
        operator = MyOperator(...)                          task = MyTask(...)
                                                            sha256 = "..."  # of one batch; the failing test says which

The laws of an operator: a value (JSON, hash, digest); linear in the values, ``contract = sum_g apply_g``, part by part; rows of a
pattern sum to 1; batch rows do not see each other; padding is neutral; float32 agrees with float64; gradients stay finite. And the
theorem itself: a network with this operator beside a residual branch runs equally as :meth:`Network.run`, as the folded path tree, as
a stored program, and as the literal 0/1 machines of both; where the operator says that it is cacheable, from a cache as well.

The laws of a task: a value; rows that depend on seed, index and row alone, the same bytes for ever; ids and names that fit; a held-out
set that does not change; accuracies of 1 for the labels and 0 for anything else.
"""

import dataclasses
import hashlib
import json
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.backbones import Looped, PathTree, StoredProgram
from anyformer.classes import inner_operator
from anyformer.compiling import compile
from anyformer.errors import AnyformerError
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LinearMap, LowRankMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, Cache, Context, Gate, Identity, Operator
from anyformer.spec import Spec
from anyformer.tasks import HELD_OUT, Batch, Task

LENGTH, FEATURES, VOCAB, OUTPUTS = 5, 4, 6, 3


def close(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Equal to ``rtol = atol = tolerance``; NaN is never equal."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


class OperatorConformance:
    """The laws of an operator, as tests. A subclass names an ``operator`` and, where it reads only numbers of some kind
    (positive, integers), overrides :meth:`probes`; everything a test feeds to the operator is made from those."""

    operator: Operator

    def probes(self, generator: torch.Generator, shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        """Random numbers in float64 that the operator may read."""
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # --- what the tests are made of ---------------------------------------------------------------------------------------

    def reads(
        self, generator: torch.Generator, batch: int = 3, n: int = LENGTH
    ) -> tuple[Float[Tensor, "batch n shared"] | None, Float[Tensor, "batch n count reads"]]:
        """Shared and own probes of a batch."""
        op = self.operator
        shared = self.probes(generator, (batch, n, op.shared)) if op.shared else None
        return shared, self.probes(generator, (batch, n, op.count, op.reads))

    def values(self, generator: torch.Generator, batch: int = 3, n: int = LENGTH) -> Float[Tensor, "batch n count columns"]:
        """Values for every branch."""
        return torch.randn(batch, n, self.operator.count, 3, generator=generator, dtype=torch.float64)

    def network(self, generator: torch.Generator) -> Network:
        """A few stages ``X <- X + sum_g Op_g(X P_g) X M_g``, by hand; with the constant feature where biases need it."""
        op = self.operator
        constant = bool(op.constant_reads)
        width = FEATURES + constant

        def matrix(*shape: int) -> Tensor:
            return self.probes(generator, shape) / shape[-2] ** 0.5

        def table(rows: int, last: float) -> Tensor:
            numbers = self.probes(generator, (rows, FEATURES))
            return torch.cat((numbers, numbers.new_full((rows, 1), last)), 1) if constant else numbers

        def kept(columns: Tensor) -> Tensor:
            return torch.cat((columns[..., :-1], 0 * columns[..., -1:]), -1) if constant else columns

        def stage(linear_map: LinearMap) -> Stage:
            own = matrix(width, op.count * op.reads).unflatten(1, (op.count, op.reads))
            own[:-1, :, list(op.constant_reads)] = 0
            bank = Branch(op, own.flatten(1) if op.reads else None, linear_map)
            residual = Branch(Identity(), None, IdentityMap(width))
            return Stage((residual, bank), matrix(width, op.shared) if op.shared else None)

        first = DenseMap(kept(matrix(op.count, width, width)))
        second = LowRankMap(matrix(op.count, width, 2), kept(matrix(op.count, 2, width)))
        return Network(
            embedding=table(VOCAB, 1.0),
            positions=table(LENGTH, 0.0),
            # two stages of one class, so that a looped machine holds them; with biases, two times two
            stages=(stage(first), stage(ConstantMap(width, kept(matrix(op.count, width))))) * 2
            if constant
            else (stage(first), stage(second)),
            readout=matrix(width, OUTPUTS),
            constant=constant,
        )

    # --- a value ----------------------------------------------------------------------------------------------------------

    def test_is_a_value(self) -> None:
        again = Operator.from_json(json.loads(json.dumps(self.operator.to_json())))
        assert again == self.operator and again is not self.operator
        assert hash(again) == hash(self.operator)
        assert again.digest() == self.operator.digest()

    def test_every_field_counts(self) -> None:
        for changed in _neighbours(self.operator):
            assert changed != self.operator, f"{changed} equals {self.operator}"
            assert changed.digest() != self.operator.digest(), f"{changed} has the digest of {self.operator}"

    def test_reads_are_named(self) -> None:
        op = self.operator
        assert op.count >= 1 and op.reads >= 0 and op.shared >= 0 and op.noun
        assert len({op.read_name(i) for i in range(op.reads)}) == op.reads
        assert set(op.constant_reads) <= set(range(op.reads))

    # --- a linear map on tokens -------------------------------------------------------------------------------------------

    def test_shapes(self) -> None:
        generator = _seeded(1)
        for ctx in (_context(None), _context(_padding())):
            token_map, values = self.operator(*self.reads(generator), ctx), self.values(generator)
            assert token_map.apply(values).shape == values.shape
            assert token_map.contract(values).shape == (3, LENGTH, 3)
            if token_map.pattern is not None:
                assert token_map.pattern.shape == (3, self.operator.count, LENGTH, LENGTH)

    def test_is_linear_in_the_values(self) -> None:
        generator = _seeded(2)
        token_map = self.operator(*self.reads(generator), _context(_padding()))
        x, y = self.values(generator), self.values(generator)
        close(token_map.apply(2.0 * x - 3.0 * y), 2.0 * token_map.apply(x) - 3.0 * token_map.apply(y), 1e-12)
        total = token_map.apply(x).sum(2)
        close(token_map.contract(x), total, 1e-12)
        close(token_map.contract(x, onto=y[:, :, 0]), total + y[:, :, 0], 1e-12)
        middle = (self.operator.count + 1) // 2
        first, rest = token_map.part(0, middle).apply(x[:, :, :middle]), x[:, :, middle:]
        if rest.shape[2]:
            first = torch.cat((first, token_map.part(middle, self.operator.count).apply(rest)), 2)
        close(first, token_map.apply(x), 1e-12)

    def test_rows_of_a_pattern_sum_to_one(self) -> None:
        token_map = self.operator(*self.reads(_seeded(3)), _context(_padding()))
        if token_map.pattern is None:
            return
        assert not token_map.pattern[~_padding()[:, None, None].expand_as(token_map.pattern)].any(), "padding is attended to"
        if inner_operator(self.operator).stochastic:
            sums = token_map.pattern.sum(-1)
            close(sums, sums.ne(0).to(sums.dtype), 1e-12)
            assert bool(sums[0].ne(0).all()), "a row is empty although nothing is padded"

    def test_rows_of_the_batch_are_independent(self) -> None:
        generator = _seeded(4)
        (shared, own), values, ctx = self.reads(generator), self.values(generator), _context(_padding())
        together = self.operator(shared, own, ctx).apply(values)
        for i in range(3):
            one = slice(i, i + 1)
            part = None if shared is None else shared[one]
            alone = self.operator(part, own[one], Context(ctx.positions[one], _padding()[one]))
            close(alone.apply(values[one]), together[one], 1e-12)

    def test_padding_is_neutral(self) -> None:
        generator = _seeded(5)
        for left, right in ((2, 0), (0, 2), (1, 1)):
            n = LENGTH - left - right
            (shared, own), values = self.reads(generator), self.values(generator)
            real = slice(left, left + n)
            mask = torch.zeros(3, LENGTH, dtype=torch.bool)
            mask[:, real] = True
            padded = self.operator(shared, own, _context(mask))
            plain = self.operator(None if shared is None else shared[:, real], own[:, real], _context(None, n))
            close(padded.apply(values)[:, real], plain.apply(values[:, real]), 1e-12)
            if plain.pattern is not None:
                close(padded.pattern[..., real, real], plain.pattern, 1e-12)

    # --- arithmetic -------------------------------------------------------------------------------------------------------

    def test_float32_agrees_with_float64(self) -> None:
        generator = _seeded(6)
        (shared, own), values = self.reads(generator), self.values(generator)
        shared, own, values = (None if t is None else t.float() for t in (shared, own, values))
        assert own is not None and values is not None
        ctx = _context(_padding())
        single = self.operator(shared, own, ctx).apply(values)
        double = self.operator(None if shared is None else shared.double(), own.double(), ctx).apply(values.double())
        assert single.dtype == torch.float32
        torch.testing.assert_close(single, double.float())

    def test_gradients_are_finite(self) -> None:
        generator = _seeded(7)
        nothing = _padding()
        nothing[1] = False
        for mask in (None, nothing):
            (shared, own), values = self.reads(generator), self.values(generator).requires_grad_()
            probes = [t.requires_grad_() for t in (shared, own) if t is not None and t.numel()]
            token_map = self.operator(shared, own, _context(mask))
            if mask is not None and token_map.pattern is not None:
                assert not token_map.pattern[1].any(), "a sequence of padding alone is attended to"
            result = token_map.apply(values).square().sum() + token_map.contract(values).sum()
            for gradient in torch.autograd.grad(result, [values, *probes], allow_unused=True):
                assert gradient is None or bool(torch.isfinite(gradient).all())

    # --- the theorem ------------------------------------------------------------------------------------------------------

    def test_network_tree_and_literal_agree(self) -> None:
        generator = _seeded(8)
        network = self.network(generator)
        machine, looped = PathTree.for_class(network), Looped.for_class(network)
        program, loop = compile(network, machine), compile(network, looped)
        tokens = torch.randint(VOCAB, (3, LENGTH), generator=generator)
        inner = inner_operator(self.operator)
        layouts = ("folded",) if isinstance(inner, Gate) else ("folded", "masked")
        stored = StoredProgram.for_class(network)
        constants = compile(network, stored)
        for mask in (None, _padding()):
            patterns: list[Tensor] = []
            expected = network.run(tokens, mask=mask, patterns=patterns)
            trace = machine.trace(tokens, program, mask=mask)
            close(trace.logits, expected)
            close(trace.patterns, patterns)
            close(looped(tokens, loop, mask=mask), expected)
            close(stored(tokens, constants, mask=mask), expected)
            close(stored.literal()(tokens, constants, mask=mask), expected)
            close(looped.literal()(tokens, loop, mask=mask), expected)
            for layout in layouts:
                seen: list[Tensor] = []
                close(machine.literal(layout)(tokens, program, mask=mask, patterns=seen), expected)
                if isinstance(inner, Attention):
                    close(seen, patterns)

    def test_a_run_may_go_on_from_a_cache_where_the_operator_says_so(self) -> None:
        generator = _seeded(9)
        network = self.network(generator)
        machine = StoredProgram.for_class(network)
        program = compile(network, machine)
        tokens = torch.randint(VOCAB, (3, LENGTH), generator=generator)
        mask, cache = _padding(), Cache()
        if not self.operator.cacheable:
            assert not machine.cacheable
            return
        parts = [machine(tokens[:, part], program, mask=mask[:, part], cache=cache) for part in (slice(0, 2), slice(2, LENGTH))]
        close(torch.cat(parts, 1)[mask], machine(tokens, program, mask=mask)[mask])


class TaskConformance:
    """The laws of a task, as tests. A subclass names a ``task`` and the ``sha256`` of one of its batches (inputs, then labels, as
    little-endian int64): a generator that changes is another task, and every number measured with it is void."""

    task: Task
    sha256: str

    def test_is_a_value(self) -> None:
        again = Task.from_json(json.loads(json.dumps(self.task.to_json())))
        assert again == self.task and again is not self.task
        assert hash(again) == hash(self.task)
        assert again.digest() == self.task.digest()
        for changed in _neighbours(self.task):
            assert changed.digest() != self.task.digest(), f"{changed} has the digest of {self.task}"

    def test_names_cover_the_ids(self) -> None:
        names = self.task.token_names
        assert len(names) == len(set(names)) == self.task.vocab
        assert all(name and not any(c.isspace() for c in name) for name in names)

    def test_rows(self) -> None:
        self._check(self.task.batch(3, 5, 64), 64)

    def test_a_row_depends_on_seed_index_and_row_alone(self) -> None:
        small, large = self.task.batch(3, 5, 64), self.task.batch(3, 5, 97)
        assert torch.equal(small.inputs, large.inputs[:64]) and torch.equal(small.labels, large.labels[:64])
        for other in (self.task.batch(3, 6, 64), self.task.batch(4, 5, 64)):
            assert not torch.equal(small.inputs, other.inputs)

    def test_rows_are_the_same_bytes_for_ever(self) -> None:
        batch = self.task.batch(seed=2, index=7, size=64)
        found = hashlib.sha256(torch.stack((batch.inputs, batch.labels)).numpy().astype("<i8").tobytes()).hexdigest()
        assert found == self.sha256, f"batch(seed=2, index=7, size=64) has sha256 {found}"

    def test_a_larger_vocabulary_does_not_change_the_rows(self) -> None:
        larger = dataclasses.replace(self.task, vocab=self.task.vocab + 3)
        ours, theirs = self.task.batch(0, 0, 16), larger.batch(0, 0, 16)
        assert torch.equal(ours.inputs, theirs.inputs) and torch.equal(ours.labels, theirs.labels)
        assert larger.token_names[: self.task.vocab] == self.task.token_names

    def test_held_out_and_training_rows(self) -> None:
        for rows in (self.task.held_out, self.task.training_rows):
            some, more = rows(5), rows(64)
            self._check(some, 5, at_most=True)
            self._check(more, 64, at_most=True)
            assert torch.equal(some.inputs, more.inputs[:5]) and torch.equal(some.labels, more.labels[:5])
        try:
            self.task.training_rows(5, seed=HELD_OUT)
        except AnyformerError:
            pass
        else:
            raise AssertionError("the seed of the held-out rows gave rows to train on")

    def test_accuracies(self) -> None:
        batch = self.task.batch(0, 0, 64)
        counted = self.task.counted(batch)
        assert next(iter(counted)) == "accuracy" and torch.equal(counted["accuracy"], batch.scored)
        assert all((batch.scored | ~where).all() for where in counted.values()), "an accuracy looks at an ignored position"
        right = batch.labels.clamp(min=0)
        for predicted, share in ((right, 1.0), ((right + 1) % self.task.vocab, 0.0)):
            logits = torch.nn.functional.one_hot(predicted, self.task.vocab).float()
            assert set(self.task.accuracies(logits, batch).values()) == {share}
            assert self.task.accuracy(logits, batch) == share

    def test_rules_predict_ids(self) -> None:
        batch = self.task.batch(0, 0, 64)
        for name, rule in self.task.rules().items():
            predicted = rule(batch.inputs)
            assert predicted.shape == batch.inputs.shape and predicted.dtype == torch.int64, name
            assert predicted.min() >= 0 and predicted.max() < self.task.vocab, name

    def _check(self, batch: Batch, size: int, at_most: bool = False) -> None:
        rows = len(batch.inputs)
        assert 1 <= rows <= size and (at_most or rows == size)
        for ids in (batch.inputs, batch.labels):
            assert ids.shape == (rows, self.task.length) and ids.dtype == torch.int64 and ids.is_contiguous()
        used = len(self.task.names)
        assert batch.inputs.min() >= 0 and batch.inputs.max() < used
        labels = batch.labels[batch.scored]
        assert labels.min() >= 0 and labels.max() < used
        assert batch.scored.any(dim=1).all(), "a row without a scored position"


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _padding() -> Bool[Tensor, "3 n"]:
    """A full row, one padded on the left, one on the right."""
    mask = torch.ones(3, LENGTH, dtype=torch.bool)
    mask[1, :2] = mask[2, -1:] = False
    return mask


def _context(mask: Tensor | None, n: int = LENGTH) -> Context:
    """Three rows at their default positions."""
    return Context.of(torch.zeros(3, n, dtype=torch.long), mask)


S = TypeVar("S", bound=Spec)


def _neighbours(spec: S) -> list[S]:
    """The value with one number changed, for each of its own fields that is a number and may be changed alone."""
    found: list[S] = []
    for field in dataclasses.fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if isinstance(value, (bool, int, float)):
            try:
                found.append(dataclasses.replace(spec, **{field.name: not value if isinstance(value, bool) else value + 1}))  # type: ignore[type-var]
            except AnyformerError:
                continue  # this field is tied to another one
    return found
