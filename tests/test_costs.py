"""Costs: widths by the formulas, exact integers of any size, the lower bound."""

import pytest

import anyformer as af


def config(**sizes) -> af.TransformerConfig:
    return af.TransformerConfig(**(dict(vocab=30, heads=2, layers=4, head_dim=30, features=30) | sizes))


def test_the_documented_example() -> None:
    result = af.cost(config())
    assert result["backbones"]["path-tree"]["width"] == result["backbones"]["looped"]["width"] == 2280
    assert result["backbones"]["random"]["width"] == 2280 and result["backbones"]["random"]["recommended"] == 2850
    assert result["lower_bound"] == 4
    assert result["backbones"]["chain"]["width"] is None and "one head" in result["backbones"]["chain"]["reason"]


@pytest.mark.parametrize("heads, layers", [(2, 1), (2, 3), (3, 3), (7, 5), (12, 12), (10, 101)])
def test_the_lower_bound_is_the_smallest_integer(heads: int, layers: int) -> None:
    bound = af.lower_bound(heads, layers)
    assert bound**2 >= heads**layers > (bound - 1) ** 2


def test_sizes_are_consistent_with_built_machines() -> None:
    target = af.Transformer(vocab=5, heads=2, layers=2, head_dim=3, features=4, residual=True, norm="rms", mlp=2, gated=True)
    result = af.cost(target, length=7)["backbones"]
    for name in ("path-tree", "looped"):
        machine = af.MACHINES[name].for_class(target)
        assert result[name]["width"] == machine.width and result[name]["state"] == 7 * machine.width
        assert machine.cost(7).nonzero_weights == result[name]["nonzero_weights"]
    assert result["path-tree"]["depth"] == 5 and result["path-tree"]["heads"] == 2


def test_a_width_of_1e48_is_an_answer() -> None:
    width = af.cost(config(heads=12, layers=40, mlp=100, residual=True, gated=True))["backbones"]["path-tree"]["width"]
    assert isinstance(width, int) and width > 10**48


def test_many_layers_take_no_memory_and_match_a_real_module() -> None:
    small = config(layers=5, norm="rms", residual=True, mlp=3)
    assert af.network_class(small) == af.network_class(af.Transformer(small))
    assert len(af.network_class(config(layers=5000)).stages) == 5000


def test_a_machine_past_64_bits_says_so_and_a_width_past_memory_what_it_needs() -> None:
    with pytest.raises(af.AnyformerError, match="past 64-bit"):
        af.PathTree.for_class(config(heads=12, layers=40))
    wide = config(heads=4, layers=14, head_dim=64)
    machine = af.PathTree.for_class(wide)
    with pytest.raises(af.AnyformerError, match=r"compiling this program needs [0-9.]+ [GT]iB of memory"):
        af.compile(af.Transformer(wide), machine)
    with pytest.raises(af.AnyformerError, match=r"the literal machine .* needs [0-9.]+ [GT]iB of memory"):
        af.PathTree.for_class(config(layers=10)).literal()


def test_bad_arguments() -> None:
    with pytest.raises(af.AnyformerError, match="length must be an integer >= 1"):
        af.cost(config(), length=0)
    with pytest.raises(af.AnyformerError, match="heads must be an integer >= 1"):
        config(heads=0)
    with pytest.raises(af.AnyformerError, match="overflow 64-bit"):
        af.cost(config(features=2**62, vocab=2**62))
