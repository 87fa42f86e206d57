"""Claims: solving a random machine of m = 2850 for (H, L, d, d_in) = (2, 4, 30, 30), condition number included, takes at most 8
seconds on one thread, and at most 1 GiB more memory than the process had before."""

import resource
import time

import torch
from measure import claim, finish

import anyformer as af

torch.manual_seed(0)
target = af.Transformer(vocab=30, heads=2, layers=4, head_dim=30, features=30)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
machine = af.Random.for_class(target, width=2850)
program = af.compile(target, machine)
seconds = time.perf_counter() - start
memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
print(f"condition number {program.provenance['condition']:.1f}, {machine!r}")
finish(claim("seconds", seconds, 8), claim("GiB above the start", memory, 1))
