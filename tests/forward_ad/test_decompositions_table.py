"""The decompositions that the package has: values and derivatives, against finite differences and the operators themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.tensors import random
from torch.func import grad, jacfwd, jacrev

import torch_manualgrad as mg
from torch_manualgrad.derivatives.nn import batch_norm, rms_norm
from torch_manualgrad.forward_ad.decomposition import functions

aten = torch.ops.aten
TABLE = mg.forward_ad.decomposition_table
FORWARD = ("fwd", "fwd-rev", "fwd-fwd", "rev-fwd")
GPU = {rule.name: rule for rule in [*batch_norm.GPU_RULES, *rms_norm.GPU_RULES] if rule.name in TABLE}
EPS = 0.1
MASKS = list(itertools.product([True, False], repeat=3))


HERE = [name for name in TABLE if name not in GPU]


@pytest.mark.parametrize("name", HERE)
def test_forward_mode_alone_and_with_reverse_mode(name):
    rule = mg.rules[name]
    for dtype in (torch.float64, torch.complex128):
        samples = list(rule.samples(dtype, "cpu"))
        if not samples:
            assert dtype.is_complex
            continue
        with mg.forward_ad.decompositions(name, replace=True) as scope:
            assert [one.how for one in scope.forward_modes] == ["decomposition"]
            mg.testing.check(rule.probe, samples, name=name, modes=FORWARD, checks=())
    assert dtype is torch.complex128


@pytest.mark.parametrize("name", HERE)
def test_the_function_is_the_operator(name):
    rule, entry = mg.rules[name], TABLE[name]
    for dtype in (torch.float64, torch.float32):
        for sample in rule.samples(dtype, "cpu"):
            if sample.args[0].numel() == 0 or "layer_norm" in name and sample.args[5] is None:
                continue  # on which PyTorch ends the process, or raises
            expected, found = rule.aten(*sample.args, **sample.kwargs), entry.function(*sample.args, **sample.kwargs)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_table_describes_its_functions():
    assert len(TABLE) == 11
    for name, entry in TABLE.items():
        assert entry.name == name and entry.function.__doc__ and not entry.is_active
        assert all(shared in mg.ops for shared in entry.shares)
    assert sum(bool(entry.shares) for entry in TABLE.values()) == 7


# -- layer normalization and batch normalization ----------------------------------------------------------------------


def layer_backward(g, x, weight, bias, mask):
    """As autograd calls it: the saved statistics are those of x, without tangents."""
    _, mean, rstd = torch.native_layer_norm(x.detach(), [4], None, None, EPS)
    return functions.native_layer_norm_backward(g, x, [4], mean, rstd, weight, bias, mask)


def batch_backward(g, x, weight, bias, mask, train=True):
    running = (None, None) if train else (random(3, seed=7), random(3, seed=8).square() + 1)
    saved = [None, None]
    if train:
        saved = [x.detach().mean((0, 2)), (x.detach().var((0, 2), unbiased=False) + EPS).rsqrt()]
    return functions.native_batch_norm_backward(g, x, weight, *running, *saved, train, EPS, mask)


def evaluation(*args):
    return batch_backward(*args, train=False)


NORMS = {
    "layer": (layer_backward, (3, 4), 4),
    "batch": (batch_backward, (3, 3, 2), 3),
    "evaluation": (evaluation, (3, 3, 2), 3),
}


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("with_parameters", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_output_masks_and_absent_parameters(norm, with_parameters, mask):
    backward, shape, n = NORMS[norm]
    weight, bias = (random(n, seed=1), random(n, seed=2)) if with_parameters else (None, None)

    def wanted(g, x, *weight):
        found = backward(g, x, weight[0] if weight else None, bias, list(mask))
        assert [f is not None for f in found] == list(mask)
        return [f * torch.linspace(1, 2, f.numel(), dtype=f.dtype).reshape(f.shape) for f in found if f is not None]

    inputs = [random(*shape, seed=3), random(*shape, seed=4), *([weight] if with_parameters else [])]
    if any(mask):
        mg.testing.check(wanted, [inputs], modes=("fwd", "fwd-rev"), checks=())
    else:
        assert wanted(*inputs) == []


@pytest.mark.parametrize("norm", NORMS)
def test_empty_batches(norm):
    backward, shape, n = NORMS[norm]
    x, weight = random(0, *shape[1:]), random(n)
    with fwAD.dual_level():
        found = backward(x, fwAD.make_dual(x, x.clone()), fwAD.make_dual(weight, weight.sin()), weight, [True] * 3)
        assert [f.shape for f in found] == [x.shape, weight.shape, weight.shape]
        assert all(fwAD.unpack_dual(f).primal.eq(0).all() for f in found)


def test_an_empty_batch_under_forward_over_reverse():
    x, weight = random(0, 3), random(3)
    with mg.forward_ad.decompositions():
        for loss in (
            lambda w: torch.nn.functional.layer_norm(x, [3], w).sin().sum(),
            lambda w: torch.nn.functional.nll_loss(w * x, torch.zeros(0, dtype=torch.long), reduction="sum"),
        ):
            assert jacfwd(grad(loss))(weight).eq(0).all()


@pytest.mark.parametrize("name", GPU)
def test_operators_that_only_gpus_have(name):
    """Through its function, with the statistics of its input."""
    function, (x, g, weight) = TABLE[name].function, (random(4, 3, 2, seed=i) for i in range(3))
    weight = weight[0, :, 0]
    rest = (torch.empty(0, dtype=torch.uint8),) if "cudnn" in name else ()

    def call(x, g, weight):
        saved = [x.detach().mean((0, 2)), (x.detach().var((0, 2), unbiased=False) + EPS).rsqrt()]
        found = function(x, g, weight, None, None, *saved, EPS, *rest)
        return [f * torch.linspace(1, 2, f.numel(), dtype=f.dtype).reshape(f.shape) for f in found]

    mg.testing.check(call, [(x, g, weight)], modes=FORWARD, checks=())
    expected = aten.native_batch_norm_backward(
        g, x, weight, None, None, x.mean((0, 2)), (x.var((0, 2), unbiased=False) + EPS).rsqrt(), True, EPS, [True] * 3
    )
    plain = [f / torch.linspace(1, 2, f.numel(), dtype=f.dtype).reshape(f.shape) for f in call(x, g, weight)]
    torch.testing.assert_close(plain, list(expected))


def test_recompute_mean_var():
    x, dims = random(3, 4, 2), [1, 2]
    rstd = (x.var(dims, unbiased=False) + EPS).rsqrt()

    def saved(x):
        return mg.forward_ad.recompute_mean_var(x, rstd, dims, keepdim=False)

    def direct(x):
        return x.mean(dims), (x.var(dims, unbiased=False) + EPS).rsqrt()

    torch.testing.assert_close(saved(x), direct(x))
    for transform in (jacfwd, jacrev, lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacfwd(f))):
        torch.testing.assert_close(transform(saved)(x), transform(direct)(x))
    kept = mg.forward_ad.recompute_mean_var(x, rstd[:, None, None], dims, keepdim=True)
    assert [k.shape for k in kept] == [(3, 1, 1)] * 2
    assert mg.forward_ad.recompute_mean_var(x.half(), rstd, dims, True)[0].dtype is torch.float32


def layer_norm_loss(x):
    return (torch.nn.functional.layer_norm(x, x.shape[1:], eps=EPS) * random(3, 4, seed=5)).sin().sum()


def test_saved_statistics_taken_for_constants_are_found():
    def faulty(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
        x = (input - mean) * rstd  # right where it is evaluated
        g = grad_out if weight is None else grad_out * weight
        of_x = rstd * (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True))
        return of_x, None, None

    x, t = random(3, 4), random(3, 4, seed=1)
    sample = [(x,)]
    right = grad(layer_norm_loss)(x)
    with mg.forward_ad.decompositions({"aten::native_layer_norm_backward": faulty}):
        torch.testing.assert_close(torch.func.jvp(grad(layer_norm_loss), (x,), (t,))[0], right)
        report = mg.testing.check(layer_norm_loss, sample, modes=("fwd-rev",), checks=(), raise_on_failure=False)
        assert report.outcome("fwd-rev") == "wrong"
    with mg.forward_ad.decompositions("aten::native_layer_norm_backward"):
        mg.testing.check(layer_norm_loss, sample, modes=("fwd-rev",), checks=())


# -- points where a formula has a kink or divides by zero -------------------------------------------------------------


def test_log_sigmoid_at_zero_and_far_out():
    x = torch.tensor([0.0, -0.0, 1e-3, 50.0, -50.0, 800.0, -800.0], dtype=torch.float64)
    s = x.sigmoid()
    expected = [torch.nn.functional.logsigmoid(x), (-x).sigmoid(), -s * (-x).sigmoid()]
    f = torch.nn.functional.logsigmoid
    with mg.forward_ad.decompositions("aten::log_sigmoid_forward", replace=True):
        for order in expected:
            torch.testing.assert_close(f(x), order)
            f = derivative(f)


def derivative(f):
    return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("shape, target", [((3,), 1), ((2, 3), [2, 1]), ((2, 3, 1, 2), [[[0, 2]], [[1, 1]]])], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [True, False])
def test_losses_of_any_dims(shape, target, reduction, weighted):
    x, weight = random(*shape), random(3, seed=1).abs() if weighted else None

    def loss(x):
        f = torch.nn.functional.nll_loss
        return f(x.sin(), torch.tensor(target), weight, ignore_index=1, reduction=reduction).square().sum()

    if torch.tensor(target).ne(1).any() or reduction != "mean":
        with mg.forward_ad.decompositions():
            torch.testing.assert_close(jacfwd(grad(loss))(x), jacrev(jacrev(loss))(x))


def test_a_loss_whose_every_target_is_ignored():
    x, target, total = random(2, 3), torch.tensor([1, 1]), torch.zeros((), dtype=torch.float64)
    g = torch.ones((), dtype=torch.float64)

    def backward(g, x):
        return functions.nll_loss_backward(g, x, target, None, 1, 1, total)

    assert backward(g, x).eq(0).all()
    assert torch.func.jvp(backward, (g, x), (g, x))[1].eq(0).all()
    assert jacrev(lambda g: backward(g, x))(g).eq(0).all()
