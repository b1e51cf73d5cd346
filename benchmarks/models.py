"""Training steps of whole models, of first and second order: what an override costs where PyTorch's derivatives serve."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import main, measure, summary
from torch import Tensor, nn

import torch_manualgrad as mg

COLUMNS = ["model", "size", "stock", "ours", "ours, *", "ours, strong_zero"]


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a layer normalization and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization and a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class Recurrent(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(width, 2 * width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class UNet(nn.Module):
    """One level down and up again, with group normalization and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(4, channels, 3, padding=1), nn.GroupNorm(4, channels)
        self.down, self.norm2 = nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GroupNorm(4, 2 * channels)
        self.up, self.last = nn.Conv2d(3 * channels, channels, 3, padding=1), nn.Conv2d(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.silu(self.norm1(self.first(x)))
        coarse = F.interpolate(F.silu(self.norm2(self.down(fine))), scale_factor=2)
        return self.last(F.silu(self.up(torch.cat([fine, coarse], 1))))


class GraphNetwork(nn.Module):
    """Messages along edges, their sum and their largest at each node, and a smooth maximum over nodes."""

    def __init__(self, nodes: int, edges: int, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, 2 * width),
            nn.Linear(2 * width, 1),
        )
        self.register_buffer("source", torch.randint(nodes, (edges,)))
        self.register_buffer("target", torch.randint(nodes, (edges,)))

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.first(x))
        messages, none = h[self.source], torch.zeros_like(h)
        total = none.index_add(0, self.target, messages)
        at = self.target[:, None].expand_as(messages)
        largest = none.scatter_reduce(0, at, messages, "amax", include_self=False)
        return torch.logsumexp(self.last(F.leaky_relu(self.second(total + largest))), 0)


class Autoencoder(nn.Module):
    """A variational autoencoder, from its input to its loss: a reparametrized sample, and a divergence."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encoder, self.mean, self.scale = (
            nn.Linear(width, width),
            nn.Linear(width, latent),
            nn.Linear(width, latent),
        )
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x).relu()
        posterior = torch.distributions.Normal(self.mean(h), F.softplus(self.scale(h)))
        prior = torch.distributions.Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale))
        divergence = torch.distributions.kl_divergence(posterior, prior).mean()
        return F.binary_cross_entropy_with_logits(self.decoder(posterior.rsample()), x.sigmoid()) + divergence


class Whitening(nn.Module):
    """A covariance of learned features: its eigenvalues, determinant and Cholesky factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        covariance = y.mT @ y / len(y) + 0.1 * torch.eye(y.shape[1], device=y.device)
        values, vectors = torch.linalg.eigh(covariance)
        factor = torch.linalg.cholesky(covariance)
        return values.log().sum() + torch.linalg.slogdet(covariance)[1] + factor.diagonal().sum() + (vectors**3).sum()


def critic(width: int) -> nn.Sequential:
    layers = [[nn.Linear(n, width), nn.LayerNorm(width), nn.SiLU()] for n in (width // 2, width)]
    return nn.Sequential(*layers[0], *layers[1], nn.Linear(width, 1))


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward, backward and an update of all parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


def gradient_penalty(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """The step of a critic whose slope is to be 1: a loss of its gradient in the input."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> None:
        optimizer.zero_grad()
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(y).sum(), y, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()

    return run


def hessian_vector_product(model: nn.Module, x: Tensor) -> Callable[[], None]:
    parameters = list(model.parameters())
    direction = [torch.randn_like(p) for p in parameters]

    def run() -> None:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # of which PyTorch has a second derivative
            slopes = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
            torch.autograd.grad(slopes, parameters, direction)

    return run


def maml(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A loss after one step of gradient descent, differentiated through the step."""
    target = torch.randn(len(x), 1, device=x.device)

    def run() -> None:
        parameters = dict(model.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(model, parameters, (x,)), target)
        slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        stepped = {name: p - 0.1 * slope for (name, p), slope in zip(parameters.items(), slopes)}
        F.mse_loss(torch.func.functional_call(model, stepped, (x,)), target).backward()

    return run


Make = Callable[[], tuple[nn.Module, Tensor]]
MODELS: dict[tuple[str, str], tuple[Callable[[nn.Module, Tensor], Callable[[], None]], Make]] = {
    ("transformer", "width 64, 4 x 16 tokens"): (
        training_step,
        lambda: (TransformerBlock(64, 4), torch.randn(4, 16, 64)),
    ),
    ("transformer", "width 256, 4 x 128 tokens"): (
        training_step,
        lambda: (TransformerBlock(256, 8), torch.randn(4, 128, 256)),
    ),
    ("ResNet", "16 channels, 4 x 16 x 16"): (
        training_step,
        lambda: (ResidualBlock(16), torch.randn(4, 16, 16, 16)),
    ),
    ("ResNet", "64 channels, 8 x 32 x 32"): (
        training_step,
        lambda: (ResidualBlock(64), torch.randn(8, 64, 32, 32)),
    ),
    ("LSTM", "2 layers, width 32, 12 x 4 steps"): (training_step, lambda: (Recurrent(16), torch.randn(12, 4, 16))),
    ("U-Net", "16 channels, 2 x 16 x 16"): (training_step, lambda: (UNet(16), torch.randn(2, 4, 16, 16))),
    ("graph network", "40 nodes, 160 edges"): (
        training_step,
        lambda: (GraphNetwork(40, 160, 16), torch.randn(40, 16)),
    ),
    ("autoencoder", "width 32, 16 rows"): (training_step, lambda: (Autoencoder(32, 8), torch.randn(16, 32))),
    ("whitening", "16 features, 64 rows"): (training_step, lambda: (Whitening(16), torch.randn(64, 16))),
    ("gradient penalty", "width 64, 64 rows"): (gradient_penalty, lambda: (critic(64), torch.randn(64, 32))),
    ("Hessian-vector product", "transformer, width 64, 2 x 8 tokens"): (
        hessian_vector_product,
        lambda: (TransformerBlock(64, 4), torch.randn(2, 8, 64)),
    ),
    ("MAML", "3 layers, 20 rows"): (
        maml,
        lambda: (
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)),
            torch.randn(20, 16),
        ),
    ),
}


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = []
    for (model, size), (step, make) in MODELS.items():
        network, x = make()
        run = step(network.to(arguments.device), x.to(arguments.device))
        inside = {
            "ours": mg.override(),
            "ours, *": mg.override("*"),
            "ours, strong_zero": mg.override(strong_zero=True),
        }
        for context in inside.values():
            with context:
                for _ in range(6):  # the first steps record the backwards
                    run()
        times = measure({"stock": run} | dict.fromkeys(inside, run), arguments.seconds, inside)
        found.append({"model": model, "size": size, **summary(times, "stock")})
    return found


if __name__ == "__main__":
    about = "Training steps: forward, backward and update, or a second derivative"
    main("models", about, rows, COLUMNS, threads=[1], seconds=6)
