"""Samples and gauge-fixing wrappers from PyTorch's own operator database.

The database is a module that PyTorch keeps for its tests, `torch.testing._internal.common_methods_invocations`.
Only functions in this file import it. This is the one exception to the rule that private names live in core/internals,
because the module is needed for testing only and takes seconds to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...arguments import checked
from ...core.rule import Sample, reached as torch_reached
from ..checking.check import CheckFailed, check
from ..checks.table import CHECKS
from ..comparison.modes import MODES
from ..comparison.report import Report
from ..inputs import tree

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_WITHOUT_FUNC = dict.fromkeys(
    (f"{mode}/func" for mode in MODES if mode != "fwd-fwd"),
    "torch.func wraps tensors that have strides, and compressed sparse ones have none",
)


@dataclass(frozen=True)
class Case:
    """One sample of one entry, with the function to differentiate.

    The function is the operator in its gauge-fixing wrapper, with only those outputs that PyTorch differentiates.
    """

    name: str
    fn: Callable[..., Any]
    sample: Sample

    @property
    def gaps(self) -> dict[str, str]:
        """Gaps for `check`: on a compressed tensor, torch.func lacks modes that plain autograd has."""
        given = tree.tensors((self.sample.args, self.sample.kwargs))
        return _WITHOUT_FUNC if any(x.layout in _COMPRESSED for x in given) else {}


@cache
def op_db() -> tuple[Any, ...]:
    """PyTorch's operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return tuple(op_db)


def entries(name: str) -> list[Any]:
    """The database's entries (variants) for an operator.

    Args:
        name: the database's name or ATen's: linalg.lu, aten::linalg_lu.

    Returns:
        The entries.

    Raises:
        KeyError: there is none.
    """
    plain = name.removeprefix("aten::").removeprefix("aten.").split(".default")[0]
    found = [op for op in op_db() if name == op.name or plain in (op.name, op.formatted_name, op.aten_name)]
    if not found:
        # ATen's name of the operator that the public function calls: _linalg_svd, _softmax
        bare = plain.lstrip("_")
        found = [
            op
            for op in op_db()
            if bare in (op.name, op.aten_name)
            or op.name.replace(".", "_") == bare
            or bare in {alias.name for alias in op.aliases}
            or op.name.rsplit(".", 1)[-1] == bare
        ]
    if not found:
        raise KeyError(f"no operator {name!r} in PyTorch's operator database")
    return found


# The entries besides linalg.* that reach one of our rules, including those that are composed of other operators.
_NORMS = """
    cdist dist masked.norm masked.normalize nn.functional.normalize nn.functional.cosine_similarity
    nn.functional.pairwise_distance nn.functional.pdist nn.functional.triplet_margin_loss norm renorm
"""
_LINEAR_ALGEBRA = """
    addbmm addmm addmv baddbmm bmm cholesky cholesky_inverse cholesky_solve corrcoef cov logdet lu lu_solve lu_unpack
    matmul matrix_exp mm mv nn.functional.bilinear nn.functional.linear ormqr pca_lowrank pinverse qr svd svd_lowrank
    triangular_solve
"""
_LAYERS = """
    nn.functional.batch_norm nn.functional.group_norm nn.functional.instance_norm nn.functional.layer_norm
    native_batch_norm native_layer_norm
"""
_LOSSES = """
    nn.functional.binary_cross_entropy nn.functional.ctc_loss nn.functional.huber_loss
    nn.functional.linear_cross_entropy nn.functional.mse_loss nn.functional.multi_margin_loss
    nn.functional.multilabel_margin_loss nn.functional.nll_loss nn.functional.smooth_l1_loss
    nn.functional.soft_margin_loss
"""
_SINCE = {"nn.functional.linear_cross_entropy": "2.13"}  # the torch release that adds it


def reached() -> list[str]:
    """The database's names of the operators that reach one of this package's rules."""
    linalg = {op.name for op in op_db() if op.name.startswith("linalg.") and op.supports_autograd}
    names = [*_NORMS.split(), *sorted(linalg), *_LINEAR_ALGEBRA.split(), *_LAYERS.split(), *_LOSSES.split()]
    return [name for name in names if torch_reached(_SINCE.get(name, "2.10"))]


@checked
def op_samples(
    name: str, dtype: torch.dtype = torch.float64, device: str = "cpu", limit: int | None = None
) -> Iterator[Case]:
    """The cases of an operator that PyTorch's own gradient tests use; none if it does not differentiate this dtype.

    Inputs that require grad in the database are the differentiable ones. A sample without any, or whose result does not
    depend on them differentiably, is left out.

    Args:
        name: as in `entries`.
        dtype: of the samples.
        device: of the samples.
        limit: the largest number of cases of each entry, evenly spread; None for all.

    Yields:
        The cases.

    Raises:
        KeyError: an unknown operator.
    """
    for op in entries(name):
        if not op.supports_autograd or dtype not in op.supported_backward_dtypes(torch.device(device).type):
            continue
        cases = [case for given in _samples(op, torch.device(device), dtype) if (case := _case(op, given)) is not None]
        # spread over the list, as the first samples tend to be the smallest
        step = 1 if limit is None else max(1, math.ceil(len(cases) / limit))
        yield from cases[step // 2 :: step]


def _samples(op: Any, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """The entry's samples, with the seed of its `sample_inputs`, which also searches the whole stack for a running test."""
    from torch.testing._internal.common_utils import SEED, set_rng_seed

    found, samples = [], iter(op.sample_inputs_func(op, device, dtype, True))
    while True:
        set_rng_seed(SEED)
        try:
            found.append(next(samples))
        except StopIteration:
            return found


def _case(op: Any, given: Any) -> Case | None:
    sample = Sample(given.input, *given.args, **given.kwargs)
    if not any(x.requires_grad for x in tree.tensors((sample.args, sample.kwargs))):
        return None
    readout = given.output_process_fn_grad

    def call(*args: Any, **kwargs: Any) -> list[Tensor]:
        if op.gradcheck_wrapper is not None:
            result = op.gradcheck_wrapper(op.get_op(), *args, **kwargs)
        else:
            result = op(*args, **kwargs)
        return tree.tensors(result if readout is None else readout(result))

    state = torch.get_rng_state()
    try:
        kept = [
            i
            for i, o in enumerate(call(*sample.args, **sample.kwargs))
            if o.requires_grad and tree.is_differentiable(o)
        ]
    finally:
        torch.set_rng_state(state)

    def fn(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        result = call(*args, **kwargs)
        return tuple(result[i] for i in kept)

    if not kept:
        return None
    fn.__name__ = op.formatted_name
    return Case(op.formatted_name, fn, sample.named(given.name) if getattr(given, "name", "") else sample)


@checked
def check_op(
    name: str,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    *,
    limit: int | None = None,
    modes: Sequence[str] = MODES,
    checks: Sequence[str] = CHECKS,
    raise_on_failure: bool = True,
    **options: Any,
) -> Report:
    """`check` of an operator on its samples from the database.

    Args:
        name: as in `entries`.
        dtype: as in `op_samples`.
        device: as in `op_samples`.
        limit: as in `op_samples`.
        modes: as in `check`.
        checks: as in `check`.
        raise_on_failure: as in `check`.
        options: further arguments of `check`.

    Returns:
        The report.

    Raises:
        CheckFailed: as `check`.
        KeyError: an unknown operator.
        ValueError: there was nothing to check.
    """
    found = Report()
    for position, case in enumerate(op_samples(name, dtype, device, limit)):
        # compiling is for the first sample only
        wanted = tuple(c for c in checks if c not in ("compile", "compiled") or position == 0)
        found += check(
            case.fn,
            [case.sample],
            name=case.name,
            modes=modes,
            checks=wanted,
            raise_on_failure=False,
            **{"gaps": case.gaps, **options},
        )
    if not found.results:
        raise ValueError(f"no differentiable samples of {name} in {dtype}")
    if raise_on_failure and found.failures:
        raise CheckFailed(found)
    return found


@cache
def nested_entries() -> tuple[Any, ...]:
    """The entries of PyTorch's database for jagged nested tensors that have samples."""
    from torch.testing._internal.opinfo.definitions.nested import njt_op_db

    return tuple(op for op in njt_op_db if op.supports_njt)


def nested_samples(op: Any, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Any]:
    """The samples of an entry of `nested_entries`, the same at each call: contiguous, transposed and with holes."""
    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        return list(op.sample_inputs(device, dtype, requires_grad=differentiable))
    finally:
        torch.set_rng_state(state)
