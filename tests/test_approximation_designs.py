"""Attention with a given symmetry: exact equivariance, the layers its certificate says, and the 2-closure said honestly."""

import itertools
import logging

import pytest
import torch
from torch import nn

pytest.importorskip("flint")

from anyformer.approximation import (
    Averaged,
    Group,
    assert_equivariant,
    certify,
    cyclic,
    dihedral,
    equivariant_attention,
    grid_translations,
    product,
    reflection,
    symmetric,
    wreath,
)
from anyformer.approximation.designs import pair_orbits
from anyformer.errors import AnyformerError

logging.getLogger("torch.__trace").disabled = True  # thousands of lines that pytest would keep
DESIGNS = [
    (cyclic(5), 1),
    (dihedral(4), 1),
    (dihedral(5), 2),
    (reflection(3), 1),
    (reflection(4), 1),
    (symmetric(4), 1),
    (grid_translations(2, 3), 1),
    (wreath(2, 2), 1),
    (wreath(2, 3), 2),
    (product(cyclic(2), cyclic(3)), 2),
]


@pytest.mark.parametrize(("group", "layers"), DESIGNS, ids=lambda x: str(x))
def test_designs_keep_their_group_and_need_the_layers_they_say(group, layers):
    module = equivariant_attention(group, group.degree, 4, 2)
    assert module.layers == layers and module.symmetry == group and not module.remark
    assert module.certificate.strength in ("proved", "proved-family") and module.certificate.claim.group == group
    if layers == 2:
        assert module.certificate.layers.lower == 2
    assert_equivariant(module, group, dim=4)
    outside = [s for s in itertools.permutations(range(group.degree)) if s not in group]
    assert bool(outside) == (group != symmetric(group.degree))
    for sigma in outside[:1]:
        with pytest.raises(AssertionError, match="is not equivariant"):
            assert_equivariant(module, [sigma], tokens=group.degree, dim=4)


@pytest.mark.parametrize("group", [Group(4, ((1, 2, 0, 3), (0, 2, 3, 1))), Group(5, ((1, 2, 3, 4, 0), (0, 2, 4, 1, 3)))], ids=str)
def test_groups_that_pairs_cannot_tell_apart(group):
    """A_4 and AGL(1, 5) are 2-transitive: a bias of pairs sees the symmetric group."""
    module = equivariant_attention(group, group.degree, 4)
    assert module.symmetry == symmetric(group.degree) and "2-closure" in module.remark
    size = 4 * group.degree
    inner = nn.Sequential(
        nn.Flatten(), nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size), nn.Unflatten(1, (group.degree, 4))
    )
    averaged = Averaged(inner, group)
    assert_equivariant(averaged, group, dim=4)
    swap = (1, 0, *range(2, group.degree))
    with pytest.raises(AssertionError, match="is not equivariant"):
        assert_equivariant(averaged, [swap], tokens=group.degree, dim=4)


def test_orbits_of_pairs_by_listing_the_group():
    for group, _ in DESIGNS:
        colours = pair_orbits(group)
        for (i, j), (a, b) in itertools.product(itertools.product(range(group.degree), repeat=2), repeat=2):
            together = any((g[i], g[j]) == (a, b) for g in group.elements)
            assert together == (colours[i, j] == colours[a, b])


def test_the_module_itself_is_certified():
    module = equivariant_attention(cyclic(4), 4, 2)
    verdict = certify(module, tokens=4, dim=2, group="cyclic")
    assert verdict.strength == "proved", str(verdict)


def test_it_trains_like_any_module():
    torch.manual_seed(0)
    module = equivariant_attention(cyclic(4), 4, 4)
    x, y = torch.randn(16, 4, 4), torch.randn(16, 4, 4)
    optimiser = torch.optim.Adam(module.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = (x + module(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and module.bias.grad is not None and "C_4 on 4 tokens" in repr(module)
    again = equivariant_attention(cyclic(4), 4, 4)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), module(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: equivariant_attention(cyclic(4), 5, 4), "the group acts on 4 points, there are 5 tokens"),
        (lambda: equivariant_attention(cyclic(4), 4, 3, 2), "2 heads do not divide 3 features"),
        (lambda: equivariant_attention(cyclic(4), 4, 0), "dim must be an integer >= 1"),
        (lambda: equivariant_attention(cyclic(4), 4, 2)(torch.zeros(1, 3, 2)), "acts on 4 tokens, got 3"),
    ],
)
def test_bad_input(make, message, as_shipped):
    with pytest.raises(AnyformerError, match=message):
        make()
