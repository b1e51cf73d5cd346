"""Write torch_manualgrad/typed_ops.pyi: the arguments and results of ``mg.ops.<name>``, for type checkers and editors.

    python -m tools.stubs

The text follows from the annotations of the formulas. `tests/repository/test_types.py` fails where the file is not current.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import torch_manualgrad as mg

PATH = Path(__file__).resolve().parents[1] / "torch_manualgrad" / "typed_ops.pyi"

HEAD = '''"""Written by tools/stubs.py: the types of the formulas in ``mg.ops``."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.types import Number

from .core.registry import Registry
from .core.rule import Formula
'''


def stub() -> str:
    """The text of the file."""
    public = {name: formula for name, formula in sorted(mg.ops.items()) if name[0] != "_" and is_ours(formula)}
    classes = [line for name, formula in public.items() for line in of_formula(name, formula)]
    attributes = [f"    {name}: _{name}" for name in public]
    return "\n".join([HEAD, *classes, "class Ops(Registry[Formula]):", *attributes, "", "ops: Ops", ""])


def is_ours(formula: mg.Formula) -> bool:
    """Whether this package defines the formula; other packages add theirs to ``mg.ops``."""
    return formula.reference.__module__.startswith(f"{mg.__name__}.")


def of_formula(name: str, formula: mg.Formula) -> Iterator[str]:
    """A class for one formula. Its first parameter is ``_``, as many formulas have a parameter ``self``."""
    signature = inspect.signature(formula.reference)
    arguments = "".join(f", {_argument(p)}" for p in signature.parameters.values())
    yield f"class _{name}(Formula):"
    yield f"    def __call__(_{arguments}) -> {signature.return_annotation}: ..."
    yield ""


def _argument(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


if __name__ == "__main__":
    PATH.write_text(stub())
