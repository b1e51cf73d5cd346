"""Transforms of torch.func of a small network, with PyTorch's derivatives and with those of rules."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import main, measure, summary
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torch_manualgrad as mg

COLUMNS = ["transform", "stock", "ours", "ours, *"]


def calls(device: str) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    net = net.to(device)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    x, y = torch.randn(16, 8, device=device), torch.randn(16, 4, device=device)
    directions = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(net, p, (x,)) - y).square().mean()  # PyTorch's own jvp of grad of mse_loss raises

    def pulled() -> object:
        value, pull = vjp(lambda p: functional_call(net, p, (x,)), parameters)
        return pull(value)

    of_parameters = lambda p: loss(p, x, y)  # noqa: E731
    of_input = lambda x: functional_call(net, parameters, (x,)).square().sum()  # noqa: E731
    return {
        "grad": lambda: grad(of_parameters)(parameters),
        "vjp": pulled,
        "vmap of grad, per sample": lambda: vmap(grad(loss), (None, 0, 0))(parameters, x, y),
        "jacrev": lambda: jacrev(lambda x: functional_call(net, parameters, (x,)))(x[0]),
        "jvp": lambda: jvp(of_parameters, (parameters,), (directions,)),
        "jacfwd": lambda: jacfwd(lambda x: functional_call(net, parameters, (x,)))(x[0]),
        "hessian": lambda: hessian(of_input)(x[0]),
        "jvp of grad": lambda: jvp(grad(of_parameters), (parameters,), (directions,)),
        "grad of grad": lambda: grad(lambda x: grad(of_input)(x).square().sum())(x),
    }


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rules = {"ours": mg.override(), "ours, *": mg.override("*")}
    found = []
    for name, call in calls(arguments.device).items():
        times = measure(dict.fromkeys(COLUMNS[1:], call), arguments.seconds, rules)
        found.append({"transform": name, **summary(times, "stock")})
    return found


if __name__ == "__main__":
    main("transforms", "Transforms of torch.func, a network of width 32", rows, COLUMNS, threads=[1], seconds=4)
