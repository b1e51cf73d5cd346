"""Resolves the command line's arguments: modules, files, operators, samples."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch

from ..core.override.names import missing, rules_named
from ..core.rule import Rule
from ..testing.inputs.samples import as_sample

__all__ = ["Unknown", "import_module", "load", "named_samples", "own_samples", "rules_of"]


class Unknown(click.ClickException):
    """Something that was named on the command line does not exist, or is not what is needed."""

    exit_code = 2


def import_module(source: str) -> Any:
    """``package.module`` or ``folder/file.py``, imported."""
    # as `python -m` and `python FILE` do: modules next to the caller, or next to the file, can be imported
    path = Path(source)
    folder, name = (path.resolve().parent, path.stem) if source.endswith(".py") else (Path.cwd(), source)
    if source.endswith(".py") and not path.exists():
        raise Unknown(f"there is no file {source}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise Unknown(f"there is no module {name!r}") from None
        raise


def load(name: str) -> tuple[Any, Any]:
    """(module, object) for ``package.module:attribute`` or ``folder/file.py:attribute``."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise Unknown(f"{name!r} names nothing; expected MODULE:NAME, FILE.py:NAME or the name of a rule")
    module = import_module(source)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise Unknown(f"{getattr(found, '__name__', found)} has no {part!r}")
        found = getattr(found, part)
    return module, found


def rules_of(name: str) -> list[Rule]:
    """The rules of an operator or function.

    Raises:
        Unknown: there is none.
    """
    rules = rules_named(name)
    if not rules:
        raise Unknown(f"{missing(name)}; an operator that has none is given as MODULE:OP")
    return rules


def named_samples(name: str) -> list[Any]:
    """The samples at ``MODULE:NAME``, a list or a function that returns one."""
    return as_samples(load(name)[1], name)


def as_samples(found: Any, name: str) -> list[Any]:
    """The same for what was found there."""
    samples = found() if callable(found) else found
    if not isinstance(samples, Iterable) or isinstance(samples, torch.Tensor):
        raise Unknown(
            f"{name} is a {type(samples).__name__}; expected an iterable of samples, or a function that returns one"
        )
    try:
        listed = [as_sample(given, f"{name}[{i}]") for i, given in enumerate(samples)]
    except TypeError as error:
        raise Unknown(str(error)) from None
    if not listed:
        raise Unknown(f"{name} is empty")
    return listed


def own_samples(rule: Rule, dtype: str = "float64", device: str = "cpu") -> list[Any]:
    """The samples that a rule brings."""
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise Unknown(f"there is no dtype {dtype!r}; expected float64, complex128, float32, ...")
    if rule.samples is None:
        raise Unknown(f"{rule.name} has no samples of its own; name some with --samples MODULE:NAME")
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise Unknown(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    samples = list(rule.samples(wanted, place))
    if not samples:
        raise Unknown(f"{rule.name} has no samples of dtype {dtype}")
    return samples
