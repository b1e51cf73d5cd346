"""Training steps of programs with second derivatives, compiled: backend "manualgrad" next to no compilation and to PyTorch's compiler.

With this package the model is compiled, and its gradients are taken outside; or the whole loss, which calls
torch.autograd.grad. PyTorch's compiler has no second derivative. Its contender is the same program restructured by hand: the
first derivative is computed by torch.func.grad. First-order programs are compiled as they are. JAX computes the same gradients
in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import ResidualBlock, TransformerBlock
from side_by_side import main, measure, summary
from torch import Tensor, nn
from torch.func import functional_call

import torch_manualgrad as mg

COLUMNS = ["program", "size", "eager", "restructured", "jax", "model", "loss"]
Step = Callable[[], object]


class Potential(nn.Module):
    """Messages between all pairs of atoms, filtered by functions of their distance."""

    def __init__(self, atoms: int, width: int) -> None:
        super().__init__()
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(8, width), nn.SiLU()) for _ in range(2))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2))
        self.start, self.energy = nn.Parameter(torch.ones(width)), nn.Linear(width, 1)
        self.register_buffer("centers", torch.linspace(0.5, 3, 8))
        self.register_buffer("others", 1 - torch.eye(atoms))

    def forward(self, x: Tensor) -> Tensor:
        others = self.others
        r = ((x[:, None] - x).pow(2).sum(-1) + 1 - others).sqrt()
        features = torch.exp(-2 * (r[..., None] - self.centers) ** 2) * others[..., None]
        atoms = self.start.expand(len(x), -1)
        for f, update in zip(self.filters, self.updates):
            atoms = atoms + update((f(features) * atoms * others[..., None]).sum(1))
        return self.energy(atoms).sum()


def gradient_of(call: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = call(x)
    (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return value, gradient


def training(model: nn.Module, value_of: Callable[[], Tensor]) -> Step:
    """The gradients of a loss."""

    def run() -> None:
        model.zero_grad()
        value_of().backward()

    return run


def pulled_inside(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The loss of values and gradients, restructured so that PyTorch's compiler sees one function."""

    def inside(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        def total(x: Tensor) -> tuple[Tensor, Tensor]:
            value = functional_call(model, parameters, (x,))
            return value.sum(), value

        gradient, (_, value) = torch.func.grad_and_value(total, has_aux=True)(x)
        return loss(value, gradient)

    compiled = torch.compile(inside, dynamic=False)
    return lambda x: compiled(dict(model.named_parameters()), x)


def second_order(model: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Step]:
    compiled, restructured = mg.compile(model, dynamic=False), pulled_inside(model, loss)
    whole = mg.compile(lambda x: loss(*gradient_of(model, x)), dynamic=False, fullgraph=True)

    return {
        "eager": training(model, lambda: loss(*gradient_of(model, x))),
        "restructured": training(model, lambda: restructured(x)),
        "model": training(model, lambda: loss(*gradient_of(compiled, x))),
        "loss": training(model, lambda: whole(x)),
    }


class Recurrent(nn.LSTM):
    """The outputs of an LSTM."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def first_order(model: nn.Module, x: Tensor) -> dict[str, Step]:
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": model,
        "restructured": torch.compile(model, dynamic=False),
        "model": mg.compile(model, dynamic=False),
    }
    return {name: training(model, lambda call=call: call(x).pow(2).mean()) for name, call in calls.items()}  # type: ignore[misc]


def potential() -> dict[str, Step]:
    x = torch.cartesian_prod(torch.arange(3.0), torch.arange(4.0), torch.arange(2.0))
    return second_order(Potential(24, 64), x + 0.1 * torch.randn(24, 3), lambda e, g: g.pow(2).mean() + 0.01 * e)


def critic() -> dict[str, Step]:
    net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    penalty = lambda v, g: (g.norm(dim=1) - 1).pow(2).mean() - v.mean()  # noqa: E731
    return second_order(net, torch.randn(64, 32), penalty)


def solution() -> tuple[nn.Module, Tensor]:
    """Of Poisson's equation in two dimensions, and points."""
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return net, torch.rand(256, 2)


def laplacian() -> dict[str, Step]:
    """By two nested gradients."""
    net, x = solution()

    def residual(call: Callable[..., Tensor], x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        second = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        return (second[0] + second[1] + 1).pow(2).mean()

    def inside(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        def u(x: Tensor) -> Tensor:
            return functional_call(net, parameters, (x,)).sum()

        first = torch.func.grad(u)
        second = [torch.func.grad(lambda x, i=i: first(x)[:, i].sum())(x)[:, i] for i in range(2)]
        return (second[0] + second[1] + 1).pow(2).mean()

    ours, compiled = mg.compile(net, dynamic=False), torch.compile(inside, dynamic=False)
    whole = mg.compile(lambda x: residual(net, x), dynamic=False, fullgraph=True)

    return {
        "eager": training(net, lambda: residual(net, x)),
        "restructured": training(net, lambda: compiled(dict(net.named_parameters()), x)),
        "model": training(net, lambda: residual(ours, x)),
        "loss": training(net, lambda: whole(x)),
    }


def laplacian_by_series() -> dict[str, Step]:
    """By Taylor series."""
    net, x = solution()

    def residual() -> Tensor:
        return (mg.forward_ad.laplacian(net, batch_dims=1)(x) + 1).pow(2).mean()

    whole = mg.compile(residual, dynamic=False, fullgraph=True)

    return {"eager": training(net, residual), "loss": training(net, whole)}


def hessian_vector() -> dict[str, Step]:
    """The product of a Hessian and a vector, of two transformer blocks and their parameters."""
    model = nn.Sequential(TransformerBlock(64, 4), TransformerBlock(64, 4))
    x, names = torch.randn(4, 16, 64), [n for n, _ in model.named_parameters()]
    parameters = list(model.parameters())
    vectors = [torch.randn_like(p) for p in parameters]

    def product(call: Callable[[Tensor], Tensor]) -> object:
        gradients = torch.autograd.grad(call(x).pow(2).mean(), parameters, create_graph=True)
        return torch.autograd.grad(gradients, parameters, vectors)

    def inside(values: list[Tensor], vectors: list[Tensor]) -> object:
        def loss(*values: Tensor) -> Tensor:
            return functional_call(model, dict(zip(names, values)), (x,)).pow(2).mean()

        _, pull = torch.func.vjp(lambda *v: torch.func.grad(loss, tuple(range(len(v))))(*v), *values)
        return pull(tuple(vectors))

    ours, compiled = mg.compile(model, dynamic=False), torch.compile(inside, dynamic=False)
    whole = mg.compile(lambda: product(model), dynamic=False, fullgraph=True)

    def with_rules(call: Callable[[], object]) -> object:  # PyTorch has no second derivative of its attention
        with mg.override():
            return call()

    return {
        "eager": lambda: with_rules(lambda: product(model)),
        "restructured": lambda: compiled([p.detach() for p in parameters], vectors),
        "model": lambda: product(ours),
        "loss": lambda: with_rules(whole),
    }


PROGRAMS: dict[tuple[str, str], Callable[[], dict[str, Step]]] = {
    ("energy and forces", "24 atoms"): potential,
    ("gradient penalty", "64 x 32"): critic,
    ("Laplacian", "256 points"): laplacian,
    ("Laplacian by series", "256 points"): laplacian_by_series,
    ("Hessian-vector product", "2 transformer blocks"): hessian_vector,
    ("first order", "transformer, width 64"): lambda: first_order(TransformerBlock(64, 4), torch.randn(4, 16, 64)),
    ("first order", "ResNet, 16 channels"): lambda: first_order(ResidualBlock(16), torch.randn(4, 16, 16, 16)),
    ("first order", "LSTM, 2 layers, width 32"): lambda: first_order(Recurrent(16, 32, 2), torch.randn(12, 4, 16)),
}


def jax_seconds(program: str, seconds: float) -> list[float]:
    """Of JAX's gradients of the same program; empty where it has none, or cannot be had."""
    command = [sys.executable, str(Path(__file__).parent / "contenders/jax_compiled.py"), program, str(seconds)]
    try:
        found = subprocess.run(command, capture_output=True, timeout=60 + seconds, check=True).stdout
        return json.loads(found)
    except (subprocess.SubprocessError, ValueError):
        return []


def rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for (program, size), make in PROGRAMS.items():
        torch.manual_seed(0)
        torch.compiler.reset()
        steps = make()
        for name in list(steps):
            try:
                for _ in range(4):  # compile every order
                    steps[name]()
            except Exception as error:
                print(f"{program}: {name} raises {type(error).__name__}: {str(error).splitlines()[0]}")
                del steps[name]
        times = measure(steps, given.seconds)
        row = {"program": program, "size": size, **summary(times, "eager")}
        if given.jax and (seconds := jax_seconds(program, given.seconds / 4)):
            eager = [statistics.median(times["eager"])] * len(seconds)  # not measured in turn with JAX
            row |= summary({"eager": eager, "jax": seconds}, "eager") | {"eager": row["eager"]}
        found.append(row)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-jax", dest="jax", action="store_false", help="which is left out too if it is not installed"
    )


if __name__ == "__main__":
    main("compiled", "Training steps of compiled programs", rows, COLUMNS, threads=[1], options=options, seconds=6)
