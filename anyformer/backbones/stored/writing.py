"""From a network to the constants of a stored program, and back: nothing but slicing.

Writing pads a smaller network into a larger machine (:mod:`anyformer.backbones.stored.placing` says where): whatever the network does not
have is 0.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.stored.layout import BankLayout, Layout, StageLayout, Stored
from anyformer.backbones.stored.placing import resized
from anyformer.maps import ConstantMap, DenseMap, DiagonalMap, IdentityMap, LinearMap, LowRankMap
from anyformer.network import Branch, Network, Stage
from anyformer.program import Placement, Program


def write_constants(layout: Layout, network: Network, placement: Placement, dtype: torch.dtype) -> Float[Tensor, "c"]:
    """The constants of ``network``; a differentiable function of its tensors."""
    constants = torch.zeros(layout.constants, dtype=dtype, device=network.embedding.device)
    views = layout.views(constants)
    for stage, s, places in zip(network.stages, placement.stages, placement.branches, strict=True):
        at, stored = layout.stages[s], views[s]
        if at.shared:
            assert stage.shared is not None
            stored["read"][:, : at.shared] = stage.shared
        for branch, bank, place in zip(stage.branches, at.banks, places, strict=True):
            if bank.twin:
                assert isinstance(branch.map, ConstantMap) and branch.map.scales is not None
                stored["scales"][at.scales_of(bank)][branches_of(place)] = branch.map.scales.to(dtype)
                continue
            _write_bank(branch, bank, branches_of(place), stored)
    readout = network.final_readout()
    views[-1]["readout"][:, : readout.shape[1]] = readout
    for i, width in enumerate(layout.centrings):
        constants[i - len(layout.centrings)] = -1.0 / width
    return constants


def branches_of(place: tuple[int, ...] | int) -> Int[Tensor, "count"]:
    """The machine branches of a bank's branches."""
    return torch.arange(place) if isinstance(place, int) else torch.tensor(place)


def _columns(stored: Stored, bank: BankLayout) -> Iterator[tuple[Tensor, list[int], bool]]:
    """The stored probe columns of a bank, part by part: (rows, owners, reads), which reads they are, and whether a group owns them."""
    at = bank.read_at
    for part, owners in zip(bank.free_parts, (bank.count, bank.groups), strict=True):
        if part:
            yield stored["read"][:, at : at + owners * len(part)].unflatten(1, (owners, -1)), part, owners < bank.count
            at += owners * len(part)
    at = bank.bias_at
    for part, owners in zip(bank.fixed_parts, (bank.count, bank.groups), strict=True):
        if part:
            yield stored["bias"][at : at + owners * len(part)].view(1, owners, -1), part, owners < bank.count
            at += owners * len(part)


def _enter(stored: Stored, bank: BankLayout) -> Tensor:
    """The left factors (D, groups, rank), or the dense maps (D, count, D')."""
    start = bank.read_at + bank.reads
    return stored["read"][:, start : start + bank.enters].unflatten(1, (-1, bank.branch.rank or bank.out))


def _write_bank(branch: Branch, bank: BankLayout, place: Tensor, stored: Stored) -> None:
    size = bank.count // bank.groups
    groups = (place // size).unique()
    first = torch.stack([(place // size == g).nonzero()[0, 0] for g in groups])  # a head of each group; all of them are alike
    if bank.reads + bank.biases:
        assert branch.probes is not None
        probes = branch.probes.unflatten(1, (branch.operator.count, -1))
        for columns, part, grouped in _columns(stored, bank):
            values = (probes if columns.shape[0] > 1 else probes[-1:])[..., part]
            columns[:, groups if grouped else place] = (values[:, first] if grouped else values).to(columns.dtype)
    m, write = branch.map, slice(bank.write_at, bank.write_at + bank.writes)
    if isinstance(m, LowRankMap):
        _enter(stored, bank)[:, groups] = m.left[first].permute(1, 0, 2).to(stored["read"].dtype)
        stored["write"][write].unflatten(0, (bank.count, -1))[place] = m.right.to(stored["write"].dtype)
    elif isinstance(m, ConstantMap):
        stored["write"][write][place] = m.scaled_rows().to(stored["write"].dtype)
    elif isinstance(m, DiagonalMap):
        stored["diagonal"][bank.diagonal_at] = m.weights
    elif isinstance(m, IdentityMap):
        if m.shift is not None:
            stored["shift"][bank.shift_at] = m.shift
    else:
        _enter(stored, bank)[:, place] = m.to_dense().permute(1, 0, 2).to(stored["read"].dtype)


def read_network(layout: Layout, program: Program) -> Network:
    """The network that a program stores: what :func:`write_constants` wrote, without the padding."""
    assert program.constants is not None
    views, placement = layout.views(program.constants), program.placement or whole(layout)
    stages = tuple(
        _read_stage(layout.stages[s], views[s], places, program.tokens)
        for s, places in zip(placement.stages, placement.branches, strict=True)
    )
    readout = views[-1]["readout"][:, : placement.outputs]
    names = program.token_names
    return Network(program.tokens, stages, readout, program.positions, layout.network.constant, token_names=names)


def whole(layout: Layout) -> Placement:
    """The placement of a network that fills its machine."""
    stages = tuple(range(len(layout.stages)))
    return Placement(stages, tuple(tuple(b.count for b in layout.stages[s].banks) for s in stages), layout.network.outputs)


def _read_stage(at: StageLayout, stored: Stored, places: tuple[tuple[int, ...] | int, ...], like: Tensor) -> Stage:
    branches = tuple(_read_bank(at, bank, stored, branches_of(place), like) for bank, place in zip(at.banks, places, strict=True))
    shared = None
    if at.stage.shared:
        shared = stored["read"][:, : at.shared] if at.shared else _features(at, like)
    return Stage(branches, shared, at.stage.shared_reads)


def _features(at: StageLayout, like: Tensor) -> Tensor:
    return torch.eye(at.width, at.features, dtype=like.dtype, device=like.device)


def _read_bank(at: StageLayout, bank: BankLayout, stored: Stored, place: Tensor, like: Tensor) -> Branch:
    operator = resized(bank.branch.operator, len(place))
    probes, owners = None, bank.value_route()[place]
    if bank.branch.reads == "features":
        probes = _features(at, like)
    elif operator.reads:
        columns = [stored["read"][:, bank.read_at : bank.read_at + bank.reads]] if bank.reads else []
        if bank.biases:
            biases = stored["bias"][bank.bias_at : bank.bias_at + bank.biases]
            columns.append(torch.cat((biases.new_zeros(at.width - 1, len(biases)), biases[None])))
        probes = torch.cat(columns, 1)[:, bank.route()[place].flatten()]
    return Branch(operator, probes, _read_map(at, bank, stored, place), _kv_heads(owners), bank.branch.reads, bank.twin)


def _kv_heads(owners: Tensor) -> int | None:
    """How many key/value heads there are, where each serves equally many heads."""
    groups, sizes = owners.unique_consecutive(return_counts=True)
    return len(groups) if len(groups) < len(owners) and bool((sizes == sizes[0]).all()) else None


def _read_map(at: StageLayout, bank: BankLayout, stored: Stored, place: Tensor) -> LinearMap:
    write = slice(bank.write_at, bank.write_at + bank.writes)
    match bank.branch.map:
        case "identity":
            return IdentityMap(at.width, stored["shift"][bank.shift_at] if "shift" in stored else None)
        case "constant":
            scales = stored["scales"][at.scales_of(bank)][place] if bank.twin else None
            return ConstantMap(at.width, stored["write"][write][place], scales)
        case "general":
            entering = _enter(stored, bank).permute(1, 0, 2)
            if bank.branch.rank is None:
                return DenseMap(entering[place])
            return LowRankMap(entering[bank.value_route()[place]], stored["write"][write].unflatten(0, (bank.count, -1))[place])
        case kind:
            return DiagonalMap(stored["diagonal"][bank.diagonal_at], at.width, at.out, kind == "centred")
