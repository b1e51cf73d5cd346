"""Strategies of operators: ours that are opaque, and those of PyTorch that have a rule and would gather.

Transparent formulas have no strategy: their bodies run on distributed tensors, operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from .placements import PARTIAL, REPLICATED, Batched, Body, Lines, Placed, Placement, Strategy, aligned

__all__ = ["sizes", "strategies"]

_LINALG = {
    "solve_again": "nn, nn, n, nk -> nk",
    "linalg_solve_triangular_backward.kernel": "nk, nn, nk -> nn, nk",
    "cholesky_backward.kernel": "nn, nn -> nn",
    "cholesky_backward.python": "nn, nn -> nn",
    "cholesky_jvp.kernel": "nn, nn -> nn",
    "adjugate_again": "nn, , nn, n -> nn",
    "linalg_det_backward.kernel": ", , nn, n -> nn",
    "linalg_det_backward.python": ", , nn, nn, n -> nn",
    "slogdet_backward.kernel": ", nn, n -> nn",
    "slogdet_backward.python": ", , nn, , nn, n -> nn",
    "linalg_eigh_backward.python": "n, nn, n, nn -> nn",
    "linalg_eigh_jvp.python": "nn, n, nn -> n, nn",
    "linalg_eig_backward.python": "n, nn, n, nn -> nn",
    "linalg_eig_jvp.python": "nn, n, nn -> n, nn",
    "linalg_lu_backward.kernel": "mk, kn, mm, mk, kn -> mn",
    "linalg_lu_backward.python": "mk, kn, mm, mk, kn -> mn",
    "linalg_lu_jvp.kernel": "mn, mm, mk, kn -> mk, kn",
    "lu_factor_ex_backward.kernel": "mn, mn, k -> mn",
    "lu_factor_ex_jvp.kernel": "mn, mn, k -> mn",
    "linalg_qr_backward.python": "mk, kn, mn, mk, kn -> mn",
    "linalg_qr_jvp.python": "mn, mn, mk, kn -> mk, kn",
    "linalg_inv_backward.kernel": "nn, nn -> nn",
    "linalg_inv_jvp.kernel": "nn, nn -> nn",
    "linalg_matrix_exp_differential": "nn, nn -> nn",
    "svd_backward.python": "mk, k, kn, mk, k, kn -> mn",
    "linalg_svd_jvp.python": "mn, mk, k, kn -> mk, k, kn",
    "schur_backward.python": "nn, nn, nn, nn -> nn",
    # mg.linalg and replacement primals
    "svd": "mn -> mk, k, kn",
    "eigh": "nn -> n, nn",
    "schur": "nn -> nn, nn",
    "eigh_jacobi": "nn -> n, nn",
    "eigh_tridiagonal": "nn -> n, nn",
    "eigh_small": "nn -> n, nn",
    "lu_small": "mn -> mm, mk, kn",
    "lu_finite": "mn -> mm, mk, kn",
    "gaussian_elimination": "nn, nk -> nk, nn, n, ",
    "solve_eliminated": "nn, n, nk -> nk",
    "solve_small": "nn, nk -> nk, nn, n, ",
    "cholesky_factor": "nn -> nn, ",
    "cholesky_small": "nn -> nn, ",
    "svd_jacobi": "mn -> mk, k, kn",
    "svd_small": "mn -> mk, k, kn",
    "hermitian_function": "nn, n, nn, Kn, nn, knn -> nn",
    "principal_schur": "nn -> nn, nn",
    "general_function": "nn, nn, nn, knn -> nn",
    "exponential_function": "nn, knn -> nn",
    "exponential_action": "nn, nk -> nk",
    "exponential_action_backward": "nn, nk, nk -> nn",
    "schur_form": "nn -> nn, nn",
    "sylvester_solution": "mm, nn, mn, mm, mm, nn, nn -> mn",
    "stein_solution": "mm, nn, mn, mm, mm, nn, nn -> mn",
    "skew_lyapunov": "nn, n, nn, nn -> nn",
    "hermitian_inverse": "nn, n, nn -> nn",
    "hermitian_lyapunov": "nn, n, nn, nn -> nn",
    "hermitian_root": "nn, n, nn -> nn",
    "polar_factor": "mn, mn, n, nn -> mn",
    "singular_value_sum": "mn, mn, n, nn -> 11",
    "first_projector": "nn, n, nn, n -> nn, nn",
    "largest_singular_value": "mn, n, nn, n -> 11",
}

_BATCHED = {
    # elementwise
    "dirichlet_grad.python": ", , -> ",
    "igamma_self_derivative.python": ", -> ",
    "standard_gamma_grad.kernel": ", -> ",
    "constant": " -> ",
    "silu_nested": " -> ",
    "silu_backward_nested": ", -> ",
    # images
    "grid_sampler_2d_backward": "cpq, chw, pq2 -> chw, pq2",
    "grid_sampler_3d_backward": "copq, cdhw, opq3 -> cdhw, opq3",
}

# of operators of PyTorch's that its releases gather for, or have no strategy for
_ATEN = {
    "linalg_eig": "nn -> n, nn",
    "linalg_lu_factor_ex": "mn -> mn, k, ",
    "linalg_lu_solve": "nn, n, nk -> nk",
    "linalg_cholesky_ex": "nn -> nn, ",
    "linalg_inv_ex": "nn -> nn, ",
    "_linalg_det": "nn -> , nn, n",
    "_linalg_slogdet": "nn -> , , nn, n",
    "linalg_solve_triangular": "nn, nk -> nk",
    "linalg_matrix_exp": "nn -> nn",
    "cholesky_inverse": "nn -> nn",
    "cholesky_solve": "nk, nn -> nk",
    "linalg_householder_product": "mk, k -> mk",
    "geqrf": "mn -> mn, k",
    "ormqr": "mk, k, mn -> mn",
    "triu": "mn -> mn",
    "tril": "mn -> mn",
    "avg_pool2d_backward": "pq, hw -> hw",
    "avg_pool3d_backward": "opq, dhw -> dhw",
    "adaptive_max_pool2d_backward": "pq, hw, pq -> hw",
    "adaptive_max_pool3d_backward": "opq, dhw, opq -> dhw",
    "hardtanh_backward": ", -> ",
}


# elementwise and then reduced; PyTorch's decompositions of their backwards make a mean over a rank's part of the one over all
_LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)

_mask, _nested_mask = itemgetter("output_mask"), itemgetter("grad_input_mask")


def _rows(outputs: str, wanted: Callable[..., Sequence[bool]] | None = None) -> Strategy:
    """A normalization of each row; ``outputs`` are a row "n" each, or the gradient "w" of weights that all rows share."""

    def strategy(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
        row = "n" * len(constants["normalized_shape"])
        dims = ", ".join([row] * len(tensors)) + " -> " + ", ".join([row] * len(outputs))
        summed = [i for i, what in enumerate(outputs) if what == "w"]
        return Batched(dims, ("weight", "bias"), summed, wanted=wanted)(tensors, constants)

    return strategy


def _solve(vectors: str, matrices: str, left: str, right: str) -> Strategy:
    """Of linear systems, whose right-hand sides are matrices, or vectors: one dim less than ``left``."""

    def strategy(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
        dims = vectors if tensors[right].ndim == tensors[left].ndim - 1 else matrices
        return Batched(dims)(tensors, constants)

    return strategy


def _attention(dims: str, wanted: Callable[..., Sequence[bool]] | None = None) -> Strategy:
    masks = [f"attn_mask{tangent}" for tangent in ("", "_t", "_u", "_tu")]
    return Batched(dims, broadcast=masks, wanted=wanted)


def _as_they_are(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    """For operators on two tensors of one shape that read no values."""
    one, other = tensors.values()
    for p, q in dict.fromkeys(zip(one.placements, other.placements)):
        if p == q or not (p.is_shard() or q.is_shard()):
            yield [p], [p, q]


def _loss(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    """Of each entry, or reduced."""
    x = tensors["self"]
    for dim in range(x.ndim):
        placed, result = _elementwise(tensors, dim, x.shape), _reduced(x, dim, constants["reduction"])
        if placed is not None and result is not None:
            yield [result], placed


def _reduced(x: Any, dim: int, reduction: int) -> Placement | None:
    """Of losses, or their sum or mean: the mean of ranks' means, where their parts of x are of one size."""
    from torch.distributed.tensor import Partial

    if reduction == 1:
        return Partial("avg") if x.shape[dim] % x.mesh.size() == 0 else None
    return PARTIAL if reduction == 2 else dim


def _loss_backward(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    """A rank would divide by the number of its own losses where their mean is taken."""
    shape = tensors["self"].shape
    for dim in range(len(shape) if constants["reduction"] != 1 else 0):
        placed = _elementwise(tensors, dim, shape)
        if placed is not None:
            yield [dim], placed


def _elementwise(tensors: Mapping[str, Any], dim: int, shape: Sequence[int]) -> list[Placement] | None:
    """The placements of tensors next to a sharded one; None if a rank needs more than its part of one."""
    if tensors["target"].shape != shape:
        return None
    return [aligned(x, 0, dim, shape) for x in tensors.values() if x is not None]


def _margin_loss(outputs: int) -> Strategy:
    """One loss of each row; a second output is whether each class is a label."""

    def strategy(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
        x = tensors["self"]
        if x.ndim == 2 and (result := _reduced(x, 0, constants["reduction"])) is not None:
            yield [result, 0][:outputs], _of_rows(tensors)

    return strategy


def _margin_loss_backward(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    if tensors["self"].ndim == 2 and constants["reduction"] != 1:
        yield [0], _of_rows(tensors)


def _of_rows(tensors: Mapping[str, Any]) -> list[Placement]:
    """All sharded along the rows, except weights of classes and the cotangent of a sum."""
    given = [(name, x) for name, x in tensors.items() if x is not None]
    return [REPLICATED if name == "weight" or x.ndim == 0 else 0 for name, x in given]


def _segments(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    """Along any dim but that of the segments, whose lengths and offsets have the dims before it."""
    ndim = tensors["data"].ndim
    axis = constants["axis"] % ndim
    given = [name for name, x in tensors.items() if x is not None]
    for dim in range(ndim):
        if dim != axis:
            yield [dim], [REPLICATED if name in ("lengths", "offsets") and dim > axis else dim for name in given]


def _distances(dims: str) -> Strategy:
    """Also by the points' coordinates "m", where distances are sums over them; of other orders, gradients need all of one."""

    def strategy(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
        yield from Batched(dims)(tensors, constants)
        inputs, outputs = (side.split(",") for side in dims.split("->"))
        given = [(x, "m" in core) for x, core in zip(tensors.values(), inputs) if x is not None]
        ranks = {x.ndim for x, is_point in given if is_point}
        if constants["p"] in (0, 1) and len(ranks) == 1:
            last = ranks.pop() - 1
            yield [last if "m" in core else PARTIAL for core in outputs], [last if m else REPLICATED for _, m in given]

    return strategy


def _diagonal(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    ndim = tensors["self"].ndim
    taken = {constants["dim1"] % ndim, constants["dim2"] % ndim}
    for at, dim in enumerate(d for d in range(ndim) if d not in taken):
        yield [at], [dim]


def _diag_embed(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    ndim = tensors["self"].ndim + 1
    taken = {constants["dim1"] % ndim, constants["dim2"] % ndim}
    for at, dim in enumerate(d for d in range(ndim) if d not in taken):
        yield [dim], [at]


def _diagonal_backward(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    return _diag_embed({"self": tensors["grad_output"]}, constants)


def _weight_norm(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    dim = constants["dim"] % tensors["saved_v"].ndim
    yield [dim] * 2, [dim] * len(tensors)


def _ctc(tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
    if tensors["targets"].ndim == 2:  # else the labels are concatenated
        yield [1], [1 if name == "log_probs" else 0 for name in tensors]


_LU = Batched("mn -> mm, mk, kn", wanted=lambda c: (c["pivot"], True, True))

strategies: dict[str, Strategy | Body] = {
    **{f"manualgrad::{name}": Batched(dims) for name, dims in {**_LINALG, **_BATCHED}.items()},
    **{f"aten::{name}": Batched(dims) for name, dims in _ATEN.items()},
    "manualgrad::nan_unless_zero": Batched(", -> ", broadcast=("undefined",)),
    "aten::log_sigmoid_backward": Batched(", , -> ", broadcast=("buffer",)),  # which is empty on a GPU
    # autograd calls these to attach a tangent
    "aten::_has_same_storage_numel": _as_they_are,
    "aten::_new_zeros_with_same_feature_meta": _as_they_are,
    "aten::diagonal": _diagonal,
    "aten::diag_embed": _diag_embed,
    "aten::diagonal_backward": _diagonal_backward,
    **{f"aten::{name}": _loss for name in _LOSSES},
    **{f"aten::{name}_backward": _loss_backward for name in _LOSSES if name != "binary_cross_entropy_with_logits"},
    "aten::multi_margin_loss": _margin_loss(1),
    "aten::multilabel_margin_loss_forward": _margin_loss(2),
    **dict.fromkeys(
        [
            "aten::multi_margin_loss_backward",
            "aten::multilabel_margin_loss_backward",
            "manualgrad::multi_margin_loss_gradient",
            "manualgrad::multilabel_margin_loss_gradient",
        ],
        _margin_loss_backward,
    ),
    "aten::segment_reduce": _segments,
    "manualgrad::segment_reduce_backward": _segments,
    "aten::_cdist_forward": _distances("pm, rm -> pr"),
    "manualgrad::cdist_backward": _distances("pr, pm, rm, pr -> pm"),
    "manualgrad::cdist_jvp": _distances("pm, pm, rm, rm -> pr"),
    "aten::_pdist_forward": _distances("nm -> k"),
    "manualgrad::pdist_backward": _distances("k, nm, k -> nm"),
    "manualgrad::lu": _LU,
    "aten::linalg_lu": _LU,
    "aten::linalg_qr": Batched("mn -> mk, kn", wanted=lambda c: (c["mode"] != "r", True)),
    "aten::_linalg_svd": Batched("mn -> mk, k, kn", wanted=lambda c: (c["compute_uv"], True, c["compute_uv"])),
    "aten::_linalg_eigh": Batched("nn -> n, nn", wanted=lambda c: (True, c["compute_v"])),
    "manualgrad::norm_backward": Lines("self", "dim", within=True),
    "manualgrad::prod_backward.python": Lines("input", "dim"),
    "manualgrad::cumprod_backward.python": Lines("input", "dim"),
    **dict.fromkeys(
        [
            "manualgrad::segment_sum",
            "manualgrad::segment_softmax",
            "manualgrad::segment_log_softmax",
            "manualgrad::segment_amax",
        ],
        Lines("values", "dim", shared=("offsets",)),
    ),
    **dict.fromkeys(
        [
            "manualgrad::_nested_sum_backward",
            "manualgrad::nested_softmax_backward",
            "manualgrad::nested_log_softmax_backward",
        ],
        Lines("grad", "dim", shared=("offsets",)),
    ),
    "manualgrad::nested_rows": Batched("tk, bkm, o -> tm", shared=("offsets",)),
    "manualgrad::nested_inner": Batched("tk, tm, o -> bkm", shared=("offsets",)),
    "manualgrad::nested_attention": Batched("td, sd, sm, o, o -> tm, t", shared=("q_offsets", "k_offsets")),
    "manualgrad::nested_attention_backward": Batched(
        "tm, td, sd, sm, tm, t, o, o -> td, sd, sm", shared=("q_offsets", "k_offsets")
    ),
    # PyTorch runs its decomposition for each placement, which takes 15 s in each process
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention("ld, sd, sd, ls -> ld, l"),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention("ld, ld, sd, sd, ld, l, ls -> ld, sd, sd"),
    "manualgrad::attention_backward": _attention("ld, ld, sd, sd, ld, l, ls -> ld, sd, sd"),
    "manualgrad::attention_jvp": _attention("ld, ld, sd, sd, sd, sd, ls, ls -> ld"),
    "manualgrad::attention_backward_jvp_of_block": _attention(
        "ld, ld, ld, ld, sd, sd, sd, sd, ls, ls -> ld, sd, sd, ls", lambda c: (True, True, True, c["of_mask"])
    ),
    "manualgrad::attention_jvp_jvp_of_block": _attention(
        "ld, ld, ld, ld, sd, sd, sd, sd, sd, sd, sd, sd, ls, ls, ls, ls -> ld"
    ),
    "manualgrad::native_layer_norm_backward": _rows("nww", _mask),
    "manualgrad::layer_norm_nested": _rows("nnn"),
    "manualgrad::layer_norm_backward_nested": _rows("nww", _nested_mask),
    "manualgrad::rms_norm_nested": _rows("nn"),
    "manualgrad::rms_norm_backward_nested": _rows("nw", _nested_mask),
    "manualgrad::linalg_solve_backward.kernel": _solve(
        "n, n, nn, nn, n -> nn, n", "nk, nk, nn, nn, n -> nn, nk", "A", "result"
    ),
    "manualgrad::linalg_solve_jvp.kernel": Batched("nn, nk, nk, nn, nn, n -> nk"),
    "aten::_linalg_solve_ex": _solve("nn, n -> n, nn, n, ", "nn, nk -> nk, nn, n, ", "A", "B"),
    "manualgrad::weight_norm_backward": _weight_norm,
    "manualgrad::ctc_loss_gradient": _ctc,
    "manualgrad::native_batch_norm_backward": Body(),
}

# where an operator is given the sizes of its result
sizes = {"aten::diagonal_backward": "input_sizes"}
