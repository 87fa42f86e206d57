"""``anyformer certify``: words become a question, the verdict is printed."""

import importlib
import json
import os
import sys
from functools import reduce
from typing import Any

from anyformer.approximation import FeedForward
from anyformer.approximation import certify as certify_subject
from anyformer.console import show
from anyformer.errors import AnyformerError
from anyformer.options import Certify


def certify(options: Certify) -> tuple[dict[str, Any], int]:
    """Certify what the options name; returns what ``--json`` prints, and the exit code: 0 for a yes, 1 for anything else."""
    subject: Any = options.subject
    if ":" in subject:
        subject = build(subject, _object(options.kwargs))
    elif _object(options.kwargs):
        raise AnyformerError(f"--kwargs are for module:Class; {subject!r} names a family")
    group: Any = options.group
    if group.lstrip().startswith("["):
        group = _json("--group", group)
    verdict = certify_subject(
        subject,
        tokens=options.tokens,
        dim=options.dim,
        layers=options.layers,
        group=group,
        feed_forward=FeedForward(options.activation),
        bits=options.bits,
    )
    if not options.as_json:
        show(str(verdict))
    return verdict.to_json(), 0 if verdict.holds else 1


def build(subject: str, arguments: dict[str, Any]) -> Any:
    """Import ``module:Class`` (from the working folder too) and call it. This runs the code of that module, and says so on standard error."""
    module_name, _, name = subject.partition(":")
    print(f"anyformer: importing {module_name}, which runs its code", file=sys.stderr)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made: Any = reduce(getattr, name.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError, ValueError) as error:
        raise AnyformerError(f"{subject} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:
        said = (str(error).strip().splitlines() or [""])[0]
        raise AnyformerError(f"{subject} cannot be imported: its code stopped with {type(error).__name__}: {said}") from None
    try:
        return made(**arguments)
    except (Exception, SystemExit) as error:
        raise AnyformerError(f"{subject} cannot be built from {arguments}: {type(error).__name__}: {error}") from None


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise AnyformerError(f"{option} must be JSON, got {text!r}: {error}") from None


def _object(text: str) -> dict[str, Any]:
    value = _json("--kwargs", text)
    if not isinstance(value, dict):
        raise AnyformerError(f"--kwargs must be one JSON object, got {text!r}")
    return value
