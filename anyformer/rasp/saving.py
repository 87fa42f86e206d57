"""Compiled programs on disk: a folder with ``config.json``, ``model.safetensors`` and a card (:mod:`anyformer.storage`), no pickle.

The configuration holds the network's class, the vocabulary, what the outputs mean and the names of the stream's places; the tensors are the
network's own. A loaded program gives the same bits.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer.classes import BranchClass, NetworkClass
from anyformer.errors import AnyformerError
from anyformer.maps import ConstantMap, DenseMap, IdentityMap, LinearMap, LowRankMap
from anyformer.memory import require_memory
from anyformer.network import Branch, Network, Stage
from anyformer.rasp.compiled import CompiledProgram, Outputs
from anyformer.rasp.sets import Reals
from anyformer.storage import patiently, read_folder, write_folder

KIND = "anyformer-rasp"
MAPS: tuple[type[LinearMap], ...] = (IdentityMap, ConstantMap, LowRankMap, DenseMap)
FIELDS = {"text": str, "max_length": int, "mode": str, "causal": bool, "error": float, "seconds": float}
"""The plain fields of a compiled program, and their types."""


def save(compiled: CompiledProgram, folder: str | Path) -> None:
    """Write a compiled program, atomically: a killed save leaves the old one whole. Raises where a value of the program is neither a number,
    a Boolean, a string nor a tuple of these."""
    vocab = compiled.vocab
    about = {name: kind(getattr(compiled, name)) for name, kind in FIELDS.items()} | {
        "network": compiled.network.network_class.to_json(),
        "vocab": {"low": float(vocab.low), "high": float(vocab.high)} if isinstance(vocab, Reals) else [*map(_encode, vocab)],
        "outputs": {"values": [*map(_encode, compiled.outputs.values)], "codes": [float(c) for c in compiled.outputs.codes]},
        "token_place": compiled.token_place,
        "names": [list(names) for names in compiled.names],
        "notes": list(compiled.notes),
    }
    card = (
        f"# A RASP program as a transformer\n\n{compiled}\n\n```python\nfrom anyformer import rasp\n\n"
        "compiled = rasp.load('this folder')\n```\n"
    )
    write_folder(folder, KIND, about, _tensors(compiled.network), card)


@patiently
def load(folder: str | Path) -> CompiledProgram:
    """Read a compiled program. Names, shapes and dtypes are checked before any tensor is read, then the checksum. Raises
    :class:`AnyformerError` in one line for anything that :func:`save` did not write."""
    stored = read_folder(folder, KIND)
    config = stored.config
    network_class = NetworkClass.from_json(config.get("network"))
    try:
        fields: dict[str, Any] = {name: _typed(config, name, kind) for name, kind in FIELDS.items()}
        vocab = config["vocab"]
        words = Reals(**vocab) if isinstance(vocab, dict) else tuple(map(_decode, vocab))
        outputs = Outputs(tuple(map(_decode, config["outputs"]["values"])), tuple(map(float, config["outputs"]["codes"])))
        names = tuple(tuple(map(str, place)) for place in config["names"])
        notes = tuple(map(str, config["notes"]))
        place = config["token_place"]
        expected = _shapes(network_class)
        width = (network_class.features or 0) + 1
        sizes = (network_class.vocab, network_class.max_positions, network_class.constant, len(names))
        wanted = (1 if isinstance(words, Reals) else len(words), fields["max_length"], True, width)
        if sizes != wanted or len(outputs.values) != len(outputs.codes) or not (place is None or 0 <= place < width - 1):
            raise ValueError("its sizes do not fit together")
    except AnyformerError as error:
        raise AnyformerError(f"{folder}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise AnyformerError(f"{folder}: its configuration is no compiled program's ({reason}); the file was changed") from None
    stored.expect(expected)
    require_memory(sum(8 * torch.Size(s).numel() for s in stored.shapes.values()), f"the compiled program in {folder}")
    network = _network(network_class, stored.tensors())
    return CompiledProgram(network=network, vocab=words, outputs=outputs, token_place=place, names=names, notes=notes, **fields)


def _typed(config: dict[str, Any], name: str, kind: type) -> Any:
    value = config[name]
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}")
    return value


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple):
        return {"tuple": [*map(_encode, value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise AnyformerError(
        f"a compiled program with the value {value!r} cannot be saved; a number, Boolean, string or tuple was expected"
    )


def _decode(value: Any) -> Any:
    return tuple(map(_decode, value["tuple"])) if isinstance(value, dict) else value


def _tensors(network: Network) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {"embedding": network.embedding, "readout": network.final_readout()}
    if network.positions is not None:
        out["positions"] = network.positions
    for s, stage in enumerate(network.stages):
        for b, branch in enumerate(stage.branches):
            if not isinstance(branch.map, MAPS) or stage.shared is not None:
                raise AnyformerError(f"stage {s + 1} holds what no compiled program has; it cannot be saved as one")
            own = {"probes": branch.probes} | {name: v for name, v in vars(branch.map).items() if isinstance(v, Tensor)}
            out |= {f"stages.{s}.{b}.{name}": tensor for name, tensor in own.items() if tensor is not None}
    return out


def _shapes(c: NetworkClass) -> dict[str, tuple[tuple[int | None, ...], torch.dtype | None]]:
    """The tensors that a network of a class has."""
    width = (c.features or 0) + 1
    out: dict[str, tuple[tuple[int | None, ...], torch.dtype | None]] = {
        "embedding": ((c.vocab, width), None),
        "positions": ((c.max_positions, width), None),
        "readout": ((width, c.outputs), None),
    }
    for s, stage in enumerate(c.stages):
        for b, branch in enumerate(stage.branches):
            op, at = branch.operator, f"stages.{s}.{b}."
            if op.reads:
                out[at + "probes"] = ((width, op.count * op.reads), None)
            if branch.map == "constant":
                out[at + "rows"] = ((op.count, width), None)
            elif branch.map == "general" and branch.rank is not None:
                out |= {at + "left": ((op.count, width, branch.rank), None), at + "right": ((op.count, branch.rank, width), None)}
            elif branch.map == "general":
                out[at + "matrices"] = ((op.count, width, width), None)
            elif branch.map != "identity":
                raise ValueError(f"stage {s + 1} has a {branch.map} map")
    return out


def _network(c: NetworkClass, tensors: dict[str, Tensor]) -> Network:
    stages = []
    for s, stage in enumerate(c.stages):
        branches = []
        for b, branch in enumerate(stage.branches):
            at = f"stages.{s}.{b}."
            own = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
            branches.append(Branch(branch.operator, own.pop("probes", None), _map(branch, own, len(tensors["readout"]))))
        stages.append(Stage(tuple(branches)))
    return Network(tensors["embedding"], tuple(stages), tensors["readout"], tensors["positions"], constant=True)


def _map(branch: BranchClass, own: dict[str, Tensor], width: int) -> LinearMap:
    if branch.map == "identity":
        return IdentityMap(width)
    if branch.map == "constant":
        return ConstantMap(width, **own)
    return DenseMap(**own) if branch.rank is None else LowRankMap(**own)
