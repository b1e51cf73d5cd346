"""Inductor's own test programs, differentiated twice: ``python inductor_programs.py FILE FOLDER``.

FILE is a copy of PyTorch's test/inductor/test_torchinductor.py. Its tests are programs with inputs, for a function that compares
the compiled program with the program itself. Here that function compares derivatives: of the program under the rules, and of
the program that ``mg.compile`` has compiled, without inductor; in double precision, where the program allows it.
"""

from __future__ import annotations

import ast
import copy
import importlib
import os
import re
import subprocess
import sys
import unittest
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

HERE = Path(__file__).resolve().parent
CALL = "    import inductor_programs\n    return inductor_programs.compare(self, model, example_inputs, kwargs)\n"
TESTS = """

class Programs(TestCase):
    common = check_model
    device = "cpu"


copy_tests(CommonTemplate, Programs, "cpu")
"""
WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
PRECISE = (torch.float64, torch.complex128)


def changed(text: str) -> str:
    """The file, with `compare`, and without what the installed PyTorch lacks."""
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        try:
            module: Any = importlib.import_module(node.module)
        except ImportError:
            module = None
        names = [a.name for a in node.names if hasattr(module, a.name)]
        missing = [a.asname or a.name for a in node.names if a.name not in names]
        if missing:
            made = [f"from {node.module} import {name}" for name in names]
            made += [f"{name} = unittest.mock.MagicMock()" for name in missing]
            lines[node.lineno - 1 : node.end_lineno] = ["; ".join(["import unittest.mock", *made])]
    head = re.compile(r"(def check_model\(.*?\n\):\n)", re.DOTALL)
    return head.sub(lambda m: m[1] + CALL, "\n".join(lines), count=1) + TESTS


def tensors(x: Any) -> list[Tensor]:
    return [y for y in pytree.tree_leaves(x) if isinstance(y, Tensor)]


def leaves(given: Any, double: bool) -> Any:
    """The inputs with their strides, tracked if they are real or complex numbers."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return x
        dtype = WIDE.get(x.dtype, x.dtype) if double else x.dtype
        made = x.detach().to(dtype, copy=True)
        if 0 not in x.stride():
            made = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x.detach())
        return made.requires_grad_() if dtype in (*WIDE, *PRECISE) else made

    return pytree.tree_map(leaf, given)


def derivatives(function: Callable[..., Any], args: Any, kwargs: Any, parameters: Sequence[Tensor]) -> list[list[Any]]:
    """The results, the gradients of a sum of them with weights, and those of such a sum of the gradients."""
    torch.manual_seed(0)
    variables = [x for x in tensors((args, kwargs)) if x.requires_grad] + list(parameters)
    found: list[list[Any]] = [tensors(function(*args, **kwargs))]
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for x in found[-1]:
            if x is not None and x.requires_grad:
                weights = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape)
                total = total + (x * weights.to(x.dtype)).sum().real
        if not total.requires_grad or not variables:
            break
        found.append(list(torch.autograd.grad(total, variables, create_graph=True, allow_unused=True)))
    return found


def compare(test: unittest.TestCase, model: Any, args: Any, kwargs: Any = None) -> None:
    """Compare derivatives; skip programs that cannot be differentiated, or that compile something themselves."""
    import torch_manualgrad as mg

    if hasattr(model, "_torchdynamo_orig_callable"):
        test.skipTest("it is compiled already")
    torch._dynamo.reset()
    for double in (True, False):
        ours = copy.deepcopy(model).double() if double and isinstance(model, nn.Module) else model
        parameters = list(ours.parameters()) if isinstance(ours, nn.Module) else []
        state = copy.deepcopy(ours.state_dict()) if isinstance(ours, nn.Module) else None
        try:
            with mg.override("*"):
                expected = derivatives(ours, leaves(args, double), kwargs or {}, parameters)
            break
        except Exception as error:
            if not double:
                test.skipTest(f"it has no second derivative: {error}")
    if state is not None:
        ours.load_state_dict(state)
    compiled = mg.compile(lambda *args, **kwargs: ours(*args, **kwargs), lowering="eager")
    found = derivatives(compiled, leaves(args, double), kwargs or {}, parameters)
    tolerance = {"rtol": 1e-7, "atol": 1e-8} if double else {"rtol": 1e-3, "atol": 1e-3}
    for orders in zip_longest(expected, found, fillvalue=()):
        for x, y in zip_longest(*orders):  # None and zero are the same
            like = x if x is not None else y
            if like is not None:
                x, y = (torch.zeros_like(like) if z is None else z for z in (x, y))
                torch.testing.assert_close(y, x, equal_nan=True, **tolerance)


def main() -> int:
    file, folder = (Path(name).resolve() for name in sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_programs.py").write_text(changed(file.read_text()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE)))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]
    command += [f"--rootdir={folder}", "test_programs.py", "-k", "Programs", *sys.argv[3:]]
    return subprocess.run(command, env=environment, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
