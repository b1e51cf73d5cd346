"""The lines of random programs: a call of every rule, views, in-place writes, joins, and public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.internals import pytree
from torch_manualgrad.testing.inputs import tree

#: rule -> why no program can call it
NOT_CALLED = {
    "aten::_sample_dirichlet": "its derivative is that of the distribution, not of the numbers drawn",
    "aten::_standard_gamma": "its derivative is that of the distribution, not of the numbers drawn",
    **dict.fromkeys(
        (
            "aten::fake_quantize_per_tensor_affine_cachemask",
            "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
            "aten::fake_quantize_per_channel_affine_cachemask",
            "aten::_fake_quantize_learnable_per_tensor_affine",
            "aten::_fake_quantize_learnable_per_channel_affine",
        ),
        "a straight-through estimate, which is no derivative",
    ),
}

#: Rules whose arguments are near to those of a sample, as their kernels take others without an error.
NEAR_SAMPLES = {
    "aten::binary_cross_entropy_backward": "probabilities, from 0 to 1",
}


@dataclass(frozen=True)
class Call:
    """A sample of a rule: leaves of its arguments, and which of them are differentiated."""

    name: str
    function: str
    leaves: list[Any]
    spec: Any
    moving: list[int]
    #: the expression of each leaf
    origins: list[str]
    in_place: str | None


@cache
def calls(name: str) -> list[Call]:
    """Every sample of a rule, real and complex."""
    rule = mg.rules[name]
    if rule.samples is None:
        return []
    found = []
    for dtype in (torch.float64, torch.complex128):
        for k, sample in enumerate(rule.samples(dtype, "cpu")):
            paths, spec = pytree.tree_flatten_with_path((sample.args, sample.kwargs))
            leaves = [x.detach() if isinstance(x, Tensor) else x for _, x in paths]
            marked = any(isinstance(x, Tensor) and x.requires_grad for _, x in paths)
            numbers = [i for i, (_, x) in enumerate(paths) if tree.is_differentiable(x)]
            moving = [i for i in numbers if paths[i][1].requires_grad or not marked]
            source = f"list(rules[{name!r}].samples({dtype}, 'cpu'))[{k}]"
            origins = [
                f"{source}.{'args' if path[0].idx == 0 else 'kwargs'}{pytree.keystr(path[1:])}" for path, _ in paths
            ]
            if moving:
                found.append(Call(name, _function(name), leaves, spec, moving, origins, _in_place(name, sample)))
    return found


def _function(name: str) -> str:
    rule = mg.rules[name]
    if rule.probe is not rule.aten or not name.startswith("aten::"):
        return f"rules[{name!r}].probe"
    base, _, overload = name.removeprefix("aten::").partition(".")
    return f"aten.{base}.{overload or 'default'}"


def _in_place(name: str, sample: Any) -> str | None:
    """The operator that writes its result to its first argument, if the rule's has one with the same arguments."""
    rule = mg.rules[name]
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, f"{base}_", None)
    if rule.probe is not rule.aten or packet is None or not sample.args or not isinstance(sample.args[0], Tensor):
        return None
    written = getattr(packet, overload or "default", None)
    if written is None or len(written._schema.arguments) != len(rule.aten._schema.arguments):
        return None
    return f"aten.{base}_.{overload or 'default'}"


Template = Callable[[Random, Tensor], str | None]


def _dim(rng: Random, x: Tensor) -> int:
    return rng.randrange(-x.dim(), x.dim())


def _narrow(rng: Random, x: Tensor) -> str | None:
    d = _dim(rng, x)
    n = x.shape[d]
    length = rng.randint(1, n)
    return f"{{0}}.narrow({d}, {rng.randint(0, n - length)}, {length})"


def _two(rng: Random, x: Tensor) -> tuple[int, int] | None:
    return tuple(rng.sample(range(x.dim()), 2)) if x.dim() > 1 else None  # type: ignore[return-value]


def _shape(rng: Random, x: Tensor) -> list[int]:
    """Another shape of as many elements."""
    n, shape = x.numel(), []
    for p in (2, 3, 5, 2, 3):
        if n % p == 0 and rng.random() < 0.7:
            shape.append(p)
            n //= p
    shape.append(n)
    rng.shuffle(shape)
    return shape


def _permuted(rng: Random, x: Tensor) -> str:
    return f"{{0}}.permute({rng.sample(range(x.dim()), x.dim())})"


def _with_two(text: str) -> Template:
    def template(rng: Random, x: Tensor) -> str | None:
        pair = _two(rng, x)
        return None if pair is None else "{0}" + text.format(*pair)

    return template


def _fixed(text: str, when: Callable[[Tensor], bool] = lambda x: True) -> Template:
    return lambda rng, x: text if when(x) else None


def _along(text: str, size: int = 1) -> Template:
    """A template with D for a dimension of at least that size, I for an index along it, N for the size."""

    def template(rng: Random, x: Tensor) -> str | None:
        dims = [d for d in range(x.dim()) if x.shape[d] >= size]
        if not dims:
            return None
        d = rng.choice(dims)
        n = x.shape[d]
        return text.replace("D", str(d)).replace("I", str(rng.randrange(n))).replace("N", str(n))

    return template


def _real(x: Tensor) -> bool:
    return not x.is_complex()


#: Each gives an expression of {0} that shares its memory.
VIEWS: dict[str, Template] = {
    "reshape": lambda rng, x: f"{{0}}.reshape({_shape(rng, x)})",
    "view": lambda rng, x: f"{{0}}.view({_shape(rng, x)})" if x.is_contiguous() else None,
    "flatten": _fixed("{0}.flatten()"),
    "transpose": _with_two(".transpose({0}, {1})"),
    "movedim": _with_two(".movedim({0}, {1})"),
    "permute": _permuted,
    "mT": _fixed("{0}.mT", lambda x: x.dim() > 1),
    "mH": _fixed("{0}.mH", lambda x: x.dim() > 1),
    "narrow": lambda rng, x: _narrow(rng, x) if x.dim() else None,
    "select": _along("{0}.select(D, I)"),
    "unsqueeze": lambda rng, x: f"{{0}}.unsqueeze({rng.randint(0, x.dim())})" if x.dim() < 4 else None,
    "squeeze": _fixed("{0}.squeeze()", lambda x: 1 in x.shape),
    "expand": _fixed("{0}.expand(2, *{0}.shape)", lambda x: x.dim() < 4 and x.numel() < 20),
    "diagonal": _with_two(".diagonal(0, {0}, {1})"),
    "unfold": _along("{0}.unfold(D, 2, 1)", 2),
    "strided": _fixed("{0}[..., ::2]", lambda x: x.dim() > 0),
    "slice": _fixed("{0}[1:]", lambda x: x.dim() > 0 and x.shape[0] > 1),
    "none": _fixed("{0}[..., None]", lambda x: x.dim() < 4),
    "ellipsis": _fixed("{0}[..., 0]", lambda x: x.dim() > 0),
    "as_strided": _fixed("{0}.as_strided([2, 2], [1, 2])", lambda x: x.is_contiguous() and x.numel() >= 4),
    "chunk": _along("{0}.chunk(2, D)[-1]", 2),
    "split": _along("{0}.split(1, D)[I]"),
    "unbind": _along("{0}.unbind(D)[I]"),
    "tensor_split": _along("{0}.tensor_split(2, D)[0]", 2),
    "unflatten": _along("{0}.unflatten(D, [1, N])"),
    "real": _fixed("{0}.real", torch.is_complex),
    "imag": _fixed("{0}.imag", torch.is_complex),
    "conj": _fixed("{0}.conj()", torch.is_complex),
    "view_as_real": _fixed("torch.view_as_real({0}.resolve_conj())", torch.is_complex),
    "view_as_complex": _fixed(
        "torch.view_as_complex({0})", lambda x: _real(x) and x.dim() > 0 and x.shape[-1] == 2 and x.is_contiguous()
    ),
}

#: Each gives an expression of {0}, which may be of any numbers.
FUNCTIONS: dict[str, Template] = {
    "softmax": _along("F.softmax({0}, D)"),
    "log_softmax": _along("F.log_softmax({0}, D)"),
    "layer_norm": _fixed("F.layer_norm({0}, {0}.shape[-1:], eps=0.1)", lambda x: _real(x) and x.dim() > 0),
    "rms_norm": _fixed("F.rms_norm({0}, {0}.shape[-1:], eps=0.1)", lambda x: _real(x) and x.dim() > 0),
    "normalize": _fixed("F.normalize({0} + 2, dim=-1)", lambda x: x.dim() > 0),
    "gelu": _fixed("F.gelu({0})", _real),
    "silu": _fixed("F.silu({0})"),
    "mish": _fixed("F.mish({0})", _real),
    "softplus": _fixed("F.softplus({0})", _real),
    "logsigmoid": _fixed("F.logsigmoid({0})", _real),
    "tanhshrink": _fixed("F.tanhshrink({0})"),
    "softsign": _fixed("F.softsign({0})", _real),
    "elu": _fixed("F.elu({0} - 2)", _real),
    "relu": _fixed("F.relu({0})", _real),
    "sigmoid": _fixed("torch.sigmoid({0} * 0.5)"),
    "tanh": _fixed("torch.tanh({0} * 0.5)"),
    "sin": _fixed("torch.sin({0})"),
    "exp": _fixed("torch.exp({0} * 0.2)"),
    "log1p of a square": _fixed("torch.log1p({0} * {0})", _real),
    "square": _fixed("{0}.square()"),
    "cube": _fixed("{0} ** 3"),
    "own power": _fixed("(2 + {0}.sin()) ** {0}.cos()", _real),
    "modulus": _fixed("({0} + 3).abs()"),
    "angle": _fixed("({0} + 3).angle()", torch.is_complex),
    "sgn": _fixed("({0} + 3).sgn()", torch.is_complex),
    "sinc": _fixed("torch.sinc({0} * 0.3)", _real),
    "atan": _fixed("torch.atan({0} * 0.5)", _real),
    "sum": _along("{0}.sum(D)"),
    "mean": _along("{0}.mean(D, keepdim=True)"),
    "prod": _along("({0} * 0.5 + 1).prod(D)"),
    "var": _along("{0}.var(D)", 2),
    "std": _along("{0}.std(D)", 3),
    "norm": _along("torch.linalg.vector_norm({0} + 3, dim=D)"),
    "3-norm": _along("torch.linalg.vector_norm({0} + 3, 3, dim=D)"),
    "Frobenius": _fixed("torch.linalg.matrix_norm({0})", lambda x: x.dim() > 1),
    "amax": _fixed("{0}.amax(-1)", lambda x: _real(x) and x.dim() > 0),
    "logsumexp": _fixed("{0}.logsumexp(-1)", lambda x: _real(x) and x.dim() > 0),
    "cumsum": _along("{0}.cumsum(D)"),
    "cumprod": _along("({0} * 0.3 + 1).cumprod(D)"),
    "logcumsumexp": _fixed("{0}.logcumsumexp(-1)", lambda x: _real(x) and x.dim() > 0),
    "sort": _fixed("{0}.sort(-1)[0]", lambda x: _real(x) and x.dim() > 0),
    "flip": _along("{0}.flip(D)"),
    "roll": _along("{0}.roll(1, D)"),
    "tril": _fixed("{0}.tril()", lambda x: x.dim() > 1),
    "pad": _fixed("F.pad({0}, (1, 1))", lambda x: x.dim() > 0),
    "clone": _fixed("{0}.clone()"),
    "contiguous": _fixed("{0}.contiguous()"),
    "double of single": _fixed("{0} + {0}"),
    "fft": _along("torch.fft.fft({0}, dim=D)"),
    "rfft": _fixed("torch.fft.rfft({0})", lambda x: _real(x) and x.dim() > 0),
    "hfft": _fixed("torch.fft.irfft({0}, n=3)", lambda x: x.is_complex() and x.dim() > 0 and x.shape[-1] > 1),
    "gram": _fixed("{0}.mH @ {0}", lambda x: x.dim() > 1),
    "determinant of a gram": _fixed(
        "torch.linalg.det({0} @ {0}.mH + torch.eye({0}.shape[-2], dtype={0}.dtype))", lambda x: x.dim() > 1
    ),
    "logdet of a gram": _fixed(
        "torch.linalg.slogdet({0} @ {0}.mH + torch.eye({0}.shape[-2], dtype={0}.dtype))[1]", lambda x: x.dim() > 1
    ),
    "inverse of a gram": _fixed(
        "torch.linalg.inv({0} @ {0}.mH + torch.eye({0}.shape[-2], dtype={0}.dtype))", lambda x: x.dim() > 1
    ),
    "cholesky of a gram": _fixed(
        "torch.linalg.cholesky({0} @ {0}.mH + torch.eye({0}.shape[-2], dtype={0}.dtype))", lambda x: x.dim() > 1
    ),
    "matrix_exp": _fixed("torch.linalg.matrix_exp(0.3 * {0})", lambda x: x.dim() > 1 and x.shape[-1] == x.shape[-2]),
    "root of a gram": _fixed(
        "mg.linalg.sqrtm({0} @ {0}.mH + torch.eye({0}.shape[-2], dtype={0}.dtype), assume='hermitian')",
        lambda x: x.dim() > 1,
    ),
    "logm": _fixed(
        "mg.linalg.logm(0.1 * {0} + 2 * torch.eye({0}.shape[-1], dtype={0}.dtype))",
        lambda x: x.dim() > 1 and x.shape[-1] == x.shape[-2],
    ),
    "nuclear_norm": _fixed("mg.linalg.nuclear_norm({0})", lambda x: x.dim() > 1),
    "attention": _fixed(
        "F.scaled_dot_product_attention({0}, {0}.flip(-2), {0} * 2)", lambda x: _real(x) and x.dim() > 2
    ),
    "dropout in evaluation": _fixed("F.dropout({0}, 0.5, training=False)"),
    "average pool": _fixed("F.avg_pool1d({0}, 2, 1)", lambda x: _real(x) and x.dim() == 3 and x.shape[-1] > 1),
    "instance_norm": _fixed("F.instance_norm({0}, eps=0.1)", lambda x: _real(x) and x.dim() == 3 and x.shape[-1] > 1),
    "batch_norm": _fixed(
        "F.batch_norm({0}, None, None, training=True, eps=0.1)", lambda x: _real(x) and x.dim() > 1 and x.shape[0] > 1
    ),
    "cosine": _fixed("F.cosine_similarity({0}, {0}.cos() + 2, dim=-1)", lambda x: _real(x) and x.dim() > 0),
    "index twice": _fixed("{0}[[0, -1, 0]]", lambda x: x.dim() > 0),
    "mask": _fixed("{0}[{0}.abs() > 0.5]", lambda x: bool((x.abs() > 0.5).any())),
    "masked_fill": _fixed("{0}.masked_fill({0} > 0.5, 0.0)", _real),
    "nan_to_num": _fixed("{0}.nan_to_num()"),
    "clamp": _fixed("{0}.clamp(-0.7, 0.7)", _real),
    "where of itself": _fixed("torch.where({0} > 0, {0}.exp(), 1 + {0})", _real),
    "checkpoint": _fixed("torch.cdist({0} + 1, {0}.flip(0) - 1)", lambda x: _real(x) and x.dim() == 2),
    "polar": _fixed("torch.polar({0}.square() + 1, {0})", _real),
    "complex": _fixed("torch.complex({0}, {0}.sin())", _real),
    "in a foreach": _fixed("torch._foreach_mul([{0}, {0} + 1], 2.0)[1]"),
}

#: Each gives an expression of {0} and {1}, of one shape and dtype.
JOINS: dict[str, Template] = {
    "cat": _along("torch.cat([{0}, {1}], D)"),
    "stack": _fixed("torch.stack([{0}, {1}])", lambda x: x.dim() < 4),
    "add": _fixed("{0} + 0.5 * {1}"),
    "sub": _fixed("torch.sub({0}, {1}, alpha=2)"),
    "mul": _fixed("{0} * {1}"),
    "div": _fixed("{0} / (2 + {1}.sin())", _real),
    "where": _fixed("torch.where({0} > 0.3, {0}, {1})", _real),
    "where of an abs": _fixed("torch.where({0}.abs() > 0.3, {1}, {0})"),
    "maximum": _fixed("torch.maximum({0}, {1})", _real),
    "hypot": _fixed("torch.hypot({0} + 3, {1})", _real),
    "atan2": _fixed("torch.atan2({0}, {1} + 3)", _real),
    "lerp": _fixed("torch.lerp({0}, {1}, 0.3)"),
    "addcmul": _fixed("torch.addcmul({0}, {1}, {0}, value=0.5)"),
    "addcdiv": _fixed("torch.addcdiv({0}, {1}, 2 + {0}.cos())", _real),
    "logaddexp": _fixed("torch.logaddexp({0}, {1})", _real),
    "xlogy": _fixed("torch.xlogy({0}, 2 + {1}.sin())", _real),
    "matmul": _fixed("{0} @ {1}.mT", lambda x: x.dim() > 1),
    "outer": _fixed("torch.outer({0}, {1})", lambda x: x.dim() == 1 and x.numel() < 7),
    "einsum": _fixed("torch.einsum('...i,...i->...', {0}, {1})", lambda x: x.dim() > 0),
    "mse_loss": _fixed("F.mse_loss({0}, {1})", _real),
    "l1_loss": _fixed("F.l1_loss({0}, {1})"),
    "smooth_l1_loss": _fixed("F.smooth_l1_loss({0}, {1})", _real),
    "huber_loss": _fixed("F.huber_loss({0}, {1}, delta=0.5)", _real),
    "kl_div": _fixed("F.kl_div(F.log_softmax({0}, -1), F.softmax({1}, -1))", lambda x: _real(x) and x.dim() > 0),
    "bce with logits": _fixed("F.binary_cross_entropy_with_logits({0}, torch.sigmoid({1}))", _real),
    "cross_entropy": _fixed("F.cross_entropy({0}, F.softmax({1}, 1))", lambda x: _real(x) and x.dim() == 2),
    "gaussian_nll": _fixed("F.gaussian_nll_loss({0}, {1}, 1 + {1}.square())", lambda x: _real(x) and x.dim() > 0),
    "solve": _fixed(
        "torch.linalg.solve({0} @ {0}.mH + torch.eye({0}.shape[-2], dtype={0}.dtype), {1})", lambda x: x.dim() > 1
    ),
    "index_put": _fixed("torch.index_put({0}, [torch.tensor([0])], {1}[-1])", lambda x: x.dim() > 0),
    "slice_scatter": _fixed("torch.slice_scatter({0}, {1}[:1], 0, 0, 1)", lambda x: x.dim() > 0),
    "select_scatter": _fixed("torch.select_scatter({0}, {1}[-1], 0, 0)", lambda x: x.dim() > 0),
    "scatter_add": _fixed("{0}.scatter_add(0, torch.zeros({1}.shape, dtype=torch.long), {1})", lambda x: x.dim() > 0),
    "gather": _fixed("torch.gather({0} * {1}, 0, torch.zeros({1}.shape, dtype=torch.long))", lambda x: x.dim() > 0),
}

#: Each writes to {0}, which is not an input, from {1} of its shape and dtype.
WRITES: dict[str, Template] = {
    "add_": _fixed("{0}.add_({1})"),
    "sub_": _fixed("{0}.sub_({1}, alpha=2)"),
    "mul_": _fixed("{0}.mul_({1})"),
    "div_": _fixed("{0}.div_({1}.square() + 2)", _real),
    "mul_ by itself": _fixed("{0}.mul_({0})"),
    "add_ of itself": _fixed("{0}.add_({0}, alpha=0.5)"),
    "addcmul_": _fixed("{0}.addcmul_({1}, {0}, value=0.5)"),
    "addcmul_ of itself": _fixed("{0}.addcmul_({0}, {0})"),
    "lerp_": _fixed("{0}.lerp_({1}, 0.3)"),
    "copy_": _fixed("{0}.copy_({1})"),
    "sin_": _fixed("{0}.sin_()"),
    "exp_": _fixed("{0}.mul_(0.2).exp_()"),
    "tanh_": _fixed("{0}.mul_(0.5).tanh_()"),
    "square_": _fixed("{0}.square_()"),
    "pow_": _fixed("{0}.pow_(3)"),
    "relu_": _fixed("{0}.relu_()", _real),
    "sigmoid_": _fixed("{0}.mul_(0.5).sigmoid_()"),
    "neg_": _fixed("{0}.neg_()"),
    "zero_": _fixed("{0}.zero_()"),
    "fill_": _fixed("{0}.fill_(0.7)"),
    "masked_fill_": _fixed("{0}.masked_fill_({0} > 0.5, 0.0)", _real),
    "clamp_": _fixed("{0}.clamp_(-0.7, 0.7)", _real),
    "cumsum_": _along("{0}.cumsum_(D)"),
    "index_add_": _fixed("{0}.index_add_(0, torch.tensor([0]), {1}[:1])", lambda x: x.dim() > 0),
    "index_put_": _fixed("{0}.index_put_([torch.tensor([0])], {1}[-1])", lambda x: x.dim() > 0),
    "set an item": _fixed("{0}.__setitem__(0, {1}[-1])", lambda x: x.dim() > 0),
    "set a slice": _fixed("{0}.__setitem__((..., slice(None, 1)), {1}[..., :1])", lambda x: x.dim() > 0),
    "set an item of itself": _fixed("{0}.__setitem__(0, {0}[-1] * {0}[0])", lambda x: x.dim() > 0),
    "set by a mask": _fixed("{0}.__setitem__({0}.abs() > 0.5, 0.3)"),
    "write to a view": _fixed("{0}[..., :1].mul_({1}[..., :1])", lambda x: x.dim() > 0),
    "write to a transpose": _fixed("{0}.mT.mul_({1}.mT)", lambda x: x.dim() > 1),
    "write to a diagonal": _fixed("{0}.diagonal(0, -2, -1).add_(1.5).sin_()", lambda x: x.dim() > 1),
    "write to the real part": _fixed("{0}.real.mul_({1}.imag)", torch.is_complex),
    "write to a flat view": _fixed("{0}.view(-1)[1:].mul_({0}.view(-1)[:-1].clone())", lambda x: x.numel() > 1),
    "triu_": _fixed("{0}.triu_()", lambda x: x.dim() > 1),
    "t_": _fixed("{0}.t_()", lambda x: x.dim() == 2),
    "squeeze_": _fixed("{0}.unsqueeze_(0)", lambda x: x.dim() < 4),
}

TABLES = {"view": VIEWS, "function": FUNCTIONS, "join": JOINS, "write": WRITES}


def names() -> list[str]:
    """Every entry of the pool."""
    rules = [name for name in mg.rules if name not in NOT_CALLED]
    return [*rules, *(f"{kind}: {name}" for kind, table in TABLES.items() for name in table)]
