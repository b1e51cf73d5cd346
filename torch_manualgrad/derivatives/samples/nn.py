"""Samples of the rules of neural networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from .drawing import random

# -- probes ------------------------------------------------------------------------------------------------------------


def first_of(operator: str, overload: str = "default") -> Callable[..., Tensor]:
    """The first output of the operator, the only one that is differentiable."""

    def probe(*args: object, **kwargs: object) -> Tensor:
        return getattr(getattr(torch.ops.aten, operator), overload)(*args, **kwargs)[0]

    return probe


def uneven(*found: Tensor) -> list[Tensor]:
    """The results times different numbers: at equal cotangents the derivatives of a backward are zero to rounding."""
    return [f * torch.linspace(1, 2, f.numel(), dtype=f.dtype, device=f.device).reshape(f.shape) for f in found]


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def untracked(x: Tensor) -> Tensor:
    """x without a tangent, not even a zero one, for PyTorch's operators that raise for any: integers have none."""
    return x.view(_BITS[x.dtype.itemsize]).view(x.dtype)


# -- attention ---------------------------------------------------------------------------------------------------------


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attention_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[list[Any], dict[str, Any]]]:
    """Query, key, value, dropout_p, is_causal; mask and scale."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    q, k, v = draw(1, 2, 3, 2), draw(1, 2, 4, 2, seed=1), draw(1, 2, 4, 2, seed=2)
    yield [q, k, v, 0.0, False], {"scale": None}
    yield [q, k[:, :1], v[:, :1], 0.0, True], {"scale": 0.8}
    yield [q, k, v, 0.0, False], {"attn_mask": draw(3, 4, seed=4)}
    yield [q, k, v, 0.0, True], {"attn_mask": draw(1, 2, 1, 4, seed=4)}
    # (N, L, H, d) in memory, as nn.MultiheadAttention and most models have them
    yield [*(draw(2, 3, 2, 2, seed=seed).transpose(1, 2) for seed in (5, 6, 7)), 0.0, False], {"scale": None}


@samples_for("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for args, kwargs in _attention_inputs(dtype, device):
        yield Sample(*args, **kwargs)


@samples_for("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for (q, k, v, *flags), kwargs in _attention_inputs(dtype, device):
        saved = _forward(q, k, v, *flags, **kwargs)
        yield Sample(random(*q.shape, dtype=dtype, device=device, seed=3), q, k, v, *saved, *flags, **kwargs)


def _with_rows(x: Tensor) -> Tensor:
    """PyTorch's kernel reads rows as if they were contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@probe_for("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention_probe(*args: Any, **kwargs: Any) -> Tensor:
    """The first output, the only one that is differentiable."""
    q, k, v, *flags = args
    return _forward(*map(_with_rows, (q, k, v)), *flags, **kwargs)[0]


@probe_for("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward_probe(*args: Any, **kwargs: Any) -> list[Tensor]:
    """The backward with the outputs of its own inputs, whatever outputs it is given."""
    g, *inputs, _, _, dropout_p, is_causal = args
    g, q, k, v = map(_with_rows, (g, *inputs))
    saved = _forward(*map(untracked, (q, k, v)), dropout_p, is_causal, **_untracked_mask(**kwargs))
    return uneven(*_backward(g, q, k, v, *saved, dropout_p, is_causal, **kwargs))


def _untracked_mask(attn_mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
    return {"attn_mask": None if attn_mask is None else untracked(attn_mask), **others}


# -- attention on GPUs -------------------------------------------------------------------------------------------------


def _gpu_attention_inputs(name: str, dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Arguments of the operator, of dtypes that the device's kernel takes."""
    half = dtype in (torch.float16, torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else device  # elsewhere a substitute replaces the kernel
    if dtype.is_complex or not (device != "cuda" or half or name == "efficient" and dtype is torch.float32):
        return
    q, k, v = (random(1, 2, 4, 8, dtype=dtype, device=device, seed=seed) for seed in range(3))
    for causal in (False, True):
        yield (q, k, v, 0.0, causal) if name == "flash" else (q, k, v, None, True, 0.0, causal)
    if name == "efficient":
        yield q, k, v, random(1, 2, 4, 4, dtype=dtype, device=device, seed=3), True, 0.0, False


def _gpu_attention_backward(name: str, g: Tensor, given: Sequence[Any], saved: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of the backward, given those of the forward and its results."""
    q, k, v, *options, p, causal = given
    out, logsumexp, *others = saved
    if name == "flash":
        return g, q, k, v, out, logsumexp, *others[:4], p, causal, *others[4:6]
    mask = options[0]
    if name == "efficient":
        return g, q, k, v, mask, out, logsumexp, *others, p, [True, True, True, mask is not None], causal
    return g, q, k, v, out, logsumexp, *others[4:6], mask, *others[:4], p, causal


# where the mask, dropout_p and is_causal are among the arguments of the backward
_PLACES = {"efficient": (4, 9, 11), "flash": (None, 10, 11), "cudnn": (8, 13, 14)}


def _gpu_attention_samples(name: str) -> None:
    operator = f"_scaled_dot_product_{name}_attention"
    forward, backward = (getattr(torch.ops.aten, operator + suffix) for suffix in ("", "_backward"))

    @samples_for(f"aten::{operator}")
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        yield from (Sample(*given) for given in _gpu_attention_inputs(name, dtype, device))

    probe_for(f"aten::{operator}")(first_of(operator))

    @samples_for(f"aten::{operator}_backward")
    def backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for given in _gpu_attention_inputs(name, dtype, device):
            g = random(*given[0].shape, dtype=dtype, device=given[0].device, seed=4)
            yield Sample(*_gpu_attention_backward(name, g, given, forward(*given)))

    @probe_for(f"aten::{operator}_backward")
    def backward_probe(*args: Any) -> list[Tensor]:
        """The backward with the outputs of its own inputs, whatever outputs it is given."""
        at_mask, at_p, at_causal = _PLACES[name]
        mask = None if at_mask is None else args[at_mask]
        options = () if name == "flash" else (mask, True)
        constant = () if name == "flash" else (None if mask is None else untracked(mask), True)
        g, q, k, v = args[:4]
        last = (args[at_p], args[at_causal])
        saved = forward(*map(untracked, (q, k, v)), *constant, *last)
        found = backward(*_gpu_attention_backward(name, g, (q, k, v, *options, *last), saved))
        return uneven(*[f for f in found if f is not None and f.numel()])


for _name in ("efficient", "flash", "cudnn"):
    _gpu_attention_samples(_name)


# -- batch norm --------------------------------------------------------------------------------------------------------


_EPS = 0.1


def _running(like: Tensor) -> tuple[Tensor, Tensor]:
    """A mean and a variance for each channel, the same at each call."""

    def between(a: float, b: float) -> Tensor:
        return torch.linspace(a, b, like.shape[1], dtype=like.dtype, device=like.device)

    return between(-0.5, 0.4), between(0.6, 1.7)


def _batch_norm_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, weight, bias."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(5, 3), draw(3, seed=1), draw(3, seed=2)
    yield draw(2, 2, 3), draw(2, seed=1), None
    yield draw(2, 2, 2, 2).contiguous(memory_format=torch.channels_last), None, draw(2, seed=2)
    yield draw(3, 2, 2), None, None


def _samples_with_statistics(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """With running statistics, which training writes to."""
    for train in (True, False):
        for given in _batch_norm_inputs(dtype, device):
            yield Sample(*given, *_running(given[0]), train, 0.1, _EPS)


def _samples_of_update(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Training with both parameters: PyTorch's fake kernel requires them."""
    for x, _, bias in _batch_norm_inputs(dtype, device):
        weight = random(x.shape[1], dtype=dtype, device=device, seed=1)
        yield Sample(x, weight, weight if bias is None else bias, *_running(x), 0.1, _EPS)


def _probe_with_statistics(operator_name: str) -> Callable[..., Tensor]:
    """The first output of an operator that writes to running statistics. Under vmap they are batched."""

    def probe(*args: Any) -> Tensor:
        batched = torch.zeros_like(args[0]).sum()
        running = [x + torch.zeros_like(given) + batched for x, given in zip(_running(args[0]), args[3:5])]
        result: Tensor = getattr(torch.ops.aten, operator_name)(*args[:3], *running, *args[5:])[0]
        return result

    return probe


@samples_for("aten::native_batch_norm")
def batch_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for train in (True, False):
        for given in _batch_norm_inputs(dtype, device):
            running: tuple[Any, ...] = (None, None) if train else _running(given[0])
            yield Sample(*given, *running, train, 0.1, _EPS)


@samples_for("aten::_native_batch_norm_legit.no_stats")
def without_statistics(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _batch_norm_inputs(dtype, device):
        yield Sample(*given, True, 0.1, _EPS)


@probe_for("aten::native_batch_norm")
def batch_norm_probe(*args: Any) -> Tensor:
    """The first output, with fixed running statistics, as it has no derivative with respect to them."""
    running = args[3:5] if args[3] is None else _running(args[0])
    return first_of("native_batch_norm")(*args[:3], *running, *args[5:])


@samples_for("aten::native_batch_norm_backward")
def batch_norm_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for train in (True, False):
        for x, weight, bias in _batch_norm_inputs(dtype, device):
            x = x.contiguous()  # PyTorch's fake kernel supports no other layout
            running: tuple[Any, ...] = (None, None) if train else _running(x)
            g = random(*x.shape, dtype=dtype, device=device, seed=3)
            _, *saved = torch.ops.aten.native_batch_norm(x, weight, bias, *running, train, 0.1, _EPS)
            mask = [True, weight is not None, bias is not None]
            yield Sample(g, x, weight, *running, *saved, train, _EPS, mask)


@samples_for("aten::batch_norm_backward")
def backward_with_reserve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Samples with a weight, which batch_norm_backward requires."""
    reserve = torch.empty(0, dtype=torch.uint8, device=device)
    for sample in batch_norm_backward(dtype, device):
        if sample.args[2] is not None:
            yield Sample(*sample.args, reserve)


def _backward_probe(operator: str) -> Callable[..., list[Tensor]]:
    """The backward with the statistics of its own input, and fixed running ones."""

    def probe(*args: Any) -> list[Tensor]:
        g, x, weight, running_mean, _, _, _, train, *rest = args
        running = (None, None) if running_mean is None else _running(x)
        _, *saved = torch.ops.aten.native_batch_norm(x, None, None, *running, train, 0.1, _EPS)
        found = getattr(torch.ops.aten, operator)(g, x, weight, *running, *saved, train, *rest)
        return uneven(*[f for f, yes in zip(found, rest[1]) if yes])

    return probe


samples_for("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional")(_samples_with_statistics)
samples_for("aten::_batch_norm_with_update", "aten::_batch_norm_with_update_functional")(_samples_of_update)
probe_for("aten::_native_batch_norm_legit.no_stats")(first_of("_native_batch_norm_legit", "no_stats"))
for _name in ("_native_batch_norm_legit", "_batch_norm_with_update"):
    for _form in (_name, f"{_name}_functional"):
        probe_for(f"aten::{_form}")(_probe_with_statistics(_form))
for _name in ("native_batch_norm_backward", "batch_norm_backward"):
    probe_for(f"aten::{_name}")(_backward_probe(_name))


# -- the operators of cuDNN and MIOpen --------------------------------------------------------------------------------


def drawn_on_gpu(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return random(*shape, dtype=dtype, device="cuda", seed=seed)


def gpu_inputs(dtype: torch.dtype) -> list[Any]:
    return (
        []
        if dtype.is_complex
        else [drawn_on_gpu(4, 2, 3, dtype=dtype), *[drawn_on_gpu(2, dtype=dtype, seed=k) for k in (1, 2)]]
    )


def _gpu_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if given := gpu_inputs(dtype):
        yield Sample(*given, None, None, True, 0.1, _EPS)


def _gpu_backward_samples(library: str) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if given := gpu_inputs(dtype):
            _, *saved = getattr(torch.ops.aten, f"{library}_batch_norm")(*given, None, None, True, 0.1, _EPS)
            g = drawn_on_gpu(4, 2, 3, dtype=dtype, seed=3)
            yield Sample(given[0], g, given[1], None, None, *saved[:2], _EPS, *saved[2:])

    return samples


def _gpu_backward_probe(library: str) -> Callable[..., Any]:
    """The backward with the statistics of its own input, whatever statistics it is given."""

    def probe(x: Tensor, g: Tensor, weight: Tensor, *_: Any) -> Any:
        forward, backward = (getattr(torch.ops.aten, f"{library}_batch_norm{s}") for s in ("", "_backward"))
        _, *saved = forward(x, weight, torch.zeros_like(weight), None, None, True, 0.1, _EPS)
        return backward(x, g, weight, None, None, *saved[:2], _EPS, *saved[2:])

    return probe


for _library in ("cudnn", "miopen"):
    samples_for(f"aten::{_library}_batch_norm")(_gpu_samples)
    samples_for(f"aten::{_library}_batch_norm_backward")(_gpu_backward_samples(_library))
    probe_for(f"aten::{_library}_batch_norm")(first_of(f"{_library}_batch_norm"))
    probe_for(f"aten::{_library}_batch_norm_backward")(_gpu_backward_probe(_library))


# -- dropout -----------------------------------------------------------------------------------------------------------


@samples_for("aten::native_dropout")
def dropout(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Calls that draw no random numbers."""
    if not dtype.is_complex:
        x = random(2, 3, dtype=dtype, device=device)
        yield from (Sample(x, 0.4, False), Sample(x, 0.0, True), Sample(x, 1.0, True))


@samples_for("aten::native_dropout_backward")
def dropout_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    g = random(2, 3, dtype=dtype, device=device)
    yield Sample(g, g.abs() > 0.6, 2.5)


@samples_for("aten::_fused_dropout")
def fused(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        yield Sample(random(2, 3, dtype=dtype, device="cuda"), 1.0)


@samples_for("aten::rrelu_with_noise_functional", "aten::rrelu_with_noise")
def rrelu(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Calls that draw no random slopes: both ends of their interval are the same."""
    if dtype.is_complex:
        return
    x = random(2, 3, dtype=dtype, device=device)
    yield Sample(x, torch.zeros_like(x), 0.1, 0.3, False)
    yield Sample(x, torch.zeros_like(x), 0.2, 0.2, True)


def _rrelu_probe(operator_name: str) -> Callable[..., Tensor]:
    """The first output, for contiguous tensors: PyTorch's kernel writes the noise as if it were contiguous."""

    def probe(self: Tensor, noise: Tensor, *rest: Any) -> Tensor:
        self = self.contiguous()
        found = getattr(torch.ops.aten, operator_name)(self, torch.zeros_like(self), *rest)
        result: Tensor = found if isinstance(found, Tensor) else found[0]
        return result

    return probe


@samples_for("aten::rrelu_with_noise_backward")
def rrelu_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    g, x = (random(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
    noise = torch.where(x > 0, 1, 0.2 + 0.1 * g.sigmoid()).to(dtype)
    for training in (False, True):
        yield Sample(g, x, noise, 0.1, 0.3, training, False)


@samples_for("aten::_masked_softmax")
def masked_softmax(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = random(2, 1, 3, 3, dtype=dtype, device=device)
    mask = torch.eye(3, dtype=torch.bool, device=device)
    yield Sample(x, mask.flip(0).expand(x.shape).clone(), None, 2)
    yield Sample(x, mask, 3, 0)
    yield Sample(x, mask[:2], 3, 1)
    yield Sample(x[0, 0], mask, 0, 2)


@probe_for("aten::_masked_softmax")
def masked_softmax_probe(self: Tensor, mask: Tensor, *rest: Any) -> Tensor:
    """PyTorch's kernel reads the mask as if both were contiguous."""
    return torch.ops.aten._masked_softmax(self.contiguous(), mask.contiguous(), *rest)


probe_for("aten::native_dropout")(first_of("native_dropout"))
probe_for("aten::_fused_dropout")(first_of("_fused_dropout"))
probe_for("aten::rrelu_with_noise_functional")(_rrelu_probe("rrelu_with_noise_functional"))
probe_for("aten::rrelu_with_noise")(_rrelu_probe("rrelu_with_noise"))


# -- group norm --------------------------------------------------------------------------------------------------------


def _group_norm_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, weight, bias, N, C, HxW, group."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(2, 4, 3), draw(4, seed=1), draw(4, seed=2), 2, 4, 3, 2
    yield draw(2, 3, 2, 2), draw(3, seed=1), None, 2, 3, 4, 1
    yield draw(2, 4), None, draw(4, seed=2), 2, 4, 1, 2
    yield draw(1, 2, 4), None, None, 1, 2, 4, 2


@samples_for("aten::native_group_norm")
def group_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _group_norm_inputs(dtype, device):
        yield Sample(*given, _EPS)


@samples_for("aten::native_group_norm_backward")
def group_norm_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, weight, bias, *sizes in _group_norm_inputs(dtype, device):
        _, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, _EPS)
        g = random(*x.shape, dtype=dtype, device=device, seed=3)
        yield Sample(g, x, mean, rstd, weight, *sizes, [True, *[weight is not None] * 2])


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    """PyTorch's kernels take contiguous tensors only. They do not check the weight, and read past its end."""
    return [None if x is None else x.contiguous() for x in tensors]


@probe_for("aten::native_group_norm")
def group_norm_probe(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten.native_group_norm(*_contiguous(x, weight, bias), *args)


@probe_for("aten::native_group_norm_backward")
def group_norm_backward_probe(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The backward with the statistics of its own input, whatever statistics it is given."""
    *sizes, mask = rest
    g, x, weight = _contiguous(g, x, weight)
    _, mean, rstd = torch.ops.aten.native_group_norm(x, None, None, *sizes, _EPS)
    found = torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, weight, *sizes, mask)
    return uneven(*[f for f, yes in zip(found, mask) if yes])


# -- layer norm --------------------------------------------------------------------------------------------------------


def _layer_norm_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, normalized_shape, weight, bias."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(3, 4), [4], draw(4, seed=1), draw(4, seed=2)
    yield draw(2, 2, 3), [2, 3], draw(2, 3, seed=1), None
    yield draw(2, 3), [3], None, draw(3, seed=2)
    yield draw(4, 3).mT, [4], None, None
    yield draw(3), [3], draw(3, seed=1), draw(3, seed=2)
    yield draw(0, 3), [3], draw(3, seed=1), draw(3, seed=2)


@samples_for("aten::native_layer_norm")
def layer_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _layer_norm_inputs(dtype, device):
        yield Sample(*given, _EPS)


@samples_for("aten::native_layer_norm_backward")
def layer_norm_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, shape, weight, bias in _layer_norm_inputs(dtype, device):
        _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, _EPS)
        g = random(*x.shape, dtype=dtype, device=device, seed=3)
        yield Sample(g, x, shape, mean, rstd, weight, bias, [True, weight is not None, bias is not None])


@probe_for("aten::native_layer_norm_backward")
def layer_norm_backward_probe(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """The backward with the statistics of its own input, whatever statistics it is given."""
    _, mean, rstd = torch.native_layer_norm(input, normalized_shape, None, None, _EPS)
    found = torch.ops.aten.native_layer_norm_backward(
        grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    )
    return uneven(*[f for f, yes in zip(found, output_mask) if yes])


probe_for("aten::native_layer_norm")(first_of("native_layer_norm"))


# -- rms norm ----------------------------------------------------------------------------------------------------------


_NAME = "aten::_fused_rms_norm_backward"


@samples_for(_NAME)
def rms_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if given := gpu_inputs(dtype):
        x, weight = given[0].mT.contiguous(), given[1]
        rstd = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        yield Sample(drawn_on_gpu(*x.shape, dtype=dtype, seed=3), x, [2], rstd, weight, [True, True])


@probe_for(_NAME)
def rms_norm_probe(g: Tensor, x: Tensor, shape: Sequence[int], _: Tensor, weight: Tensor, mask: Sequence[bool]) -> Any:
    """The backward with the statistics of its own input, whatever statistics it is given."""
    rstd = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    return torch.ops.aten._fused_rms_norm_backward(g, x, shape, rstd, weight, mask)


# -- weight norm -------------------------------------------------------------------------------------------------------


@samples_for("aten::_weight_norm_interface")
def weight_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    v, g = (random(3, 4, dtype=dtype, device=device, seed=k) for k in (0, 1))
    yield Sample(v, g[:, :1].contiguous(), 0)
    yield Sample(v, g[:1], 1)
    yield Sample(v.reshape(2, 3, 2), g[0, :2].reshape(2, 1, 1), 0)


@samples_for("aten::_weight_norm_interface_backward")
def weight_norm_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for v, g, dim in (s.args for s in weight_norm(dtype, device)):
        norms = torch.ops.aten._weight_norm_interface(v, g, dim)[1]
        yield Sample(random(*v.shape, dtype=dtype, device=device, seed=2), v, g, norms, dim)


@probe_for("aten::_weight_norm_interface")
def weight_norm_probe(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """The differentiable output for contiguous tensors: PyTorch's kernel reads others as if they were contiguous."""
    return torch.ops.aten._weight_norm_interface(v.contiguous(), g.contiguous(), dim)[0]


@probe_for("aten::_weight_norm_interface_backward")
def weight_norm_backward_probe(grad_w: Tensor, v: Tensor, g: Tensor, _: Tensor, dim: int) -> Any:
    """The backward with the norms of its own input, whatever norms it is given: it has no derivative with respect to them."""
    grad_w, v, g = grad_w.contiguous(), v.contiguous(), g.contiguous()
    norms = torch.norm_except_dim(v, 2, dim)
    return uneven(*torch.ops.aten._weight_norm_interface_backward(grad_w, v, g, norms, dim))
