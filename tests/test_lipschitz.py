"""A 1-Lipschitz function of several variables by MaxMin layers, to the stated error."""

import itertools
import random

import pytest

from anyformer import rasp
from anyformer.errors import AnyformerError
from anyformer.rasp.lipschitz import lipschitz_network, lipschitz_tokens


def distance_to_corners(x):
    """1-Lipschitz in the maximum norm: distance to the nearest of two points, less half of the largest variable."""
    near = min(max(abs(a - b) for a, b in zip(x, corner, strict=True)) for corner in ((0.2, 0.7, 0.1), (0.9, 0.3, 0.8)))
    return 0.5 * near - 0.5 * max(x)


def grid(variables, cells):
    return list(itertools.product([(i + 0.5) / cells for i in range(cells)], repeat=variables))


@pytest.mark.parametrize("variables, cells", [(1, 4), (2, 2), (3, 2)])
def test_the_error_is_at_most_twice_the_covering_radius(variables, cells):
    centres = grid(variables, cells)

    def f(x):
        return distance_to_corners((*x, *[0.5] * (3 - variables)))

    radius, n = 0.5 / cells, lipschitz_tokens(len(centres), variables)
    net = rasp.compile(lipschitz_network(centres, [f(c) for c in centres]), rasp.Reals(0, 1), n, check=False)
    draw = random.Random(1)
    points = [tuple(draw.random() for _ in range(variables)) for _ in range(20)]
    found = [row[0] for row in net.batch([[*x, *[0.0] * (n - variables)] for x in points])]
    for x, g in zip(points, found, strict=True):
        wanted = max(f(c) - max(abs(a - b) for a, b in zip(x, c, strict=True)) for c in centres)
        assert g == pytest.approx(wanted, abs=1e-12)
        assert f(x) - 2 * radius - 1e-12 <= g <= f(x) + 1e-12
    for (x, g), (y, h) in itertools.combinations(list(zip(points, found, strict=True)), 2):
        assert abs(g - h) <= max(abs(a - b) for a, b in zip(x, y, strict=True)) + 1e-12


def test_finer_grids_are_better():
    def f(x):
        return distance_to_corners((*x, 0.5))

    worst = []
    for cells in (1, 2, 4):
        centres = grid(2, cells)
        n = lipschitz_tokens(len(centres), 2)
        net = rasp.compile(lipschitz_network(centres, [f(c) for c in centres]), rasp.Reals(0, 1), n, check=False)
        points = list(itertools.product((0.0, 0.3, 0.55, 1.0), repeat=2))
        found = net.batch([[*x, *[0.0] * (n - 2)] for x in points])
        worst.append(max(f(x) - row[0] for x, row in zip(points, found, strict=True)))
    assert worst[0] > 1.5 * worst[1] > 2 * worst[2] > 0


def test_bad_centres():
    with pytest.raises(AnyformerError, match="as many values as centres"):
        lipschitz_network([[0.0]], [1.0, 2.0])
