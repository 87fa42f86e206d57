"""Claims: a verdict at n = 5, m <= 2 under 10 s; a certificate in balls with markings at n = 64, d = 4, m <= 2 under 2 minutes and 2 GiB;
the proof of one softmax witness under 10 ms."""

import resource
import time

import torch
from measure import claim, finish

from anyformer.approximation import FAMILIES, certify, cyclic, dihedral, family, trivial
from anyformer.approximation.balls import precision
from anyformer.approximation.certifying import prove_in_balls
from anyformer.approximation.models import member
from anyformer.approximation.question import Question


def seconds(job) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def scalable(name: str, m: int, group) -> float:
    """Dependences and separation of n = 64 tokens, d = 4, in balls; raises unless proved."""
    question = Question(family(name, 64, 4, m), 64, group, 64)
    start = time.perf_counter()
    certificate = prove_in_balls(question)
    assert not isinstance(certificate, str) and certificate.independent is None and certificate.remaining.issubset(group)
    return time.perf_counter() - start


worst = max(seconds(lambda: certify(name, tokens=5, dim=4, layers=m)) for name in FAMILIES for m in (1, 2))  # noqa: B023
times = {
    "C_64 design, m = 1": scalable("cyclic", 1, cyclic(64)),
    "D_64 design, m = 2": scalable("dihedral", 2, dihedral(64)),
    "RoPE, trivial group, m = 1": scalable("rope", 1, trivial(64)),
}
for name, value in times.items():
    print(f"{name}: {value:.3g} s")
network, pair = member(family("softmax", 3, 2, 1), 3, 100), torch.randn(2, 3, 2, dtype=torch.float64)
assert not isinstance(network, str)
pair[1, :2] = pair[0, :2]
with precision(128):
    out = network(pair, exact=True)
    assert max(float((a - b).abs_lower()) for a, b in zip(out[0, 0], out[1, 0], strict=True)) > 0
    witness = min(seconds(lambda: network(pair, exact=True)) for _ in range(20))
finish(
    claim("slowest verdict of a family at n = 5, m <= 2, seconds", worst, 10),
    claim("slowest certificate in balls at n = 64, d = 4, m <= 2, seconds", max(times.values()), 120),
    claim("peak memory, GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    claim("proof of one softmax witness, milliseconds", 1000 * witness, 10),
)
