"""Operators on strided nested tensors inside dual levels.

The values of such a tensor are a dense view, and have the tangent. So the functions of `mg.nested`, which compute on
the values, have tangents like any other. They run instead of the operators that `override("nested")` replaces.
"""

from __future__ import annotations

from typing import Any

from ...core.internals import decomposed, nested_strides, strided_nested
from ...core.override.replacements import replacements
from ...core.rule import rules
from ...core.rule.catalogue import catalogue
from ...core.schema import tensors_in
from .state import plainly

__all__ = ["nested_call"]

# views of the buffer, and operators that only read the structure
_BELOW = (
    "aten::values",
    "aten::_nested_get_values",
    "aten::_nested_view_from_buffer",
    "aten::_nested_tensor_size",
    "aten::_nested_tensor_strides",
    "aten::_nested_tensor_storage_offsets",
)
_BY_ELEMENT = ("aten::clone", "aten::_to_copy", "aten::neg")  # linear ones; rules know which others are elementwise


def nested_call(op: Any, name: str, composite: bool, args: Any, kwargs: Any) -> Any:
    """The operator on arguments with a nested tensor and a tangent among them.

    Raises:
        NotImplementedError: the operator is neither one of `mg.nested` nor elementwise in one argument.
    """
    constant = name in catalogue and catalogue[name].kind == "nondifferentiable"
    if name in _BELOW or constant or not any("Tensor" in str(r.type) for r in op._schema.returns):
        return plainly(op, args, kwargs)
    nested = args[0]
    functions = replacements["nested"].functions
    if name in functions and (found := functions[name](*args, **kwargs)) is not NotImplemented:
        return found
    if composite:
        return decomposed(op, args, kwargs)
    alone = len(list(tensors_in((*args, *kwargs.values())))) == 1
    if alone and (name in _BY_ELEMENT or name in rules and rules[name].kind == "elementwise"):
        return strided_nested(op(nested.values(), *args[1:], **kwargs), *nested_strides(nested))
    raise NotImplementedError(
        f"{name}: a nested tensor has a tangent at a dual level, and the operator is neither one of torch_manualgrad.nested "
        "nor elementwise in one argument"
    )
