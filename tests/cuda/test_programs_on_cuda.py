"""Programs on CUDA under override(), compiled and in forward mode give the results of stock or of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import modes
from helpers.devices import attempt, distance, to_cuda
from helpers.programs import PROGRAMS
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_manualgrad as mg
from torch_manualgrad.checkpointing import offload, save_products
from torch_manualgrad.core.internals import pytree

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

F64 = torch.float64
INDUCTOR = ("mlp", "layer_norm", "attention", "convolution", "batch_norm", "potential")


def on_cuda(function, inputs):
    """The program with its inputs on CUDA; None where it makes tensors of its own on the CPU."""
    inputs = tuple(map(to_cuda, inputs))
    try:
        function(*inputs)
    except RuntimeError as error:
        if "same device" in str(error) or "not implemented" in str(error) or "expected device" in str(error).lower():
            return None
        raise
    return inputs


def same(found, expected):
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = float(b.detach().abs().nan_to_num(0, 0, 0).max()) if b.numel() and b.dtype != torch.bool else 0.0
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-6, atol=1e-6 * scale, equal_nan=True)


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, which):
    function, inputs = PROGRAMS[name]
    moved = on_cuda(function, inputs)
    if moved is None:
        pytest.skip("makes tensors on the CPU")
    # Where a kernel of PyTorch's has constants of single precision, derivatives differ as far as they would if the inputs
    # were changed until the values differ as much.
    values = distance(*(pytree.tree_leaves(function(*given)) for given in (moved, inputs)))
    torch.manual_seed(0)
    nudges = [
        tuple(x + 1e-9 * torch.randn_like(x) * x if x.is_floating_point() else x for x in inputs) for _ in range(8)
    ]
    units = [distance(*(pytree.tree_leaves(function(*given)) for given in (nudged, inputs))) for nudged in nudges]
    for mode in modes.MODES:
        with mg.override(*which):
            expected, refused = attempt(lambda mode=mode: modes.derivatives(function, inputs, mode))
            if refused is not None:
                continue
            found, error = attempt(lambda mode=mode: modes.derivatives(function, moved, mode))
        if error is not None:  # an operator that PyTorch itself refuses there
            _, refused = attempt(lambda mode=mode: modes.derivatives(function, moved, mode))
            assert refused is not None, f"{mode}: {error!r}"
            continue
        tolerance = 1e-6
        if values > 1e-12:
            with mg.override(*which):
                moves = [distance(modes.derivatives(function, nudged, mode), expected) for nudged in nudges]
            tolerance = max(tolerance, 10 * values * max(move / unit for move, unit in zip(moves, units)))
            assert tolerance < 1e-2 or len(mode) == 9, mode
        assert [x.shape for x in found] == [x.shape for x in expected], mode
        assert distance(found, expected) <= tolerance, mode


@pytest.mark.parametrize(
    "name, lowering", [*((n, "eager") for n in PROGRAMS), *((n, "inductor") for n in INDUCTOR)], ids=str
)
def test_compiled_programs(name, lowering):
    function, inputs = PROGRAMS[name]
    moved = on_cuda(function, inputs)
    if moved is None:
        pytest.skip("makes tensors on the CPU")
    torch.compiler.reset()
    stock, _ = attempt(lambda: torch.compile(function, backend="aot_eager", fullgraph=True)(*moved))
    if [x.shape for x in stock] != [x.shape for x in pytree.tree_leaves(function(*moved))]:
        pytest.skip("torch.compile fails, or its results have other shapes")
    torch.compiler.reset()
    with mg.override():
        compiled = mg.compile(function, dynamic=False, fullgraph=True, lowering=lowering)
        for mode in ("", "rev", "fwd", "revrev"):
            same(modes.derivatives(compiled, moved, mode), modes.derivatives(function, moved, mode))


def sequence():
    return torch.randn(5, 3, 8)


MODELS = {
    "lstm": lambda: (nn.LSTM(8, 16, 2, bidirectional=True), sequence()),
    "lstm of projections": lambda: (nn.LSTM(8, 16, proj_size=4), sequence()),
    "gru": lambda: (nn.GRU(8, 16, 2), sequence()),
    "rnn": lambda: (nn.RNN(8, 16), sequence()),
    "lstm cell": lambda: (nn.LSTMCell(8, 16), torch.randn(3, 8)),
    "gru cell": lambda: (nn.GRUCell(8, 16), torch.randn(3, 8)),
    "batch norm": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(4, 3, 9, 9)),
    "batch norm, channels last": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 9, 9).to(memory_format=torch.channels_last),
    ),
    "transposed convolution": lambda: (nn.ConvTranspose2d(3, 4, 3, stride=2), torch.randn(2, 3, 5, 5)),
    "group norm": lambda: (nn.GroupNorm(2, 8), torch.randn(4, 8, 5, 5)),
    "instance norm": lambda: (nn.InstanceNorm2d(8, affine=True), torch.randn(4, 8, 5, 5)),
    "rms norm": lambda: (nn.RMSNorm(8), sequence()),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0), sequence()),
    "embedding bag": lambda: (nn.EmbeddingBag(10, 8), torch.randint(0, 10, (4, 5))),
    "embedding": lambda: (nn.Embedding(10, 8, padding_idx=1), torch.randint(0, 10, (4, 5))),
    "pooling": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)),
        torch.randn(2, 3, 11, 11),
    ),
    "upsampling": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        torch.randn(2, 3, 7, 7),
    ),
    "prelu": lambda: (nn.Sequential(nn.Linear(8, 8), nn.PReLU(8)), torch.randn(5, 8)),
    "bilinear": lambda: (_Bilinear(), torch.randn(5, 8)),
}


class _Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(8, 8, 4)

    def forward(self, x):
        return self.inner(x, x.sin())


def train(model, x, steps=5):
    """The losses, and the parameters and buffers after training."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        made = [o for o in pytree.tree_leaves(model(x)) if isinstance(o, torch.Tensor)]
        loss = sum(o.float().square().mean() for o in made)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(model.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("which", ["plain", "*", "strong zeros", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name, which, dtype):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model, x = model.cuda().to(dtype), x.cuda() if not x.is_floating_point() else x.cuda().to(dtype)
    options = {"plain": {}, "*": {}, "strong zeros": {"strong_zero": True}, "autocast": {}}[which]
    exact = torch.backends.cudnn.flags(allow_tf32=False)
    with exact, torch.autocast("cuda", torch.bfloat16, which == "autocast"):
        stock = train(model, x)
        with mg.override(*(("*",) if which in ("*", "autocast") else ()), **options):
            ours = train(model, x)
    tolerance = 2e-2 if which == "autocast" else 1e-4 if dtype == torch.float32 else 1e-10
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(stock), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
def test_attention(backend, causal, which):
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return y, *torch.autograd.grad(y.float().sin().sum(), (q, k, v))

    stock = run(q, k, v)
    with mg.override(*which):
        ours = run(q, k, v)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*wide, is_causal=causal)
    exact = y, *torch.autograd.grad(y.sin().sum(), wide)
    for a, b, c in zip(ours, stock, exact):
        assert (a - c).abs().max() <= 1.5 * (b - c).abs().max() + 1e-3


def penalty(q, k, v, **options):
    y = F.scaled_dot_product_attention(q, k, v, **options)
    return sum(g.square().sum() for g in torch.autograd.grad(y.sin().sum(), (q, k, v), create_graph=True))


BACKENDS = {"EFFICIENT_ATTENTION": torch.float32, "FLASH_ATTENTION": torch.bfloat16, "CUDNN_ATTENTION": torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_second_order_and_tangents_of_attention(backend, which, options):
    """PyTorch has neither for fused attention on CUDA."""
    dtype = BACKENDS[backend]
    q, k, v = (torch.randn(2, 2, 100, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]

    def attend(*inputs):
        return F.scaled_dot_product_attention(*inputs, **options)

    with mg.override(*which), sdpa_kernel(getattr(SDPBackend, backend)):
        found = [
            *torch.autograd.grad(penalty(q, k, v, **options), (q, k, v)),
            *torch.func.jvp(attend, (q, k, v), (v, q, k)),
        ]
    with sdpa_kernel(SDPBackend.MATH):
        a, b, c = wide
        expected = [
            *torch.autograd.grad(penalty(*wide, **options), wide),
            *torch.func.jvp(attend, (a, b, c), (c, a, b)),
        ]
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip(found, expected):
        assert (a - b).norm() <= tolerance * b.norm()


def test_second_order_of_attention_with_a_mask():
    q, k, v = (torch.randn(2, 2, 16, 8, device="cuda", requires_grad=True) for _ in range(3))
    mask = torch.randn(2, 2, 16, 16, device="cuda", requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    with mg.override(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        found = torch.autograd.grad(penalty(q, k, v, attn_mask=mask), (q, k, v, mask))
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.autograd.grad(penalty(*wide[:3], attn_mask=wide[3]), wide)
    for a, b in zip(found, expected):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_second_order_of_recurrent_layers(layer, which):
    """A gradient penalty through a recurrent layer. cuDNN's operator has no second derivative."""
    torch.manual_seed(0)
    model, x = layer(3, 4).double(), torch.randn(4, 2, 3, dtype=F64)
    on_device = copy.deepcopy(model).to("cuda"), x.cuda()

    def gradients(model, x):
        x = x.detach().requires_grad_()
        g = torch.autograd.grad(model(x)[0].sin().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(g.square().sum(), list(model.parameters()))

    expected = gradients(model, x)
    with mg.override(*which):
        same(gradients(*on_device), expected)
        with torch.backends.cudnn.flags(enabled=False):
            same(gradients(*on_device), expected)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_gradients_of_recurrent_layers_in_evaluation(layer):
    """cuDNN has no backward in evaluation mode."""
    torch.manual_seed(0)
    model, x = layer(3, 4).double().eval(), torch.randn(4, 2, 3, dtype=F64)

    def gradient(model, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x)[0].sin().sum(), x)

    with mg.override():
        same(gradient(copy.deepcopy(model).to("cuda"), x.cuda()), gradient(model, x))


def test_forward_ad():
    def f(x):
        return (torch.tanh(x @ x.mT).logsumexp(-1) * torch.linalg.det(x)).sum()

    x = torch.randn(4, 4, dtype=F64)
    c = x.cuda()
    same(mg.forward_ad.laplacian(f)(c), mg.forward_ad.laplacian(f)(x))
    same(torch.func.hessian(f)(c), torch.func.hessian(f)(x))
    with mg.forward_ad.enable():
        same(torch.func.jvp(f, (c,), (c,)), torch.func.jvp(f, (x,), (x,)))
    with mg.override("*"):
        same(
            torch.func.jacfwd(torch.func.jacfwd(torch.func.jacrev(f)))(c),
            torch.func.jacfwd(torch.func.jacfwd(torch.func.jacrev(f)))(x),
        )


def test_a_custom_operator():
    wave = mg.custom_op("mgtest_cuda::wave(Tensor x, *, float scale=1.0) -> Tensor")(
        lambda x, *, scale=1.0: torch.sin(scale * x)
    )

    @wave.impl_save_for_backward
    def _(inputs, output):
        return inputs.x, inputs.scale

    @wave.impl_backward
    def _(ctx, saved, grad):
        x, scale = saved
        return {"x": grad * scale * torch.cos(scale * x)}

    x = torch.randn(5, 3, dtype=F64, device="cuda")
    mg.testing.check(wave, [mg.Sample(x), mg.Sample(x.mT, scale=2.0)])
    same(torch.func.hessian(lambda x: wave(x).sum())(x[0]), torch.diag(-torch.sin(x[0])))


def test_one_compiled_graph_for_all_sizes():
    net = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 2)).double().cuda()
    compiled = mg.compile(net, dynamic=True, fullgraph=True)
    for n in (11, 7, 13):
        x = torch.randn(n, 3, dtype=F64, device="cuda", requires_grad=True)
        with mg.override():
            found, expected = (modes.derivatives(call, (x,), "revrev") for call in (compiled, net))
        same(found, expected)


def test_offloaded_results_are_on_the_host():
    x, w = (torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = mg.checkpoint(lambda x: torch.tanh(x @ w) @ w, offload(save_products))(x)
    assert sum(x.is_pinned() for x in saved) == 2
    found = torch.autograd.grad(out.sum(), (x, w))
    assert all(map(torch.equal, found, torch.autograd.grad((torch.tanh(x @ w) @ w).sum(), (x, w))))
