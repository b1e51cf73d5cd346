"""Normalizations of half precision with parameters in float32, as autocast calls them."""

import pytest
import torch
from torch import nn

import torch_manualgrad as mg
from torch_manualgrad.compiling import graphs, mixed_precision
from torch_manualgrad.core.rule import reached

F32 = torch.float32
NORMS = {
    "layer norm": lambda: nn.LayerNorm(6),
    "layer norm without parameters": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6), nn.Flatten()),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "batch norm in evaluation": lambda: nn.BatchNorm1d(6).eval(),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
    "rms norm": lambda: nn.RMSNorm(6),
}


def derivatives(name, dtype, wrap=lambda net: net):
    """The value, the gradient and its derivative in the input and each parameter; the buffers after the step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), NORMS[name](), nn.Linear(6, 1))
    x = torch.randn(5, 4)
    net, x = (net.double(), x.double()) if dtype is torch.float64 else (net, x)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float64):
        value = wrap(net)(x.requires_grad_())
    wide = value if dtype is torch.float64 else value.float()
    (gradient,) = torch.autograd.grad(wide.square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    slopes = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()}
    return {"value": value, "gradient": gradient, "second": x.grad, **slopes, **dict(net.named_buffers())}


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_derivatives_under_autocast(name, dtype, lowering):
    if dtype is torch.float16 and name == "rms norm" and not reached("2.11"):
        pytest.skip("PyTorch has no kernel")
    torch.compiler.reset()
    with mg.override():
        truth, eager = derivatives(name, torch.float64), derivatives(name, dtype)
        found = derivatives(name, dtype, lambda net: mg.compile(net, fullgraph=True, lowering=lowering))
    assert found.keys() == eager.keys()
    eps = torch.finfo(dtype).eps
    for key, x in found.items():
        exact = truth[key].double()
        error, of_eager = ((y.double() - exact).abs().max() for y in (x, eager[key]))
        assert x.dtype == eager[key].dtype and error <= 2 * of_eager + 4 * eps * exact.abs().max() + 1e-6, key


def traced(op, arguments):
    """The dtypes of the results of an operator in a graph, and those of its fake tensors."""
    mode = torch._subclasses.FakeTensorMode()
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]

    def function(*given):
        rest = iter(given)
        found = op(*[next(rest) if isinstance(x, torch.Tensor) else x for x in arguments])
        return [x for x in found if x is not None]

    graph = graphs.trace(function, [mode.from_tensor(x) for x in tensors], mode, keeps_writes=True)
    fakes = [n.meta["val"].dtype for n in graphs.outputs_of(graph)]
    return [x.dtype for x in graph(*tensors)], fakes, [x.dtype for x in function(*tensors)]


@pytest.mark.parametrize("op", mixed_precision.in_float32, ids=str)
def test_a_graph_has_the_dtypes_of_the_operators(op):
    x, channels = torch.randn(4, 6, 5, dtype=torch.bfloat16), [torch.ones(6) for _ in range(4)]
    statistics = [torch.ones(4, 3) for _ in range(2)]
    name = str(op).partition(".")[2]
    arguments = {
        "native_layer_norm.default": [x, [5], torch.ones(5), torch.ones(5), 1e-5],
        "native_group_norm.default": [x, *channels[:2], 4, 6, 5, 3, 1e-5],
        "native_group_norm_backward.default": [x, x, *statistics, channels[0], 4, 6, 5, 3, [True] * 3],
        "_native_batch_norm_legit_no_training.default": [x, *channels, 0.1, 1e-5],
        "_native_batch_norm_legit.no_stats": [x, *channels[:2], True, 0.1, 1e-5],
        "_batch_norm_with_update.default": [x, *channels, 0.1, 1e-5],
        "_batch_norm_with_update_functional.default": [x, *channels, 0.1, 1e-5],
    }.get(name, [x, *channels, True, 0.1, 1e-5])
    real, fake, outside = traced(op, arguments)
    assert real == fake == outside
