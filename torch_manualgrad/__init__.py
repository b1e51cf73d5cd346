"""PyTorch's hand-written derivatives as operators that can be read, called, swapped and differentiated again."""

# isort: skip_file
from typing import TYPE_CHECKING, Any

from .core.once import defining as _defining, refuse_reload as _refuse_reload  # first: nothing is to be defined twice
from .core import compile_cache as _compile_cache, libraries as _libraries
from .core.engine.sharding import register_with as _register_sharding_with
from .core.engine.node import SingleLevelFunction
from .core.op.custom_op import CustomOp
from .core.op.define import custom_op
from .core.op.mutable import MutableOp
from .core.op.implementation import BackwardContext
from .core.rule import Formula, Kernel, Rule, Sample, elementwise, formula, linear_in, rule, rules
from .core.rule.catalogue import catalogue, composite, gap, nondifferentiable, view
from .typed_ops import ops
from .core.override.override import Active, Handle, active, install, override, uninstall, unregister

# These define operators, and ``torch.ops.manualgrad`` has all of them from now on.
with _defining():
    from . import derivatives, linalg, nested
from .linalg import Degeneracy

if TYPE_CHECKING:
    from . import (
        attention,
        checkpointing,
        compiling,
        custom_rules,
        distributed,
        forward_ad,
        implicit,
        sparsity,
        testing,
    )
    from .checkpointing import checkpoint
    from .compiling import compile
    from .custom_rules import custom_jvp, custom_vjp
    from .sparsity import hessian_blocks, sparse_hessian, sparse_jacobian
    from .testing import audit

__all__ = [
    "Active",
    "BackwardContext",
    "CustomOp",
    "Degeneracy",
    "Formula",
    "Handle",
    "Kernel",
    "MutableOp",
    "Rule",
    "Sample",
    "SingleLevelFunction",
    "active",
    "attention",
    "audit",
    "catalogue",
    "checkpoint",
    "checkpointing",
    "compile",
    "compiling",
    "composite",
    "custom_jvp",
    "custom_op",
    "custom_rules",
    "custom_vjp",
    "derivatives",
    "distributed",
    "elementwise",
    "formula",
    "forward_ad",
    "gap",
    "hessian_blocks",
    "implicit",
    "install",
    "linalg",
    "linear_in",
    "nested",
    "nondifferentiable",
    "ops",
    "override",
    "rule",
    "rules",
    "sparse_hessian",
    "sparse_jacobian",
    "sparsity",
    "testing",
    "uninstall",
    "unregister",
    "view",
]
__version__ = "0.1.0"
_ON_USE = (  # packages that are imported on use
    "attention",
    "checkpointing",
    "compiling",
    "custom_rules",
    "distributed",
    "forward_ad",
    "implicit",
    "sparsity",
    "testing",
)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ON_USE:
        return import_module(f"{__name__}.{name}")
    if name == "compile":
        from .compiling import compile

        return compile
    if name == "checkpoint":
        return import_module(f"{__name__}.checkpointing").checkpoint
    if name in ("custom_jvp", "custom_vjp"):
        return getattr(import_module(f"{__name__}.custom_rules"), name)
    if name in ("hessian_blocks", "sparse_hessian", "sparse_jacobian"):
        return getattr(import_module(f"{__name__}.sparsity"), name)
    if name == "audit":
        from .testing import audit

        return audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_sharding() -> None:
    from .distributed.registration import register  # most programs have no distributed tensors

    register()


_register_sharding_with(_register_sharding)
_refuse_reload(globals())
_compile_cache.settle()
_libraries.load()
