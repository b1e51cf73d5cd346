"""Right functions: the originals of the mutants, and one call of each of many operators of PyTorch's database."""

from __future__ import annotations

import functools

import torch

from torch_manualgrad.testing.database.opinfo import Case, op_db, op_samples
from torch_manualgrad.testing.inputs import tree

from .subject import Subject, is_usable

_SPARSE = 'sparse: `mg.override("*")` does not make all modes right, see coverage.md'
_VMAP = "PyTorch's vmap has no rule for it, and raises"
#: Functions that are not right in all that is checked, and why; they are not counted as right.
NOT_RIGHT = {
    "to_sparse": _SPARSE,
    "sparse.mm": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "roll": "PyTorch's vmap over numbers (0-dim tensors) rolls the batch",
    "nn.functional.hinge_embedding_loss": "the samples are differentiated in the target, where the loss jumps",
    "aten::unsafe_split.Tensor": "the results share memory with the input without its version counter, as the name says",
    "torch_nn::_linear_cross_entropy_batch_chunked": "with no other rule, PyTorch's log_softmax raises in third order",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": "the same",
    "aten::linalg_eig": "with no other rule, PyTorch's linalg_solve has wrong third derivatives",
    "column_stack": _VMAP,
    "masked_select": _VMAP,
    "nn.functional.rrelu": _VMAP,
    "_batch_norm_with_update": _VMAP,
    "nn.functional.instance_norm": "PyTorch's vmap refuses it, as it writes to running statistics",
    "native_group_norm": "PyTorch's kernel reads a weight that is not contiguous as if it were, and refuses such inputs",
    "view_as_complex": "it refuses inputs whose last dimension is not contiguous",
    "as_strided": "it reads the storage, whatever the neg bit says",
    "as_strided_copy": "the same",
    "grid_sampler_3d": "an assertion within PyTorch's vmap over all inputs fails",
    "nn.functional.binary_cross_entropy": "PyTorch's gradient bounds x (1 - x) from below by 1e-12",
    "stft": "of an expanded input PyTorch's gradient is that of one number, spread over all",
    "normal": "PyTorch's gradient is zero, while the samples move with the mean and the standard deviation",
    "aten::addmv": "of a matrix without rows PyTorch's result has the size of its first argument",
    "aten::igammac": "PyTorch's values at a = 1e-30 are off by more than half",
    "aten::binary_cross_entropy_backward": "PyTorch's kernel bounds x (1 - x) from below by 1e-12, its derivative does not",
}


@functools.cache
def names() -> tuple[str, ...]:
    """The operators of PyTorch's database that have derivatives, any number of them evenly over the alphabet.

    Operators of a family follow each other there. The order does not depend on the outcomes.
    """
    found = sorted({op.name for op in op_db() if op.supports_autograd})
    return tuple(name for i in range(7) for name in found[i::7] if name not in NOT_RIGHT)


def of_database(name: str) -> Subject | None:
    """One call of an operator, with our rules instead of PyTorch's derivatives; None if there is no small one."""
    try:
        case = next(filter(_is_usable, op_samples(name, torch.float64)), None)
    except Exception:  # the database cannot make samples here
        return None
    return None if case is None else Subject(name, case.fn, (case.sample,), ("*",))


def _is_usable(case: Case) -> bool:
    if case.gaps or not is_usable(case.sample):
        return False
    results = tree.tensors(case.fn(*case.sample.args, **case.sample.kwargs))
    return all(o.layout is torch.strided and bool(o.isfinite().all()) for o in results)
