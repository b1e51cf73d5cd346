"""A module as a function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.rule import Sample
from . import tree


class ModuleCall(Sample):
    """A call of a module with the module's state added as keywords; its repr is that of the original call."""

    __slots__ = ("given",)

    given: Sample

    def __repr__(self) -> str:
        return repr(self.given)


def with_parameters(module: torch.nn.Module, given: Sample) -> tuple[Callable[..., Any], Sample]:
    """The module as a function that also takes its parameters and buffers, and the call of it.

    The parameters that require grad are differentiable, as are the inputs that would be without them. The other
    parameters and the buffers are constants. Calls do not change the module's own buffers.

    Args:
        module: the module.
        given: a call of it.

    Returns:
        A function, and a call of it whose keywords have the names of parameters and buffers; the module itself and its
        call if there is nothing to differentiate.

    Raises:
        ValueError: a parameter has the name of a keyword of the call.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if taken := state.keys() & given.kwargs:
        raise ValueError(f"{min(taken)!r} is the name of a parameter and of a keyword of the call")
    leaves = [x for _, x in tree.leaves((given.args, given.kwargs))]
    marked = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    if not marked:
        leaves = [x.detach().requires_grad_() if tree.is_differentiable(x) else x for x in leaves]
    if not any(isinstance(x, Tensor) and x.requires_grad for x in (*leaves, *state.values())):
        return module, given
    args, kwargs = tree.rebuild((given.args, given.kwargs), leaves)
    call = ModuleCall(*args, **kwargs, **state)
    object.__setattr__(call, "given", given)
    return _functional(module, state), call


def _functional(module: torch.nn.Module, state: Mapping[str, Tensor]) -> Callable[..., Any]:
    buffers = dict(module.named_buffers()).keys()

    def call(*args: Any, **named: Any) -> Any:
        # a module may update its buffers in place: each call has its own
        here = {name: x.clone() if name in buffers else x for name, x in named.items() if name in state}
        others = {name: x for name, x in named.items() if name not in state}
        return called_with(module, here, args, others)

    return call


def called_with(module: torch.nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Any = None) -> Any:
    """The result of a module with other parameters and buffers, which has its own again afterwards.

    ``torch.func.functional_call`` with its ties leaves the other ones in a submodule that is used twice.

    Args:
        module: the module.
        state: the tensors, by the names of ``named_parameters`` and ``named_buffers``; tied ones have one name.
        args: of the call.
        kwargs: of the call.
    """
    names = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    places = {}
    for prefix, submodule in module.named_modules():  # each once
        for key, x in (*submodule._parameters.items(), *submodule._buffers.items()):
            place = f"{prefix}.{key}" if prefix else key
            name = place if place in state else names.get(id(x))
            if name is not None and name in state:
                places[place] = state[name]
    return torch.func.functional_call(module, places, args, kwargs, tie_weights=False)


def without_parameters(reference: Callable[..., Any], call: Sample) -> Callable[..., Any]:
    """`reference`, which takes the arguments of the call, as a function that ignores the parameters of a `ModuleCall`."""
    if not isinstance(call, ModuleCall):
        return reference
    keywords = call.given.kwargs
    return lambda *args, **named: reference(*args, **{name: x for name, x in named.items() if name in keywords})
