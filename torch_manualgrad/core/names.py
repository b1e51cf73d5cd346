"""What a name means: the rules of an operator, or of every operator that a function of PyTorch's reaches.

``torch.linalg.svd`` is composite: autograd sees ``aten::_linalg_svd``, which has the rule. The table says so for each
public function; ``tests/core/test_names.py`` runs all of them and compares. It leaves out what is elementwise or linear:
such operators are in everything, and are called by their own names.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import resolve_name

from .catalogue import KINDS, catalogue
from .replacements import Replacements, replacements
from .rule import Rule, reached, rules

__all__ = ["REACHES", "Chosen", "choose", "missing", "rules_named"]


class Chosen(NamedTuple):
    """What names mean, each rule and each replacement once."""

    rules: tuple[Rule, ...]
    replacements: tuple[Replacements, ...]


# A public function below torch, and the operators with a rule that it reaches.
REACHES: dict[str, tuple[str, ...]] = {
    "_native_batch_norm_legit": ("_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"),
    "_segment_reduce": ("segment_reduce",),
    "_softmax_backward_data": ("_softmax_backward_data",),
    "_weight_norm": ("_weight_norm_interface",),
    "addbmm": ("addbmm",),
    "addmm": ("addmm",),
    "addmv": ("addmv",),
    "addr": ("addr",),
    "amax": ("amax",),
    "amin": ("amin",),
    "aminmax": ("aminmax",),
    "baddbmm": ("baddbmm",),
    "bilinear": ("_trilinear",),
    "bmm": ("bmm",),
    "cdist": ("_cdist_forward", "_euclidean_dist"),
    "chain_matmul": ("mm",),
    "cholesky": ("cholesky",),
    "cholesky_inverse": ("cholesky_inverse",),
    "cholesky_solve": ("cholesky_solve",),
    "conv_tbc": ("conv_tbc",),
    "corrcoef": ("mm",),
    "cosine_similarity": ("linalg_vector_norm",),
    "cov": ("min", "mm"),
    "cross": ("linalg_cross",),
    "cummax": ("cummax",),
    "cummin": ("cummin",),
    "cumprod": ("cumprod",),
    "det": ("_linalg_det",),
    "dist": ("dist",),
    "dot": ("dot",),
    "frobenius_norm": ("norm.ScalarOpt_dim",),
    "grid_sampler": ("grid_sampler_2d", "grid_sampler_3d"),
    "grid_sampler_2d": ("grid_sampler_2d",),
    "grid_sampler_3d": ("grid_sampler_3d",),
    "index_reduce": ("index_reduce",),
    "inner": ("dot",),
    "inverse": ("linalg_inv_ex",),
    "kthvalue": ("kthvalue",),
    "log_softmax": ("_log_softmax",),
    "logcumsumexp": ("logcumsumexp",),
    "logdet": ("_linalg_slogdet",),
    "logsumexp": ("logsumexp",),
    "lu": ("linalg_lu_factor_ex",),
    "lu_solve": ("linalg_lu_solve",),
    "lu_unpack": ("lu_unpack",),
    "matmul": ("bmm", "dot", "mm", "mv"),
    "matrix_exp": ("linalg_matrix_exp",),
    "matrix_power": ("bmm", "linalg_inv_ex", "mm"),
    "max": ("max", "max.dim"),
    "median": ("median", "median.dim"),
    "min": ("min", "min.dim"),
    "mm": ("mm",),
    "mode": ("mode",),
    "msort": ("sort",),
    "mv": ("mv",),
    "nanmean": ("nansum",),
    "nanmedian": ("nanmedian", "nanmedian.dim"),
    "nanquantile": ("sort",),
    "nansum": ("nansum",),
    "native_batch_norm": ("native_batch_norm",),
    "native_dropout": ("native_dropout",),
    "native_group_norm": ("native_group_norm",),
    "native_layer_norm": ("native_layer_norm",),
    "norm": ("_linalg_svd", "linalg_vector_norm"),
    "norm_except_dim": ("norm.ScalarOpt_dim",),
    "nuclear_norm": ("_linalg_svd",),
    "orgqr": ("linalg_householder_product",),
    "ormqr": ("ormqr",),
    "pairwise_distance": ("norm.ScalarOpt_dim",),
    "pca_lowrank": ("_linalg_svd", "linalg_qr", "mm"),
    "pdist": ("_pdist_forward",),
    "pinverse": ("linalg_pinv.atol_rtol_tensor",),
    "prod": ("prod", "prod.dim_int"),
    "qr": ("linalg_qr",),
    "quantile": ("sort",),
    "renorm": ("renorm",),
    "scatter_reduce": ("scatter_reduce.two",),
    "slogdet": ("_linalg_slogdet",),
    "softmax": ("_softmax",),
    "sort": ("sort", "sort.stable"),
    "std": ("std.correction",),
    "std_mean": ("std_mean.correction",),
    "svd": ("_linalg_svd",),
    "svd_lowrank": ("_linalg_svd", "linalg_qr", "mm"),
    "tensordot": ("dot", "mm"),
    "topk": ("topk",),
    "triangular_solve": ("triangular_solve",),
    "var": ("var.correction",),
    "var_mean": ("var_mean.correction",),
    "vdot": ("vdot",),
    "linalg.cholesky": ("linalg_cholesky_ex",),
    "linalg.cholesky_ex": ("linalg_cholesky_ex",),
    "linalg.cond": ("_linalg_svd", "amax", "linalg_inv_ex", "linalg_vector_norm"),
    "linalg.cross": ("linalg_cross",),
    "linalg.det": ("_linalg_det",),
    "linalg.eig": ("linalg_eig",),
    "linalg.eigh": ("_linalg_eigh",),
    "linalg.eigvals": ("linalg_eig",),
    "linalg.eigvalsh": ("_linalg_eigh",),
    "linalg.householder_product": ("linalg_householder_product",),
    "linalg.inv": ("linalg_inv_ex",),
    "linalg.inv_ex": ("linalg_inv_ex",),
    "linalg.lstsq": ("linalg_lstsq",),
    "linalg.lu": ("linalg_lu",),
    "linalg.lu_factor": ("linalg_lu_factor_ex",),
    "linalg.lu_factor_ex": ("linalg_lu_factor_ex",),
    "linalg.lu_solve": ("linalg_lu_solve",),
    "linalg.matmul": ("bmm", "dot", "mm", "mv"),
    "linalg.matrix_exp": ("linalg_matrix_exp",),
    "linalg.matrix_norm": ("_linalg_svd", "amax", "amin", "linalg_vector_norm"),
    "linalg.matrix_power": ("bmm", "linalg_inv_ex", "mm"),
    "linalg.multi_dot": ("mm",),
    "linalg.norm": ("_linalg_svd", "amax", "amin", "linalg_vector_norm"),
    "linalg.pinv": ("linalg_pinv.atol_rtol_tensor",),
    "linalg.qr": ("linalg_qr",),
    "linalg.slogdet": ("_linalg_slogdet",),
    "linalg.solve": ("_linalg_solve_ex",),
    "linalg.solve_ex": ("_linalg_solve_ex",),
    "linalg.solve_triangular": ("linalg_solve_triangular",),
    "linalg.svd": ("_linalg_svd",),
    "linalg.svdvals": ("_linalg_svd",),
    "linalg.tensorinv": ("linalg_inv_ex",),
    "linalg.tensorsolve": ("_linalg_solve_ex",),
    "linalg.vander": ("cumprod",),
    "linalg.vecdot": ("vdot",),
    "linalg.vector_norm": ("linalg_vector_norm",),
    "masked.amax": ("amax",),
    "masked.amin": ("amin",),
    "masked.cumprod": ("cumprod",),
    "masked.log_softmax": ("_log_softmax",),
    "masked.logsumexp": ("logsumexp",),
    "masked.median": ("nanmedian.dim",),
    "masked.norm": ("linalg_vector_norm",),
    "masked.normalize": ("linalg_vector_norm",),
    "masked.prod": ("prod.dim_int",),
    "masked.softmax": ("_softmax",),
    "masked.softmin": ("_softmax",),
    "nn.functional.adaptive_max_pool1d": ("adaptive_max_pool2d",),
    "nn.functional.adaptive_max_pool2d": ("adaptive_max_pool2d",),
    "nn.functional.adaptive_max_pool3d": ("adaptive_max_pool3d",),
    "nn.functional.batch_norm": ("native_batch_norm",),
    "nn.functional.bilinear": ("_trilinear",),
    "nn.functional.binary_cross_entropy": ("binary_cross_entropy",),
    "nn.functional.binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits",),
    "nn.functional.conv1d": ("convolution",),
    "nn.functional.conv2d": ("convolution",),
    "nn.functional.conv3d": ("convolution",),
    "nn.functional.conv_transpose1d": ("convolution",),
    "nn.functional.conv_transpose2d": ("convolution",),
    "nn.functional.conv_transpose3d": ("convolution",),
    "nn.functional.cosine_similarity": ("linalg_vector_norm",),
    "nn.functional.cross_entropy": ("_log_softmax",),
    "nn.functional.ctc_loss": ("_ctc_loss", "_ctc_loss.Tensor"),
    "nn.functional.embedding_bag": ("_embedding_bag",),
    "nn.functional.fractional_max_pool2d": ("fractional_max_pool2d",),
    "nn.functional.fractional_max_pool3d": ("fractional_max_pool3d",),
    "nn.functional.glu": ("glu",),
    "nn.functional.grid_sample": ("grid_sampler_2d", "grid_sampler_3d"),
    "nn.functional.group_norm": ("native_group_norm",),
    "nn.functional.huber_loss": ("huber_loss",),
    "nn.functional.instance_norm": ("native_batch_norm",),
    "nn.functional.layer_norm": ("native_layer_norm",),
    "nn.functional.linear": ("addmm", "mm", "mv") if reached("2.15") else ("addmm", "mm"),
    "nn.functional.linear_cross_entropy": (
        "_log_softmax",
        "addmm",
        "mm",
        "torch_nn::_linear_cross_entropy_batch_chunked",
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    ),
    "nn.functional.max_pool1d": ("max_pool2d_with_indices",),
    "nn.functional.max_pool2d": ("max_pool2d_with_indices",),
    "nn.functional.max_pool3d": ("max_pool3d_with_indices",),
    "nn.functional.mse_loss": ("mse_loss",),
    "nn.functional.multi_head_attention_forward": ("_softmax", "addmm", "bmm"),
    "nn.functional.multi_margin_loss": ("multi_margin_loss",),
    "nn.functional.multilabel_margin_loss": ("multilabel_margin_loss_forward",),
    "nn.functional.normalize": ("linalg_vector_norm",),
    "nn.functional.pairwise_distance": ("norm.ScalarOpt_dim",),
    "nn.functional.pdist": ("_pdist_forward",),
    "nn.functional.scaled_dot_product_attention": (
        "_safe_softmax",
        "_scaled_dot_product_flash_attention_for_cpu",
        "bmm",
    ),
    "nn.functional.smooth_l1_loss": ("smooth_l1_loss",),
    "nn.functional.soft_margin_loss": ("soft_margin_loss",),
    "nn.functional.softmin": ("_softmax",),
    "nn.functional.triplet_margin_loss": ("norm.ScalarOpt_dim",),
    "nn.functional.triplet_margin_with_distance_loss": ("norm.ScalarOpt_dim",),
    "sparse.mm": ("_sparse_mm_reduce_impl",),
    "sparse.sampled_addmm": ("sparse_sampled_addmm",),
}

# Where a function of that name may also be found.
_PREFIXES = ("torch.nn.functional.", "torch.Tensor.", "torch.functional.", "torch.")


def choose(names: Sequence[Any], strong_zero: bool = False) -> Chosen:
    """What is meant by names.

    Args:
        names: as for `install`. None given: every rule that improves on stock, and all replacements; "*": all.
        strong_zero: as for `install`: without names, the rules in which zero may be strong are meant, too.

    Raises:
        KeyError: nothing has that name; the message names the nearest.
        TypeError: something else than a name, a function, an operator of torch.ops, a rule or a replacement.
    """
    find = _remembered if all(isinstance(name, Hashable) for name in names) else _choose
    return find(tuple(names), strong_zero, rules.version, replacements.version)


def _choose(names: tuple[Any, ...], strong_zero: bool, _rules: int, _replacements: int) -> Chosen:
    if not names:
        chosen = tuple(r for r in rules.values() if r.improves or strong_zero and r.has_strong_zero)
        return Chosen(chosen, tuple(replacements.values()))
    found = {one.name: one for name in names for one in _find(name)}
    return Chosen(
        tuple(one for one in found.values() if isinstance(one, Rule)),
        tuple(one for one in found.values() if isinstance(one, Replacements)),
    )


# To enter an override again costs a look-up.
_remembered = functools.lru_cache(maxsize=128)(_choose)


def _find(name: Any) -> Sequence[Rule | Replacements]:
    if isinstance(name, (Rule, Replacements)):
        return [name]
    if not isinstance(name, str):
        name = _name_of(name)
    if name == "*":
        return [*rules.values(), *replacements.values()]
    if name in replacements:
        return [replacements[name]]
    if found := rules_named(name):
        return found
    raise KeyError(missing(name))


def rules_named(name: str) -> list[Rule]:
    """The rules of the operator of that name, of all its overloads where none is given, and of what a function reaches.

    Args:
        name: ``"aten::dist"`` is the operator alone; ``"norm"`` the operators of that name and all that ``torch.norm``
            reaches.

    Returns:
        The rules; none if there are none.
    """
    found = _of_operator(_full(name))
    if "::" not in name or not found:
        reached = [rules[n] for n in _reached(name) if n in rules] or _of_operator(f"aten::{_bare(name)}")
        found += [rule for rule in reached if rule not in found]
    return found


def _of_operator(full: str) -> list[Rule]:
    """The rule of that operator; without an overload in its name, those of all its overloads if it has none itself."""
    return [rules[full]] if full in rules else [r for n, r in rules.items() if n.startswith(f"{full}.")]


def missing(name: str) -> str:
    """The message for a name that has no rule here."""
    for absent in (_full(name), *_reached(name)):
        if absent in rules.absent:
            return rules.absent[absent]
    bare = _bare(name)
    for known in (_full(name), f"aten::{bare}"):
        if known in catalogue:
            entry = catalogue[known]
            return f"no rule acts on {name} ({entry.kind}): {entry.reason or KINDS[entry.kind]}"
    if "::" not in name and _is_public(name):
        return f"no rule acts on {name}"
    near = difflib.get_close_matches(_full(name), rules, n=3, cutoff=0.5)
    near += difflib.get_close_matches(bare, [*_by_name(), *replacements], n=2)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"there is no rule {name if name.startswith('torch.') else _full(name)!r}{hint}"


def _is_public(name: str) -> bool:
    found: Any = torch
    for part in name.removeprefix("torch.").split("."):
        found = getattr(found, part, None)
    return callable(found)


def _full(name: str) -> str:
    return (name if "::" in name else f"aten::{name}").removesuffix(".default")


def _bare(name: str) -> str:
    """``torch.linalg.svd``, ``linalg.svd`` and ``aten::linalg_svd`` as ``linalg_svd``."""
    name = name.removeprefix("aten::").removesuffix(".default")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace(".", "_")


def _reached(name: str) -> list[str]:
    return [n if "::" in n else f"aten::{n}" for n in _by_name().get(_bare(name), ())]


@functools.cache
def _by_name() -> dict[str, tuple[str, ...]]:
    return {_bare(f"torch.{public}"): operators for public, operators in REACHES.items()}


def _name_of(given: Any) -> str:
    name = getattr(given, "_name", None) or getattr(given, "_qualified_op_name", None)  # of torch.ops
    if not isinstance(name, str) and callable(given) and getattr(given, "__hash__", None):
        name = resolve_name(given)
    if isinstance(name, str):
        return name
    raise TypeError(f"override takes names, functions of torch, operators of torch.ops and rules, got {given!r}")


def _rules_of(given: Any) -> list[Rule]:
    found = list(choose((given,)).rules)
    if not found:  # a name of replacements alone
        raise KeyError(missing(str(given)))
    return found


rules.find_by(_rules_of)
