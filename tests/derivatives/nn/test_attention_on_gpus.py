"""The rules of GPUs' fused attention, where a CPU kernel stands in for the operators: PyTorch registers none."""

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.derivatives.nn.attention import attention_backward, attention_mask_backward
from torch_manualgrad.derivatives.nn.attention_on_gpus import GPU_RULES
from torch_manualgrad.testing import check

aten = torch.ops.aten
NAMES = ("efficient", "flash", "cudnn")
RULES = {rule.name: rule for rule in GPU_RULES}


def attention(q, k, v, mask, is_causal, scale):
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return output, logsumexp


def efficient(q, k, v, mask, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return (
        *attention(q, k, v, mask, is_causal, scale),
        torch.zeros((), dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
    )


def efficient_backward(g, q, k, v, mask, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None):
    found = list(attention_backward.reference(g, q, k, v, out, lse, mask, is_causal, scale))
    found.append(attention_mask_backward.reference(g, q, k, v, mask, is_causal, scale) if wanted[3] else q.new_empty(0))
    return tuple(found)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros((), dtype=torch.int64)
    last = (none, none.clone(), q.shape[2], k.shape[2], zero, zero.clone(), torch.zeros(0))
    return *attention(q, k, v, None, is_causal, scale), *last


def flash_backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None):
    return attention_backward.reference(g, q, k, v, out, lse, None, is_causal, scale)


def cudnn(q, k, v, mask, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros((), dtype=torch.int64)
    last = (none, none.clone(), q.shape[2], k.shape[2], zero, zero.clone(), torch.zeros(0))
    return *attention(q, k, v, mask, is_causal, scale), *last


def cudnn_backward(
    g, q, k, v, out, lse, seed, offset, mask, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
):
    return attention_backward.reference(g, q, k, v, out, lse, mask, is_causal, scale)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with torch.library._scoped_library("aten", "IMPL") as library:
        for kernel in (efficient, efficient_backward, flash, flash_backward, cudnn, cudnn_backward):
            name, _, backward = kernel.__name__.partition("_")
            op = f"_scaled_dot_product_{name}_attention" + (f"_{backward}" if backward else "")
            library.impl(op, kernel, "CPU")
        yield


def inputs(*, square=True, heads=2):
    keys = 3 if square else 4
    return random(1, 2, 3, 2), random(1, heads, keys, 2, seed=1), random(1, heads, keys, 2, seed=2)


def call(name, mask=None, **options):
    if name == "efficient":
        return lambda q, k, v, m=mask: aten._scaled_dot_product_efficient_attention(q, k, v, m, True, **options)[0]
    if name == "flash":
        return lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, **options)[0]
    return lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, **options)[0]


OPTIONS = [{}, {"is_causal": True, "scale": 0.7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_mode(name, heads, options):
    with mg.override(*GPU_RULES):
        check(call(name, **options), [inputs(heads=heads)], checks=("forward", "third order"))


@pytest.mark.parametrize("rule", GPU_RULES, ids=lambda r: r.name)
def test_every_mode_of_the_samples(rule):
    with mg.override(*GPU_RULES):
        check(rule.probe, rule.samples(torch.float64, "cpu"), checks=())


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_a_mask_is_added(name):
    mask = random(1, 2, 3, 4, seed=4)
    given = inputs(square=False)
    with mg.override(*GPU_RULES):
        check(call(name, mask), [given], checks=())
        if name == "efficient":
            check(call(name), [(*given, mask)], checks=())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_known_raises(name):
    q, k, v = (x.requires_grad_() for x in inputs())

    def penalty(**options):
        y = call(name, **options)(q, k, v)
        (g,) = torch.autograd.grad(y.sin().sum(), q, create_graph=True)
        return torch.autograd.grad(g.square().sum(), k)

    with mg.override(*GPU_RULES):
        penalty()
        with pytest.raises(NotImplementedError, match="dropout_p: .* got 0.25"):
            penalty(dropout_p=0.25)
        _, k, v = (x.requires_grad_() for x in inputs(square=False))
        if name != "efficient":
            with pytest.raises(NotImplementedError, match="is_causal: expected as many queries as keys, got 3 and 4"):
                penalty(is_causal=True)


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_under_autocast_a_kernel_gets_the_precision_of_the_call(name):
    """The logsumexp is in single precision, which the backward does not take."""
    given = [x.bfloat16().requires_grad_() for x in inputs()]
    seen = []
    with torch.library._scoped_library("aten", "IMPL") as library:

        def backward(g, *others, **options):
            seen.append({x.dtype for x in (g, *others[:3])})
            return tuple(torch.zeros_like(x) for x in others[:3])

        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU", allow_override=True)
        with mg.override(*GPU_RULES), torch.autocast("cpu", torch.bfloat16):
            torch.autograd.grad(call(name)(*given).float().sum(), given)
    assert seen == [{torch.bfloat16}]
