"""Operators that write to arguments, each made from a functional operator and copies.

The functional operator takes the same arguments, and returns the results and then the new value of each written
argument. It has the derivative, like any other custom op. In a differentiated or batched call, the operator calls it
and copies the new values into the arguments: PyTorch handles the effects of a copy on graphs, tangents, views, leaves
and version counters. Other calls write in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...arguments import explain
from ..engine.derivative import redispatch
from ..engine.kernel import Mode, differentiated
from ..engine.vmap import loop
from ..internals import below_in_place_keys, register_fake, skipped_by_dynamo, storage_of, value_of
from ..overlap import share_elements
from ..schema import Signature, tensors_in, with_tensors
from .custom_op import CustomOp, Swap
from .implementation import exchange, location_of

__all__ = ["MutableOp", "functional_schema"]

_OF_DERIVATIVES = ("save_for_backward", "backward", "jvp", "autograd", "output_differentiability")


class MutableOp(CustomOp):
    """A custom op that writes to some of its arguments. Made by `custom_op`.

    The implementations for devices write to the arguments. The backward receives a cotangent for each result that is
    not an argument, then one for the new value of each written argument, in schema order. ``inputs`` has the old values
    of written arguments and ``output`` the new ones: both may be saved. The gradient for a written argument is that of
    its old value, None if nothing reads it.

    Attributes:
        functional: the custom op ``<name>_functional`` with this derivative, which returns the new values and does not
            write.
    """

    def __init__(self, schema: str, reference: Callable[..., Any], **options: Any) -> None:
        returns = Signature(schema).returns
        self._new = [i for i, r in enumerate(returns) if r.alias is None]
        self._all_new = len(self._new) == len(returns)
        super().__init__(schema, reference, **options)
        try:
            self.functional = CustomOp(functional_schema(self.signature), self._run_functional)
        except ValueError:  # its name is taken
            super().undefine()
            raise
        self.functional.impl_vmap(self._vmap_rule)

    def _read(self, schema: str) -> Signature:
        signature = Signature(schema)
        signature.refuse_aliases(but_writes=True)
        marks: dict[str, str] = {}
        for i in signature.written:
            mark = str(sorted(signature.schema.arguments[i].alias_info.before_set))
            name = signature.names[i]
            if (other := marks.setdefault(mark, name)) != name:
                raise ValueError(
                    f"{signature.name}: arguments {other!r} and {name!r} have one letter in the schema ({signature.schema}). "
                    "Expected a letter for each written argument."
                )
        for i, r in enumerate(signature.returns):
            if signature.schema.returns[i].alias_info is not None and r.alias is None:
                raise ValueError(f"{signature.name}: result {i} of the schema aliases no argument ({signature.schema})")
        return signature

    def _register(self, short: str) -> None:
        library = self._library
        library.impl(short, skipped_by_dynamo(self._kernel_of("default")), "CompositeExplicitAutograd")
        library.impl(short, skipped_by_dynamo(self.kernel), "Autograd", with_keyset=True)
        # in inference mode, where a tensor made outside still has a version
        library.impl(short, skipped_by_dynamo(self._count), "ADInplaceOrView", with_keyset=True)
        # lazy conjugates and negatives: PyTorch's own kernels treat a result as the written argument
        for key in ("Conjugate", "Negative"):
            library.impl(short, skipped_by_dynamo(self._run_by_copies), key)
        # before a transform wraps the arguments: it then sees the copies, and refuses writes to tensors that it does
        # not own
        library.impl(short, skipped_by_dynamo(self._run_by_copies), "FuncTorchDynamicLayerFrontMode")
        register_fake(library, short, self._run_fake, location_of(self.reference))
        if any(r.alias is not None or not r.is_tensor or r.optional for r in self.signature.returns):
            # PyTorch functionalizes the others itself, and may then write in place in the compiled program
            library.impl(short, skipped_by_dynamo(self._run_by_copies), "Functionalize")

    def undefine(self) -> None:
        """Unregister the op, its functional op and their implementations. No call may be in flight."""
        super().undefine()
        self.functional.undefine()

    def impl_vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``(info, in_dims, *args) -> (output, out_dims)``, as in ``torch.library.register_vmap``.

        Every written argument has a batch dimension, and the function writes to the whole batch. Without it the op runs
        once for each element of the batch.
        """
        return super().impl_vmap(function)

    def impl_save_for_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``(inputs, output) -> residuals``: ``inputs`` has the old values of written arguments, ``output``
        the results that are not arguments, then the new values, by the names of the arguments."""
        return self.functional.impl_save_for_backward(function)

    def impl_backward(
        self,
        function: Callable[..., Any] | None = None,
        *,
        output_differentiability: Sequence[bool] | None = None,
    ) -> Any:
        """Register ``(ctx, saved, *grads) -> {input name: gradient or None}``; see `CustomOp.impl_backward`.

        ``grads`` are the cotangents of the results that are not arguments, then of the new values. The gradient for a
        written argument is that of its old value. ``output_differentiability`` has a bool for each of ``grads``.
        """
        return self.functional.impl_backward(function, output_differentiability=output_differentiability)

    def impl_jvp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``(inputs, output, tangents) -> tangents`` of the results that are not arguments, then of the new
        values; see `CustomOp.impl_jvp`."""
        return self.functional.impl_jvp(function)

    def impl_autograd(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a whole autograd kernel of the functional op; it calls ``functional.below_autograd``."""
        return self.functional.impl_autograd(function)

    def swap(self, **implementations: Any) -> Swap:
        """Swap implementations temporarily; see `CustomOp.swap`. Derivatives are swapped on the functional op."""
        derivative = {k: v for k, v in implementations.items() if k in _OF_DERIVATIVES}
        others = {k: v for k, v in implementations.items() if k not in _OF_DERIVATIVES}
        functional = self.functional
        return Swap(
            [
                (self, exchange(self.name, self.signature, self._base, others)),
                (functional, exchange(functional.name, functional.signature, functional._base, derivative)),
            ]
        )

    # -- kernels ------------------------------------------------------------------------------------------------

    def kernel(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel at the key Autograd."""
        if (error := self.functional.selected.error) is not None:
            raise RuntimeError(error)
        values = with_tensors(self.signature, list(self.signature.bind(args, kwargs)))
        if differentiated(self.signature, values) in (Mode.NOTHING, Mode.PLAIN_NOTHING):
            return self._write(keyset, values)
        return self._by_copies(values)

    def _count(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel at the key ADInplaceOrView."""
        return self._write(keyset, self.signature.bind(args, kwargs))

    def _write(self, keyset: Any, values: Sequence[Any]) -> Any:
        """Write in place, and increment the version counters."""
        written = []
        for i in self.signature.written:
            for x in tensors_in((values[i],)):
                if not x.is_inference():
                    written.append(x)
                elif not torch.is_inference_mode_enabled():
                    raise RuntimeError(
                        f"{self.name}: argument {self.signature.names[i]!r} is an inference tensor. Inplace update to inference "
                        "tensor outside InferenceMode is not allowed: write to a clone."
                    )
        try:
            result = redispatch(self.op, self.signature, keyset & below_in_place_keys, values)
        finally:  # also if a kernel raises after it has written
            if written:
                torch.autograd.graph.increment_version(written)
        return result if self._all_new else self._returned(values, self._new_of(result))

    def _run_by_copies(self, *args: Any, **kwargs: Any) -> Any:
        return self._by_copies(self.signature.bind(args, kwargs))

    def _by_copies(self, values: Sequence[Any]) -> Any:
        """Call the functional op, and copy the new values into the arguments."""
        self._refuse_one_written_twice(values)
        # the functional op may save old values, which will be overwritten
        positional, keywords = self.signature.split(self._with_clones(values))
        outputs = self.functional.signature.outputs(self.functional.op(*positional, **keywords))
        count = len(self._new)
        for i, new in zip(self.signature.written, outputs[count:]):
            for x, y in zip(tensors_in([values[i]]), tensors_in([new]), strict=True):
                name = self.signature.names[i]
                if x.shape != y.shape:
                    raise RuntimeError(
                        f"{self.name}: the implementation makes argument {name!r} of shape {list(x.shape)} one of shape "
                        f"{list(y.shape)}. Where a derivative or a transform takes part, the shape must stay."
                    )
                # a view whose base was written to, such as by the copy before, is a leaf until its node is read
                _ = x.grad_fn
                try:
                    x.copy_(y)
                except RuntimeError as error:
                    explain(error, f"{self.name}: argument {name!r} cannot be written to here.")
                    raise
        return self._returned(values, outputs[:count])

    def _refuse_one_written_twice(self, values: Sequence[Any]) -> None:
        """Raise if the op writes to an element twice: both new values would be computed from the same old value."""
        seen: dict[int, list[tuple[str, Tensor]]] = {}
        for i in self.signature.written:
            name = self.signature.names[i]
            for x in tensors_in([values[i]]):
                alike = seen.setdefault(_storage(x) or id(x), [])
                value = value_of(x)
                for other, y in alike:
                    if value is y or share_elements(value, y):
                        raise RuntimeError(
                            f"{self.name}: argument {name!r} has a tensor that shares memory with one of {other!r}, and the op "
                            "writes to both. Where a derivative or a transform takes part, pass a clone."
                        )
                alike.append((name, value))

    def _returned(self, values: Sequence[Any], new: Sequence[Any]) -> Any:
        """The results: new values, or arguments according to the schema."""
        given = iter(new)
        found = tuple(next(given) if r.alias is None else values[r.alias] for r in self.signature.returns)
        return found if len(found) > 1 else found[0] if found else None

    def _new_of(self, result: Any) -> list[Any]:
        outputs = self.signature.outputs(result)
        return [outputs[i] for i in self._new]

    def _with_clones(self, values: Sequence[Any]) -> list[Any]:
        """The values, with a clone of each written argument and of each tensor that shares its memory."""
        written = {_storage(x) for x in tensors_in([values[i] for i in self.signature.written])} - {None}
        found = list(values)
        for i in self.signature.tensor_like:
            found[i] = _cloned(values[i], None if i in self.signature.written else written)
        return found

    # -- the functional op --------------------------------------------------------------------------------------

    def _run_functional(self, *args: Any, **kwargs: Any) -> Any:
        values = self._with_clones(self.signature.bind(args, kwargs))
        return self._outputs(values, self._call(*values))

    def _call(self, *values: Any) -> Any:
        positional, keywords = self.signature.split(values)
        return self.op(*positional, **keywords)

    def _outputs(self, values: Sequence[Any], result: Any) -> Any:
        """The results of the functional op, given the arguments after the write and the result of this one."""
        found = (*self._new_of(result), *[values[i] for i in self.signature.written])
        return found if len(found) > 1 else found[0]

    def _vmap_rule(self, info: Any, in_dims: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values, dims = list(self.signature.bind(args, kwargs)), list(in_dims)
        for i in self.signature.written:
            values[i], dims[i] = _batched(values[i], dims[i], info.batch_size)
        chosen = self._current.get("vmap")
        if chosen is not None:
            positional, keywords = self.signature.split(values)
            result, out_dims = chosen.function(info, self.signature.Inputs(*dims), *positional, **keywords)
        else:
            result, out_dims = loop(self.name, self.signature, self._call, info, dims, values)
        return self._outputs(values, result), self._outputs(dims, out_dims)


def functional_schema(signature: Signature) -> str:
    """The schema of the functional operator of an operator that writes to arguments."""
    text = str(signature.schema)
    name, _, rest = text.partition("(")
    arguments, _, returns = rest.rpartition(" -> ")
    kept = [r for r in _split(returns.strip().removeprefix("(").removesuffix(")")) if "!" not in r]
    types = [str(signature.schema.arguments[i].type) for i in signature.written]
    new = [f"{_written_type(t)} {signature.names[i]}" for t, i in zip(types, signature.written)]
    plain = re.sub(r"\bTensor\(\w+!\)", "Tensor", arguments)
    return f"{name}_functional({plain} -> ({', '.join([*kept, *new])})"


def _split(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(",") if piece.strip()]


def _written_type(type_: str) -> str:
    """``"Optional[List[Tensor]]"`` in schema syntax: ``"Tensor[]?"``."""
    found = "Tensor[]" if "List[Tensor]" in type_ else "Tensor?[]" if "List[" in type_ else "Tensor"
    return found + "?" * type_.startswith("Optional[")


def _cloned(value: Any, storages: set[int | None] | None = None) -> Any:
    """A clone of the tensors, or only of those in these storages."""
    if isinstance(value, (list, tuple)):
        return [_cloned(v, storages) for v in value]
    if not isinstance(value, Tensor) or storages is not None and _storage(value) not in storages:
        return value
    return value.clone()


def _storage(x: Tensor) -> int | None:
    storage = storage_of(x)
    return None if storage is None else storage._cdata


def _batched(value: Any, dim: Any, size: int) -> tuple[Any, Any]:
    """A copy of the value with a batch dimension, and that dimension."""
    if isinstance(value, (list, tuple)):
        pairs = [_batched(v, d, size) for v, d in zip(value, dim)]
        return [v for v, _ in pairs], [d for _, d in pairs]
    if value is None or dim is not None:
        return _cloned(value), dim
    return value.expand(size, *value.shape).clone(), 0
