"""torch.compile with backend="manualgrad" in the place of PyTorch's backends; `installed` calls `replace`.

The graphs run as they are: with inductor, PyTorch's tests would take hours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
import torch._dynamo.utils
import torch.testing._internal.common_utils
from torch._dynamo import eval_frame

REPLACED = {"eager", "aot_eager", "inductor", "aot_eager_decomp_partition", "aot_eager_default_partitioner"}
OPTIONS = {"lowering": "eager"}


def add_names_of_other_versions() -> None:
    """Names that PyTorch's tests of other versions import."""
    for module, name, value in (
        (torch.testing._internal.common_utils, "disable_translation_validation_if_dynamic_shapes", lambda test: test),
        (torch._dynamo.utils, "CompileProfiler", type("CompileProfiler", (), {})),
        (torch._dynamo.compiled_autograd, "enable", getattr(torch._dynamo.compiled_autograd, "_enable", None)),
    ):
        if not hasattr(module, name):
            setattr(module, name, value)


def replace() -> None:
    """Replace the backends that are named, and that of Dynamo's counter of graphs."""
    from torch_manualgrad.compiling.backend import backend as ours_of

    compile, count = torch.compile, torch._dynamo.testing.CompileCounter.__call__
    ours = torch._TorchCompileWrapper("manualgrad", None, OPTIONS, None)

    @functools.wraps(compile)
    def compiled(model: Any = None, **given: Any) -> Any:
        if model is None:
            return lambda model: compiled(model, **given)
        chosen = given.get("backend", "inductor")
        if isinstance(chosen, str) and chosen in REPLACED:
            given |= {"backend": "manualgrad", "options": OPTIONS, "mode": None}
        return compile(model, **given)

    def replacing(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def optimize(backend: Any = "inductor", *args: Any, **kwargs: Any) -> Any:
            return function(ours if isinstance(backend, str) and backend in REPLACED else backend, *args, **kwargs)

        return optimize

    def counted(self: Any, graph: Any, inputs: Any) -> Any:
        count(self, graph, inputs)
        return ours_of(graph, inputs, options=OPTIONS)

    torch.compile = compiled
    for name in ("optimize", "optimize_assert"):
        changed = replacing(getattr(eval_frame, name))
        setattr(eval_frame, name, changed)
        setattr(torch._dynamo, name, changed)
    torch._dynamo.testing.CompileCounter.__call__ = counted
