"""Programs that are compiled and differentiated: each is a function of some tensors, and the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def program(*shapes: tuple[int, ...]) -> Callable[..., Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = function, tuple(draw(*s, seed=i) for i, s in enumerate(shapes))
        return function

    return register


@program((5, 3), (4, 3), (4,))
def mlp(x, w, b):
    return torch.tanh(F.linear(x, w, b)).pow(2).sum(1)


@program((2, 3, 6), (6,), (6,))
def layer_norm(x, w, b):
    return F.gelu(F.layer_norm(x, (6,), w, b))


@program((2, 4, 6), (2, 4, 6), (2, 4, 6))
def attention(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


@program((2, 4, 6), (2, 4, 6), (2, 4, 6))
def fused_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@program((2, 3, 6, 6), (4, 3, 3, 3), (4,))
def convolution(x, w, b):
    return F.silu(F.conv2d(x, w, b, padding=1)).mean((2, 3))


@program((2, 4, 3, 3), (4,), (4,))
def batch_norm(x, w, b):
    mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    return F.batch_norm(x, mean, var, w, b, training=True), mean, var


@program((2, 4, 3, 3), (4,), (4,))
def group_norm(x, w, b):
    return F.group_norm(x, 2, w, b).relu()


@program((2, 4, 6, 6))
def pooling(x):
    return F.avg_pool2d(x, 2).sin() + F.max_pool2d(x, 2), F.interpolate(x, scale_factor=2.0, mode="bilinear").pow(2)


@program((4, 4), (4, 3))
def solve(a, b):
    return torch.linalg.solve(a, b)


@program((4, 4))
def singular_values(a):
    return torch.linalg.svdvals(a)


@program((4, 4))
def eigenvalues(a):
    return torch.linalg.eigh(a + a.mT).eigenvalues.exp()


@program((4, 4))
def log_determinant(a):
    return torch.linalg.slogdet(a @ a.mT + torch.eye(4, dtype=a.dtype)).logabsdet


@program((3, 4))
def detached(x):
    return x.sin() * x.detach().exp()


@program((3, 4))
def partly_untracked(x):
    with torch.no_grad():
        y = x.cos()
    return x.sin() * y


@program((3, 4))
def in_place(x):
    y = x * 2
    y.mul_(x)
    y[0].add_(1)
    y[:, 1] = x[:, 2].sin()
    return y.exp()


@program((3, 4), (3, 4))
def equal_gradients(x, y):
    return (x + y).sin()


@program((5, 3), (4, 3), (4,))
def two_outputs(x, w, b):
    y = torch.tanh(F.linear(x, w, b))
    return y.sum(), y.pow(3)


@program((4, 5))
def views(x):
    y = x.sin()
    return y, y.t(), x.t(), x, x.unfold(1, 2, 1).sum(-1).sin()


@program((6, 2))
def distances(x):
    return torch.cdist(x, x.flip(0) + 0.1).sin().sum(0) + x.norm(dim=1)


@program((3, 6, 4), (12, 4), (12, 4))
def gru(x, w, u):
    h = x.new_zeros(6, 4)
    for step in x:
        h = torch.gru_cell(step, h, w, u)
    return h


@program((3, 6, 4), (16, 4), (16, 4))
def lstm(x, w, u):
    h, c = x.new_zeros(6, 4), x.new_zeros(6, 4)
    for step in x:
        h, c = torch.lstm_cell(step, (h, c), w, u)
    return h, c


@program((4, 6))
def log_softmax(x):
    return torch.logsumexp(x, 1) * torch.log_softmax(x, 1).sum(1), F.cross_entropy(x, torch.tensor([0, 3, 5, 1]))


@program((4, 6), (4, 6))
def integers(x, y):
    return x * y, (x > y), x.argmax(1), x.sort(1).values.cumsum(1)


@program((7, 3))
def graph_network(x):
    to = torch.tensor([0, 1, 1, 2, 0, 2, 1])
    sums = x.new_zeros(3, 3).index_add(0, to, x)
    return F.leaky_relu(sums - x[to[:3]]).tanh() + x.new_zeros(3, 3).scatter_reduce(
        0, to[:, None].expand(7, 3), x, "amax", include_self=False
    )


@program((5, 3))
def potential(x):
    pairs = torch.triu_indices(5, 5, 1)
    r = (x[pairs[0]] - x[pairs[1]]).pow(2).sum(1).sqrt()
    return (1 / r**3 - torch.exp(-r)).sum()


@program((4, 3), (3, 3), (3, 3))
def flow(x, a, b):
    scale = torch.tanh(x @ a)
    return x * scale.exp() + x @ b, scale.sum(1)


@program((4, 3), (4, 3))
def variational(mean, scale):
    noise = torch.linspace(-1, 1, 12, dtype=mean.dtype).reshape(4, 3)
    sample = mean + F.softplus(scale) * noise
    other = torch.distributions.Normal(mean, F.softplus(scale))
    return other.log_prob(sample).sum() - torch.distributions.Normal(0.0, 1.0).log_prob(sample).sum(), other.entropy()


@program((4, 3))
def complex_numbers(x):
    z = torch.complex(x, x.flip(0))
    return (torch.fft.fft(z).abs() + z.angle()).sum(1)


@program((2, 5), (10, 4))
def embedding(x, table):
    return F.embedding(torch.tensor([[1, 2], [9, 1]]), table).sum(-1) @ x


@program((3, 4))
def gradient_inside(x):
    return torch.func.grad(lambda z: (z.sin() * z).sum())(x) * x


@program((3, 4))
def piecewise(x):
    return torch.where(x > 0, x.exp(), x.clamp(-1, 0)) + F.hardswish(x) + x.abs() + torch.maximum(x, x.flip(1))


@program((4, 4))
def factors(a):
    p, low, up = torch.linalg.lu(a)
    u, s, vh = torch.linalg.svd(a)
    q, r = torch.linalg.qr(a)
    return low, up, u.abs(), s, vh.abs(), q.pow(2), r.pow(2)
