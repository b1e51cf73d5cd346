"""An override of one module: its calls, and their backwards, wherever the module is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .override import override

__all__ = ["ModuleOverride", "override_module"]


class _Forward:
    """Takes the place of ``module.forward``. It is copied and pickled with the module."""

    def __init__(self, module: torch.nn.Module, before: Any, block: override) -> None:
        self.module, self.before, self.block = module, before, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chain = [one for one in _chain(self) if isinstance(one, _Forward)]
        return self._call([one.block for one in chain], chain[-1].before, args, kwargs)

    def _call(self, blocks: list[override], own: Any, args: Any, kwargs: Any) -> Any:
        if blocks:  # the last is the first that was asked for; the one asked for last is to be innermost
            with blocks.pop().again():
                return self._call(blocks, own, args, kwargs)
        if own is not None:
            return own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class ModuleOverride:
    """What ``override.module`` returns: it acts until `remove`, or until the ``with`` block ends."""

    def __init__(self, module: torch.nn.Module, block: override) -> None:
        self.module = module
        self._forward = _Forward(module, module.__dict__.get("forward"), block)
        module.__dict__["forward"] = self._forward

    def __repr__(self) -> str:
        now = self.module.__dict__.get("forward")
        state = "active" if any(one is self._forward for one in _chain(now)) else "removed"
        return f"<an override of {type(self.module).__name__}: {state}>"

    def remove(self) -> None:
        """Give the module its own forward back. Removing twice does nothing.

        Raises:
            RuntimeError: another override or patch of the module came later, and is to be removed first.
        """
        now = self.module.__dict__.get("forward")
        if now is self._forward:
            if self._forward.before is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self._forward.before
        elif any(one is self._forward for one in _chain(now)):
            raise RuntimeError("the forward of this module was replaced again since; undo that first")

    def __enter__(self) -> ModuleOverride:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def _chain(forward: Any) -> list[Any]:
    """This forward, and what each has replaced."""
    found = []
    while forward is not None:
        found.append(forward)
        forward = forward.before if isinstance(forward, _Forward) else None
    return found


def override_module(module: Any, block: override) -> ModuleOverride:
    """Let ``block`` be entered around each call of ``module``."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"override.module takes a torch.nn.Module, got {module!r}")
    return ModuleOverride(module, block)
