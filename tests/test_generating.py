"""Runs that go on from a cache are the runs without, on every machine; greedy generation is the loop by hand."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stored_program import GPT2, LLAMA, make, tokens

import anyformer as af
from anyformer.conformance import close

CACHEABLE = st.fixed_dictionaries(
    {
        "residual": st.booleans(),
        "norm": st.sampled_from([None, "rms", "layer"]),
        "norm_position": st.sampled_from(["pre", "post"]),
        "positions": st.sampled_from([None, "rope", "alibi", "learned"]),
        "kv_heads": st.sampled_from([None, 1]),
        "attention": st.sampled_from(["softmax", "hard"]),
        "bias": st.booleans(),
    }
)


@settings(max_examples=15)
@given(sizes=CACHEABLE, cuts=st.lists(st.integers(1, 6), max_size=3), padded=st.booleans(), tree=st.booleans())
def test_a_run_with_a_cache_is_the_run_without(sizes: dict, cuts: list[int], padded: bool, tree: bool) -> None:
    target = make(3, **sizes, max_length=12 if sizes["positions"] == "learned" else None)
    machine = (af.PathTree if tree else af.StoredProgram).for_class(target)
    program = af.compile(target, machine).detach()
    mask = torch.ones(3, 7, dtype=torch.bool)
    if padded:
        mask[0, :2] = False
    whole = machine(tokens(), program, mask=mask)
    cache, edges = af.Cache(), [0, *sorted(set(cuts)), 7]
    parts = [machine(tokens()[:, a:b], program, mask=mask[:, a:b], cache=cache) for a, b in itertools.pairwise(edges)]
    close(torch.cat(parts, 1)[mask], whole[mask])
    assert len(cache) == 7


def test_generation_with_and_without_cache_by_hand_and_padded() -> None:
    target = make(1, **LLAMA)
    program = af.compile(target, af.StoredProgram.for_class(target)).detach()
    prompt = tokens(3, 5)
    by_hand = prompt
    for _ in range(6):
        by_hand = torch.cat((by_hand, target(by_hand)[:, -1:].argmax(-1)), 1)
    assert torch.equal(af.generate(program, prompt, 6), by_hand)
    assert torch.equal(af.generate(program, prompt, 6, use_cache=False), by_hand)
    for left in (True, False):
        padded, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.bool)
        place = slice(2, 7) if left else slice(0, 5)
        padded[:, place], mask[:, place] = prompt, True
        assert torch.equal(af.generate(program, padded, 6, mask=mask)[:, 7:], by_hand[:, 5:])
    end = int(by_hand[0, 6])
    stopped = af.generate(program, prompt, 6, end=end)
    for row, full in zip(stopped[:, 5:].tolist(), by_hand[:, 5:].tolist(), strict=True):
        upto = full.index(end) + 1 if end in full else len(full)
        assert row[:upto] == full[:upto][: len(row)] and all(t == end for t in row[upto:])
    assert torch.equal(af.generate(program, prompt, 0), prompt)


def test_generation_refuses_what_it_cannot_do() -> None:
    bidirectional = make(causal=False)
    program = af.compile(bidirectional, af.StoredProgram.for_class(bidirectional)).detach()
    assert af.generate(program, tokens(2, 3), 2).shape == (2, 5)
    with pytest.raises(af.AnyformerError, match="run it without a cache"):
        af.generate(program, tokens(2, 3), 2, use_cache=True)
    with pytest.raises(af.AnyformerError, match="new_tokens must be an integer >= 0"):
        af.generate(program, tokens(2, 3), -1)
    with pytest.raises(af.AnyformerError, match="at least one token that is not padding"):
        af.generate(program, tokens(2, 3), 1, mask=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(af.AnyformerError, match=r"end must be a token id in 0..8, got 9"):
        af.generate(program, tokens(2, 3), 1, end=9)
    short = make(**GPT2)
    with pytest.raises(af.AnyformerError, match="13 tokens are needed, the position table holds 12"):
        af.generate(af.compile(short, af.StoredProgram.for_class(short)).detach(), tokens(2, 3), 10)
    cache = af.Cache()
    target = make(**LLAMA)
    program = af.compile(target, af.StoredProgram.for_class(target)).detach()
    program.machine()(tokens(2, 3), program, cache=cache)
    with pytest.raises(af.AnyformerError, match="the cache holds 2 sequences, got 3"):
        program.machine()(tokens(3, 1), program, cache=cache)


def test_a_refused_run_leaves_its_cache_as_it_was() -> None:
    target = make(**(GPT2 | dict(max_length=6)))
    program = af.compile(target, af.StoredProgram.for_class(target)).detach()
    machine, cache = program.machine(), af.Cache()
    machine(tokens()[:, :4], program, cache=cache)
    other = dataclasses.replace(program)
    for refused in (
        lambda: machine(tokens()[:, 4:5], other, cache=cache),
        lambda: machine(tokens()[:, 4:], program, cache=cache),
        lambda: machine(tokens()[:2, 4:5], program, cache=cache),
    ):
        with pytest.raises(af.AnyformerError):
            refused()
        assert len(cache) == 4
    close(machine(tokens()[:, 4:6], program, cache=cache), machine(tokens()[:, :6], program)[:, 4:])


def test_default_positions_go_on_from_given_ones() -> None:
    target = make(**LLAMA)
    program = af.compile(target, af.StoredProgram.for_class(target)).detach()
    machine, cache, places = program.machine(), af.Cache(), torch.arange(5, 12).expand(3, 7)
    parts = [
        machine(tokens()[:, :4], program, positions=places[:, :4], cache=cache),
        machine(tokens()[:, 4:], program, cache=cache),
    ]
    close(torch.cat(parts, 1), machine(tokens(), program, positions=places))


def test_generation_of_odd_arguments_is_one_line(as_shipped) -> None:
    target = make(**LLAMA)
    program = af.compile(target, af.StoredProgram.for_class(target)).detach()
    ids = tokens(2, 3)
    for message, wrong in {
        r"tokens must be an integer tensor of shape \(batch, n\), got list": lambda: af.generate(program, [[1, 2]], 3),
        r"got torch.int64 of shape \(3,\)": lambda: af.generate(program, ids[0], 3),
        r"tokens are empty": lambda: af.generate(program, ids[:0], 3),
        r"got torch.float64": lambda: af.generate(program, ids.double(), 3),
        r"token ids must lie in 0..8": lambda: af.generate(program, ids + 50, 0),
        r"mask must be a Boolean tensor": lambda: af.generate(program, ids, 3, mask=[[True] * 3] * 2),
        r"end must be a token id in 0..8, got 'a'": lambda: af.generate(program, ids, 3, end="a"),
        r"a program is needed, got str": lambda: af.generate("p", ids, 3),
        r"a text of .* tokens needs .* of memory": lambda: af.generate(program, ids, 10**30),
        r"mask must have the shape of tokens \(2, 3\), got list": lambda: program.machine()(ids, program, mask=[[1]]),
    }.items():
        with pytest.raises(af.AnyformerError, match=message):
            wrong()
