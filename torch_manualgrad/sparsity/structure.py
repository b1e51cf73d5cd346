"""Rules for families of operators: the inputs that each element of a result depends on.

An operator without a rule is decomposed into others, and one without a decomposition depends on everything. Rules return None for
a call that they do not cover, which then depends on everything too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .trace import Call, Rule

__all__ = ["rule_for"]

# -- element by element -----------------------------------------------------------------------------------------------

# Elementwise operators that PyTorch does not tag as such.
_ELEMENTWISE = {
    "_to_copy", "copy", "native_dropout", "_prelu_kernel", "_prelu_kernel_backward", "complex", "polar", "fill", "positive",
    "lift_fresh_copy", "alias_copy", "detach_copy", "_conj_copy", "_neg_view_copy", "bernoulli", "_fused_dropout",
    "rrelu_with_noise", "lift", "_conj_physical", "rrelu_with_noise_functional", "contiguous", "floor_divide",
}  # fmt: skip
# Their derivative is zero wherever it exists.
_CONSTANT = {"sign", "floor", "ceil", "round", "trunc", "heaviside", "floor_divide", "bernoulli"}
# Their second derivatives are zero wherever they exist.
_LINEAR = {
    "_to_copy", "copy", "native_dropout", "complex", "fill", "positive", "lift_fresh_copy", "alias_copy", "detach_copy", "_conj_copy",
    "_neg_view_copy", "_conj_physical", "contiguous", "add", "sub", "rsub", "neg", "clone", "conj_physical", "where", "masked_fill",
    "relu", "abs", "clamp", "clamp_min", "clamp_max", "hardtanh", "leaky_relu", "maximum", "minimum", "fmax", "fmin",
    "nan_to_num", "deg2rad", "rad2deg", "_fused_dropout", "lift", "frac",
}  # fmt: skip


def _nothing(call: Call) -> list[Tensor]:
    return [torch.zeros(x.shape, dtype=torch.int64, device="cpu") for x in call.outputs]


def _elementwise(call: Call) -> list[Tensor] | None:
    name, shapes = call.name, [x.shape for _, x in call.tensors()]
    if name == "fill" or name == "copy":  # nothing of the old value remains
        given = call.followed("value", "src")
        if not given:
            return _nothing(call)
        return [given[0].broadcast_to(call.outputs[0].shape)]
    shape = torch.broadcast_shapes(*shapes)
    if any(x.shape != shape for x in call.outputs):
        return None
    if name in _CONSTANT or (name in ("div", "divide") and call.args.get("rounding_mode") is not None):
        return _nothing(call)
    operands = [(n, ids.broadcast_to(shape)) for n, x in call.tensors() if (ids := call.ids(x)) is not None]
    found = call.table.joined([ids for _, ids in operands])
    if name not in _LINEAR or (name == "abs" and call.args["self"].is_complex()):
        _interact(call, dict(operands), found)
    return [found] * len(call.outputs)


def _interact(call: Call, operands: dict[str, Tensor], found: Tensor) -> None:
    a, b = operands.get("self"), operands.get("other")
    if not operands.keys() <= {"self", "other"}:
        call.square(found)
    elif call.name == "mul":
        if a is not None and b is not None:
            call.product(a, b)
    elif call.name == "div":
        if b is not None:
            call.square(b)
            if a is not None:
                call.product(a, b)
    else:
        call.square(found)


# -- elements that move -----------------------------------------------------------------------------------------------

# The result consists of elements of the arguments and of constants.
_MOVEMENT = {
    "cat", "stack", "roll", "flip", "repeat", "gather", "index_select", "index", "take", "constant_pad_nd", "tril", "triu",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "slice_scatter", "select_scatter", "diagonal_scatter", "diag_embed", "index_fill",
    "masked_scatter", "masked_select", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "rot90", "im2col", "embedding",
    "select_backward", "slice_backward", "diagonal_backward", "_unsafe_index", "_unsafe_view", "block_diag",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "_reshape_copy", "_reshape_alias", "view_copy", "permute_copy", "expand_copy",
    "slice_copy", "select_copy", "t_copy", "transpose_copy", "unsqueeze_copy", "squeeze_copy", "diagonal_copy", "unfold_copy",
    "as_strided_copy", "split_copy", "split_with_sizes_copy", "unbind_copy", "tril_indices", "narrow_copy",
}  # fmt: skip
# Arguments that determine where elements go, and numbers that become elements.
_POSITIONS = {"index", "indices", "mask", "repeats"}
_NUMBERS = {"value": 0}


def _numbered(call: Call, function: Callable[..., Any], values: dict[str, Any]) -> list[Tensor] | None:
    """Call a function that moves elements with numbered elements, to find where each went."""
    known = [torch.zeros(1, dtype=torch.int64, device="cpu")]
    offset = 1

    def number(x: Tensor) -> Tensor:
        nonlocal offset
        ids = call.ids(x)
        if ids is None:
            return torch.zeros(x.shape, dtype=torch.int64, device="cpu")
        known.append(ids.reshape(-1))
        offset += x.numel()
        return torch.arange(offset - x.numel(), offset, device="cpu").reshape(x.shape)

    changed: dict[str, Any] = {}
    for name, value in values.items():
        listed = isinstance(value, (list, tuple))
        tensors = list(value) if listed else [value]
        if name in _POSITIONS:
            if any(call.ids(x) is not None for x in tensors):
                return None
            tensors = [x.cpu() if isinstance(x, Tensor) else x for x in tensors]
        elif any(isinstance(x, Tensor) for x in tensors):
            tensors = [number(x) if isinstance(x, Tensor) else x for x in tensors]
        elif name in _NUMBERS and isinstance(value, (int, float, complex, bool)):
            tensors = [_NUMBERS[name]]
        changed[name] = tensors if listed else tensors[0]
    try:
        moved = function(changed)
    except (RuntimeError, NotImplementedError):  # not for integers
        changed = {n: v.double() if isinstance(v, Tensor) and n not in _POSITIONS else v for n, v in changed.items()}
        moved = function(changed)
    table = torch.cat(known)
    found = [table[x.to(torch.int64)] for x in (moved if isinstance(moved, (list, tuple)) else [moved])]
    return found if len(found) == len(call.outputs) else None


def _functional(call: Call) -> Any:
    """The overload of the call that does not write to its arguments."""
    overload = call.op.name().partition(".")[2] or "default"
    return getattr(getattr(torch.ops.aten, call.name), overload)


def _by_name(op: Any, values: dict[str, Any]) -> Any:
    positional = [values[a.name] for a in op._schema.arguments if not a.kwarg_only]
    # no dtype, layout or device: the numbers have their own
    return op(*positional)


def _movement(call: Call) -> list[Tensor] | None:
    op = _functional(call)
    return _numbered(call, lambda values: _by_name(op, values), call.args)


def _index_put(call: Call) -> list[Tensor] | None:
    if any(call.ids(x) is not None for x in call.args["indices"]):
        return None
    at = tuple(slice(None) if i is None else i.cpu() for i in call.args["indices"])
    targets = _positions(call)[at]
    ids = call.ids(call.args["values"])
    return _written(
        call, targets, None if ids is None else ids.broadcast_to(targets.shape), call.args.get("accumulate", False)
    )


def _positions(call: Call) -> Tensor:
    """The number of each element of the result."""
    out = call.outputs[0]
    return torch.arange(out.numel(), device="cpu").reshape(out.shape)


def _written(call: Call, targets: Tensor, ids: Tensor | None, keeps: bool, linear: bool = True) -> list[Tensor]:
    """The dependence of ``self`` after elements were written at, or added to, these targets.

    If several are written to one target, the last one stays, but PyTorch's derivative is that of all of them.
    """
    out = call.outputs[0]
    base, targets = call.ids(call.args["self"]), targets.reshape(-1)
    flat = torch.zeros(out.numel(), dtype=torch.int64, device="cpu") if base is None else base.reshape(-1).clone()
    if not keeps:
        flat[targets] = 0
    if ids is not None:
        groups = torch.cat([torch.arange(out.numel(), device="cpu"), targets])
        flat = call.table.unions(groups, torch.cat([flat, ids.reshape(-1)]), out.numel())
    if not linear:
        call.square(flat)
    return [flat.reshape(out.shape)]


def _scatter(call: Call) -> list[Tensor] | None:
    index, dim = call.args["index"], call.args["dim"]
    source = call.args.get("src", call.args.get("value"))
    if call.ids(index) is not None or not index.dim() or not call.outputs[0].dim():
        return None
    reduce = call.args.get("reduce", "sum" if call.name == "scatter_add" else None)
    at = index.cpu()
    targets = torch.gather(_positions(call), dim, at) if at.numel() else at
    ids = call.ids(source)
    if ids is not None and ids.dim():
        ids = ids[tuple(slice(0, n) for n in at.shape)]
    elif ids is not None:
        ids = ids.expand(at.shape)
    return _written(call, targets, ids, reduce is not None, reduce in (None, "sum", "add", "amax", "amin"))


def _index_add(call: Call) -> list[Tensor] | None:
    index, dim, source = call.args["index"], call.args["dim"], call.args["source"]
    if call.ids(index) is not None or not call.outputs[0].dim() or not source.dim():
        return None
    targets = torch.index_select(_positions(call), dim, index.cpu().reshape(-1))
    linear = call.name != "index_reduce" or call.args.get("reduce") in ("amax", "amin")
    return _written(call, targets, call.ids(source), call.name != "index_copy", linear)


# -- mixed dims -------------------------------------------------------------------------------------------------------

# Operators with an argument ``dim``: elements mix along these dims, or along all if there are none.
_MIXING = {
    "sum", "nansum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "logsumexp",
    "linalg_vector_norm", "norm", "argmax", "argmin", "any", "all", "count_nonzero", "median", "nanmedian", "mode",
    "kthvalue", "topk", "sort", "argsort", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_softmax",
    "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "aminmax", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    "linalg_cross", "msort", "_safe_softmax",
}  # fmt: skip
_MIXING_LINEAR = {
    "sum", "nansum", "mean", "amax", "amin", "max", "min", "median", "nanmedian", "mode", "kthvalue", "topk", "sort", "cumsum", "cummax",
    "cummin", "aminmax", "_fft_r2c", "_fft_c2c", "_fft_c2r", "msort",
}  # fmt: skip


def _mixed(call: Call, ids: Tensor, dims: Sequence[int]) -> Tensor:
    """The union along these dims, which are then of size 1."""
    kept = [d for d in range(ids.dim()) if d not in dims]
    shape = [1 if d in dims else n for d, n in enumerate(ids.shape)]
    count = math.prod(shape)
    size = math.prod(ids.shape[d] for d in dims)
    flat = ids.permute(*kept, *dims).reshape(-1)
    groups = torch.arange(count, device="cpu").repeat_interleave(size)
    return call.table.unions(groups, flat, count).reshape(shape)


def _mixing(call: Call) -> list[Tensor] | None:
    operands = [ids for _, x in call.tensors() if (ids := call.ids(x)) is not None]
    shape = torch.broadcast_shapes(*[x.shape for _, x in call.tensors()])
    joined = call.table.joined([ids.broadcast_to(shape) for ids in operands])
    given = call.args.get("dim")
    dims = [given] if isinstance(given, int) else list(given or [])
    rank = joined.dim()
    whole = sorted({d % rank for d in dims}) if rank and dims else [*range(rank)]
    kept = _mixed(call, joined, whole) if rank else joined
    if call.name not in _MIXING_LINEAR:
        call.square(kept)
    results = []
    for x in call.outputs:
        if x.dim() == rank and all(x.shape[d] == shape[d] for d in range(rank) if d not in whole):
            results.append(kept.expand(x.shape) if x.numel() else torch.zeros(x.shape, dtype=torch.int64, device="cpu"))
        elif x.numel() == kept.numel() and [*x.shape] == [n for d, n in enumerate(shape) if d not in whole]:
            results.append(kept.reshape(x.shape))
        else:
            return None
    return results


# -- matrices ---------------------------------------------------------------------------------------------------------

# Functions of whole matrices, for each of a batch.
_MATRICES = {
    "_linalg_det", "_linalg_slogdet", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_inv_ex", "linalg_cholesky_ex", "cholesky",
    "cholesky_inverse", "cholesky_solve", "linalg_lu_factor_ex", "linalg_lu", "linalg_qr", "_linalg_svd", "linalg_matrix_exp",
    "linalg_solve_triangular", "triangular_solve", "linalg_householder_product", "linalg_ldl_factor_ex", "linalg_pinv", "geqrf",
    "_cdist_forward", "_euclidean_dist", "lu_unpack", "_linalg_solve_ex", "linalg_lu_solve", "linalg_ldl_solve",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
}  # fmt: skip


def _matrices(call: Call) -> list[Tensor] | None:
    tensors = [(x.shape, call.ids(x)) for _, x in call.tensors()]
    if call.name == "_linalg_solve_ex" and tensors[1][0] == tensors[0][0][:-1]:  # a batch of vectors
        shape, ids = tensors[1]
        tensors[1] = (torch.Size([*shape, 1]), None if ids is None else ids[..., None])
    if any(len(shape) < 2 for shape, _ in tensors):
        return None
    batch = torch.broadcast_shapes(*[shape[:-2] for shape, _ in tensors])
    if any(x.shape[: len(batch)] != batch for x in call.outputs):
        return None
    parts = []
    for shape, ids in tensors:
        if ids is not None:
            parts.append(_mixed(call, ids, (len(shape) - 2, len(shape) - 1))[..., 0, 0].broadcast_to(batch))
    joined = call.table.joined(parts)
    call.square(joined)
    return [joined.reshape([*batch, *[1] * (x.dim() - len(batch))]).expand(x.shape) for x in call.outputs]


# The factors of products, and the number of matrix dims of each.
_PRODUCTS = {
    "mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor"), "vdot": ("self", "other"),
    "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec"), "addr": ("vec1", "vec2"),
}  # fmt: skip


def _product(call: Call) -> list[Tensor] | None:
    left, right = (call.args[name] for name in _PRODUCTS[call.name])
    a, b = call.ids(left), call.ids(right)
    if not (_is_dense(left) and _is_dense(right)):
        return _sparse_product(call, left, b)
    out = call.outputs[0]
    if call.name == "addr":
        a, b = (None if a is None else a[:, None]), (None if b is None else b[None, :])
    else:
        if left.dim() == 1:
            a = None if a is None else a[None, :]
        if right.dim() == 1:
            b = None if b is None else b[:, None]
    parts = []
    shape = list(torch.empty(_product_shape(left, right, call.name), device="meta").shape)
    if a is not None:
        parts.append(_mixed(call, a, (a.dim() - 1,)).expand(shape))
    if b is not None:
        parts.append(_mixed(call, b, (b.dim() - 2,)).expand(shape))
    if a is not None and b is not None and call.trace.second:
        inner_a, inner_b = _mixed(call, a, (a.dim() - 2,)), _mixed(call, b, (b.dim() - 1,))
        call.product(inner_a.transpose(-1, -2), inner_b)
    parts = [x.reshape(out.shape) if x.numel() == out.numel() else x for x in parts]
    if call.name.startswith(("add", "badd")) and (bias := call.ids(call.args["self"])) is not None:
        parts.append(bias.broadcast_to(out.shape))
    if not parts:
        return _nothing(call)
    return [call.table.joined(parts)]


def _product_shape(left: Tensor, right: Tensor, name: str) -> list[int]:
    if name == "addr":
        return [left.shape[0], right.shape[0]]
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    return [*(left.shape[:-2] if left.dim() > 2 else []), rows, columns]


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided


def _sparse_product(call: Call, left: Tensor, b: Tensor | None) -> list[Tensor] | None:
    """The product of a constant sparse matrix, whose pattern is used, with a dense one."""
    if call.name not in ("mm", "addmm", "mv", "addmv") or b is None or left.layout is torch.strided:
        return None
    coo = left.detach().cpu().to_sparse_coo().coalesce()
    if coo.dense_dim():
        return None
    row, column = coo.indices()
    columns = 1 if b.dim() == 1 else b.shape[1]
    groups = row[:, None] * columns + torch.arange(columns, device="cpu")
    out, picked = call.outputs[0], b.reshape(b.shape[0], columns)[column]
    found = call.table.unions(groups.reshape(-1), picked.reshape(-1), left.shape[0] * columns).reshape(out.shape)
    bias = call.ids(call.args["self"]) if call.name.startswith("add") else None
    return [found if bias is None else call.table.joined([found, bias.broadcast_to(out.shape)])]


# -- windows ----------------------------------------------------------------------------------------------------------


def _per(value: Any, rank: int, default: int) -> list[int]:
    listed = [value] if isinstance(value, int) else list(value if value is not None else [])
    if not listed:
        return [default] * rank
    return listed * rank if len(listed) == 1 else listed


def _window(
    call: Call,
    ids: Tensor,
    kernel: list[int],
    stride: list[int],
    before: list[int],
    dilation: list[int],
    out: Sequence[int],
) -> Tensor:
    """The union over each window of the last dims.

    Args:
        call: of the operator.
        ids: (*, spatial dims).
        kernel: the sizes of the window.
        stride: the steps between windows.
        before: zeros before the first element; negative if elements are left out.
        dilation: the steps inside of a window.
        out: the numbers of windows.
    """
    rank = len(kernel)
    pads: list[int] = []
    for d in reversed(range(rank)):
        reach = (out[d] - 1) * stride[d] + (kernel[d] - 1) * dilation[d] + 1
        pads += [before[d], reach - before[d] - ids.shape[ids.dim() - rank + d]]
    ids = torch.nn.functional.pad(ids, pads)
    lead = ids.dim() - rank
    for d in range(rank):
        ids = ids.unfold(lead + d, (kernel[d] - 1) * dilation[d] + 1, stride[d])[..., :: dilation[d]]
    found = _mixed(call, ids, [*range(lead + rank, ids.dim())])
    return found.reshape(found.shape[: lead + rank])


def _convolution(call: Call) -> list[Tensor] | None:
    values = call.args
    x, weight, bias, out = values["input"], values["weight"], values["bias"], call.outputs[0]
    rank, groups = x.dim() - 2, values["groups"]
    stride, padding = _per(values["stride"], rank, 1), _per(values["padding"], rank, 0)
    dilation = _per(values["dilation"], rank, 1)
    a, b, c = call.ids(x), call.ids(weight), call.ids(bias)
    channels = out.shape[1] // groups
    if not out.numel():
        return _nothing(call)
    parts = []
    kernel = list(weight.shape[2:])
    if a is not None:
        n, size = x.shape[0], list(x.shape[2:])
        a = _mixed(call, a.reshape(n, groups, -1, *size), (2,)).reshape(n, groups, *size)
        before = padding
        if values["transposed"]:
            spread = torch.zeros(
                n, groups, *[(s - 1) * k + 1 for s, k in zip(size, stride)], dtype=torch.int64, device="cpu"
            )
            places: tuple[Any, ...] = (..., *[slice(None, None, k) for k in stride])
            spread[places] = a
            a, stride = spread, [1] * rank
            before = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding)]
        windows = _window(call, a, kernel, stride, before, dilation, out.shape[2:])
        parts.append(windows[:, :, None].expand(n, groups, channels, *out.shape[2:]).reshape(out.shape))
    if b is not None:
        if values["transposed"]:  # (in, out / groups, ...)
            b = b.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).reshape(out.shape[1], -1)
        w = _mixed(call, b.reshape(out.shape[1], -1), (1,)).reshape(1, -1, *[1] * rank)
        if a is not None:
            call.product(parts[0], w)
        parts.append(w.expand(out.shape))
    if c is not None:
        parts.append(c.reshape(1, -1, *[1] * rank).expand(out.shape))
    return [call.table.joined(parts)]


def _pooling(call: Call) -> list[Tensor] | None:
    values, x, out = call.args, call.args["self"], call.outputs[0]
    rank = int(call.name.partition("pool")[2][0])
    kernel = _per(values["kernel_size"], rank, 1)
    stride = _per(values.get("stride"), rank, 0)
    stride = kernel if not any(stride) else stride
    ids = call.ids(x)
    if ids is None or not out.numel():
        return None
    before, dilation = _per(values.get("padding"), rank, 0), _per(values.get("dilation"), rank, 1)
    return [_window(call, ids, kernel, stride, before, dilation, out.shape[out.dim() - rank :])] * len(call.outputs)


# -- the table --------------------------------------------------------------------------------------------------------

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_MATRICES, _matrices),
    **dict.fromkeys(_MOVEMENT, _movement),
    **dict.fromkeys(_MIXING, _mixing),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "zero": _nothing,
    **dict.fromkeys(["index_put", "_index_put_impl", "_unsafe_index_put"], _index_put),
    **dict.fromkeys(["scatter", "scatter_add", "scatter_reduce"], _scatter),
    **dict.fromkeys(["index_add", "index_reduce", "index_copy"], _index_add),
    **dict.fromkeys(["convolution", "_convolution"], _convolution),
    **dict.fromkeys(
        ["avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"], _pooling
    ),
}  # fmt: skip


def rule_for(name: str, op: Any) -> Rule | None:
    """The rule of an operator of PyTorch, or None.

    Args:
        name: without namespace and overload, and without the underscore of an in-place operator.
        op: the overload.
    """
    found = _RULES.get(name)
    if name in ("max", "min") and op.name().endswith(".other"):
        return _elementwise
    if found is None and (
        name == "convert_element_type" or torch.Tag.pointwise in op.tags or _is_pointwise_prim(name, op)
    ):
        return _elementwise
    if found is None and torch.Tag.reduction in op.tags:
        return _mixing
    return found


def _is_pointwise_prim(name: str, op: Any) -> bool:
    """Whether an operator of ``prims`` has the name of an elementwise ATen operator."""
    packet = getattr(torch.ops.aten, name, None) if op.namespace == "prims" else None
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
