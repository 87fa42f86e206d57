"""Specifications are values: frozen dataclasses that compare, hash and survive a JSON round trip.

``Spec`` is the common base of operators, mask rules, network classes and configurations. A spec becomes
``{"type": ClassName, field: value, ...}``; reading back builds only classes that derive from ``Spec``, so a file can
name a formula but never code.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

from anyformer.errors import AnyformerError

S = TypeVar("S", bound="Spec")  # typing.Self is refused by the run-time type checks of the tests


class UnknownSpecification(AnyformerError):
    """Data of a class that no imported module defines."""


class Spec:
    """Base of every specification. Subclasses are frozen dataclasses whose fields are numbers, strings, bools,
    ``None``, other specs, or tuples of these; each registers itself under its class name."""

    _types: ClassVar[dict[str, type["Spec"]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = Spec._types.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"two specifications are called {cls.__name__}: {known.__module__} and {cls.__module__}")
        Spec._types[cls.__name__] = cls

    def to_json(self) -> dict[str, Any]:
        """The specification as plain JSON data."""
        return _encode(self)

    @classmethod
    def from_json(cls: type[S], data: Any) -> S:
        """Read a specification back; raises :class:`AnyformerError` for unknown types, fields or values."""
        try:
            value = _decode(data)
        except RecursionError:
            raise AnyformerError("a specification is nested too deeply; the file is damaged") from None
        if not isinstance(value, cls):
            raise AnyformerError(f"expected a {cls.__name__}, got {type(value).__name__}")
        return value

    def digest(self) -> str:
        """sha256 of the canonical JSON text: the name of this value."""
        return digest(self.to_json())


def digest(data: Any) -> str:
    """sha256 (hexadecimal) of JSON data in canonical form (sorted keys, no white space, 1 for 1.0)."""
    return hashlib.sha256(json.dumps(_plain(data), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _plain(data: Any) -> Any:
    """Numbers that compare equal in one spelling, so that equal values have equal digests."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _encode(value: Any) -> Any:
    if isinstance(value, Spec):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        return {"type": type(value).__name__} | {f.name: _encode(getattr(value, f.name)) for f in fields}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise AnyformerError(f"a specification holds the number {value}; only finite numbers are values")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a specification cannot hold a {type(value).__name__}")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode(v) for v in data)
    if not isinstance(data, dict):
        return data
    name = data.get("type")
    if not isinstance(name, str) or name not in Spec._types:
        raise UnknownSpecification(f"unknown specification type {name!r}; import the module that defines it first")
    spec_type = Spec._types[name]
    known = {f.name for f in dataclasses.fields(spec_type)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - known - {"type"})
    if unknown:
        raise AnyformerError(f"{name} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    try:
        return spec_type(**{k: _decode(v) for k, v in data.items() if k != "type"})
    except AnyformerError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise AnyformerError(f"{name} cannot be built from these fields: {error}") from error


def differences(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The smallest parts in which the JSON data of two specifications differ: where, there in ``a``, and there in ``b``."""
    if isinstance(a, dict) and isinstance(b, dict) and a.get("type") == b.get("type"):
        for key in a | b:
            yield from differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{where}[{i}]")
    elif a != b:
        yield where, a, b
