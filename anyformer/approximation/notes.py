"""What a verdict on a declared architecture adds to its reason: notes, and the kernel condition of the paper."""

from anyformer.approximation.kernel_limits import KernelLimit, kernel_limit, name_of_kernel
from anyformer.approximation.patterns import sees_something
from anyformer.approximation.question import Question
from anyformer.operators import Attention


def notes_on(question: Question) -> list[str]:
    """What is counted, what is meant, and where the claim fails in the sup norm."""
    notes = ["m counts attention layers; untied parameters"]
    if question.refusal:
        return notes
    positions, group = question.architecture.positions, question.group
    if question.target == "auto" and group is not None:
        notes.append(
            "G was not given: it is the smallest group for which the claim holds, the claim holds for every larger one too"
        )
    if positions is not None and positions.kind == "fixed":
        notes.append(
            "position vectors are fixed: this is for generic ones (all but a set of measure 0); equal ones tell nothing apart"
        )
    if not question.causal and group is not None and len(group.orbits) > 1 and _constants_stay(question):
        notes.append("in the sup norm the claim fails: constant sequences stay constant, and G is not transitive on positions")
    return notes


def _constants_stay(question: Question) -> bool:
    """Whether every layer takes sequences of equal tokens to such: rows of attention that sum to 1, and nothing else that knows positions."""
    n, architecture = question.tokens, question.architecture
    banks = [op for layer in architecture.layers for op in layer.operators]
    plain = architecture.positions is None and all(type(op) is Attention and op.stochastic for op in banks)
    return plain and all(sees_something(op, n) for op in banks if isinstance(op, Attention))


def kernel_limits_of(question: Question) -> list[KernelLimit]:
    """The kernel condition of arXiv 2506.23551, for each kernel that has a name there."""
    kernels = (getattr(op, "kernel", None) for layer in question.architecture.layers for op in layer.operators)
    names = dict.fromkeys(name for kernel in kernels if (name := name_of_kernel(kernel)) is not None)
    return [kernel_limit(name) for name in names]
