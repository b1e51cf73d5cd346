"""Python functions that call no operator with a derivative, inside dual levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from .state import innermost, visible

__all__ = ["Functions"]


class Functions(TorchFunctionMode):
    """Intercepts calls that would keep a tangent that they should drop, or lose one silently.

    Only from user code: inside of PyTorch's functions such a mode is off.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = _INSTEAD.get(function)
        if chosen is None or not isinstance(args[0], Tensor) or innermost([args[0]], visible()) is None:
            return function(*args, **(kwargs or {}))
        return chosen(*args, **(kwargs or {}))


def _deepcopy(x: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(x) not in memo:
        memo[id(x)] = x.clone()
    return memo[id(x)]


def _data(x: Tensor) -> Tensor:
    raise NotImplementedError("x.data: x has a tangent at a dual level, which shares its memory; use x.detach()")


# A dictionary of bound methods of types: `Tensor.data` is a property, and PyTorch passes its getter.
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__deepcopy__: _deepcopy,
    Tensor.data.__get__: _data,  # type: ignore[attr-defined]
}
