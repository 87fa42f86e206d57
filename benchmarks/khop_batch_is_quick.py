"""Claim: a k-hop batch of 64 sequences of 100 letters is drawn and answered in under 10 ms (median of 200; beside it, every task)."""

from measure import claim, finish, medians

from anyformer.tasks import TASKS, KHop, Task

tasks: dict[str, Task] = {"k-hop": KHop()} | {name: TASKS[name]() for name in TASKS if name not in ("k-hop", "text")}
seconds = medians(200, **{name: (lambda task=task: task.batch(0, 0, 64)) for name, task in tasks.items()})
print({name: f"{1e3 * s:.2f} ms" for name, s in seconds.items()})
finish(claim("milliseconds a k-hop batch", 1e3 * seconds["k-hop"], 10))
