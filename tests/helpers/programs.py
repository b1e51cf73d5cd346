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
    return (y / 4).exp()


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


# -- models -----------------------------------------------------------------------------------------------------------


@program((2, 3, 6, 6), (4, 3, 3, 3), (4, 4, 3, 3), (4,), (4,), (3, 4))
def residual_network(x, stem, block, scale, shift, head):
    def normalized(h):
        return F.batch_norm(h, None, None, scale, shift, training=True)

    h = F.relu(normalized(F.conv2d(x, stem, padding=1)))
    h = F.relu(h + normalized(F.conv2d(h, block, padding=1)))
    return F.linear(F.adaptive_avg_pool2d(h, 1).flatten(1), head)


@program((1, 4, 5, 5), (8, 4, 1, 1), (8, 1, 3, 3), (8, 8), (4, 8, 1, 1))
def mobile_network(x, expand, depthwise, excite, project):
    h = F.hardswish(F.conv2d(x, expand))
    h = F.relu6(F.conv2d(h, depthwise, padding=1, stride=2, groups=8))
    h = h * F.hardsigmoid(h.mean((2, 3)) @ excite)[:, :, None, None]
    return F.conv2d(h, project).flatten(1)


@program((2, 3, 4), (12, 4), (4, 4), (8, 4), (4, 8), (4,))
def transformer(x, qkv, out, up, down, scale):
    q, k, v = F.linear(F.layer_norm(x, (4,), scale), qkv).reshape(2, 3, 3, 2, 2).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 3, 4)
    h = x + F.linear(attended, out)
    return h + F.linear(F.gelu(F.linear(F.layer_norm(h, (4,), scale), up)), down)


@program((1, 2, 4, 4), (3, 2, 3, 3), (3, 3, 3, 3), (1, 6, 3, 3))
def u_net(x, first, inner, last):
    skip = F.silu(F.conv2d(x, first, padding=1))
    h = F.silu(F.conv2d(F.max_pool2d(skip, 2), inner, padding=1))
    h = F.interpolate(h, scale_factor=2.0, mode="nearest")
    return F.conv2d(torch.cat([skip, h], 1), last, padding=1)


@program((4, 2), (2, 5), (5, 5), (5, 1))
def deep_sets(x, phi, mixed, rho):
    r = torch.pdist(x)
    features = F.softplus(torch.stack([r, 1 / r], 1) @ phi)
    return (torch.tanh(features.sum(0) @ mixed) @ rho).squeeze()


@program((3, 4), (2, 6), (2, 6), (2, 4))
def coupling_flow(x, scales, shifts, mix):
    fixed, moved = x.chunk(2, 1)
    scale = torch.tanh(fixed @ scales[:, :2])
    moved = moved * scale.exp() + fixed @ shifts[:, :2]
    base = torch.distributions.Normal(torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype))
    return base.log_prob(torch.cat([fixed, moved], 1) @ mix.mT).sum(1) + scale.sum(1)


@program((2, 4), (4, 3), (3, 4), (2, 3))
def autoencoder(x, encoder, decoder, noise):
    mean, spread = (x @ encoder).tanh(), F.softplus(x @ encoder)
    logits = (mean + spread * noise) @ decoder
    divergence = 0.5 * (mean.square() + spread.square() - 1 - 2 * spread.log()).sum()
    return F.binary_cross_entropy_with_logits(logits, x.detach().sigmoid(), reduction="sum") + divergence


@program((3, 2, 4), (12, 4), (12, 3), (12,), (12,))
def lstm_layer(x, w, u, b, c):
    zeros = x.new_zeros(1, 2, 3)
    y, h, state = torch.lstm(x, (zeros, zeros), [w, u, b, c], True, 1, 0.0, False, False, False)
    return y, h, state


# -- one function for each further family of rules ----------------------------------------------------------------------


@program((1, 2, 4, 4), (1, 3, 3, 2))
def sampling(x, grid):
    return F.grid_sample(x, 0.4 * grid.tanh(), align_corners=False)


@program((1, 2, 4, 4))
def patches(x):
    columns = F.unfold(x.sin(), 2, stride=2)
    return F.fold(columns.exp(), (4, 4), 2, stride=2), x.unfold(2, 3, 1).prod(-1)


@program((4, 5), (4, 5))
def losses(x, y):
    return torch.stack(
        [
            F.huber_loss(x, y),
            F.smooth_l1_loss(x, y),
            F.mse_loss(x, y),
            F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
            F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
            F.soft_margin_loss(x, y.detach().sign()),
            F.multi_margin_loss(x, torch.tensor([0, 1, 4, 2])),
            F.cosine_embedding_loss(x, y, torch.tensor([1, -1, 1, 1])),
        ]
    )


@program((2, 4, 3), (3,), (3, 3), (3, 1))
def normalizations(x, scale, v, g):
    h = F.rms_norm(x, (3,), scale, eps=1e-6) @ torch._weight_norm(v, g, 0)
    return F.normalize(F.instance_norm(h), dim=1) + F.local_response_norm(h, 2)


@program((3, 3), (3, 2))
def cholesky(a, b):
    factor = torch.linalg.cholesky(a @ a.mT + torch.eye(3, dtype=a.dtype))
    return torch.linalg.solve_triangular(factor, b, upper=False), torch.cholesky_solve(b, factor)


@program((3, 3), (4, 2))
def matrix_functions(a, tall):
    return torch.linalg.matrix_exp(a / 3), torch.linalg.pinv(tall), torch.linalg.inv(a), torch.linalg.matrix_power(a, 3)


@program((3, 4))
def reductions(x):
    rows = x.var(1) + x.norm(3, 1) + x.amax(1) + x.prod(1) + x.std(1, correction=0) + x.median(1).values
    return rows, x.cumprod(1) + x.logcumsumexp(0) + x.cummax(1).values, torch.renorm(x, 2, 0, 1.0)


@program((3, 4), (3, 4))
def special_functions(x, y):
    p = x.exp()
    found = torch.lgamma(p) + torch.digamma(p) + torch.special.i0e(x) + torch.xlogy(p, p) + torch.erf(x)
    return found + torch.atan2(x, y) + torch.hypot(x, y) + torch.logaddexp(x, y) + torch.special.zeta(p + 2, p)


@program((2, 5), (5, 3))
def shapes(x, y):
    parts = torch.einsum("ij,jk->ki", x, y).roll(1, 0).flip(1)
    columns = torch.stack(x.split([2, 3], 1)[1].unbind(1), 1).repeat(1, 2)
    return parts.tril() + parts.diagonal()[None, :], F.pad(columns, (1, 2), mode="reflect"), torch.kron(x[:, :2], parts)


@program((6, 3), (2, 3))
def bags(table, weight):
    found = F.embedding_bag(torch.tensor([[0, 2, 5], [1, 1, 4]]), table, mode="sum", per_sample_weights=weight)
    return found.exp(), table.index_copy(0, torch.tensor([1, 3]), weight).masked_fill(table > 1, 0).take_along_dim(
        table.argsort(0), 0
    )
