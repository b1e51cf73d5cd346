"""Gradients through ordinary differential equations next to torchdiffeq's and JAX's: errors and times.

    python benchmarks/odes.py

The equation $dy/dt = k (cos t - y^3)$ forgets its start at the rate $k$. Errors are relative, of $d(y_1 + y_2)/dk$ at $t = 2$,
next to the gradient through the steps of a solver with a tolerance of 1e-12. torchdiffeq and jax are skipped where they are not
installed. One thread.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import torch_manualgrad as mg

RATES = [1.0, 5.0, 10.0, 30.0, 100.0]
START, TIMES, TOLERANCE = [1.0, 2.0], [0.0, 2.0], 1e-8


class Relaxing(torch.nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor(rate))

    def forward(self, t: Any, y: Any) -> Any:
        return slope(t, y, self.rate)


def slope(t: Any, y: Any, rate: Any) -> Any:
    return rate * (torch.cos(t) - y**3)


def ours(rate: float, tolerance: float = TOLERANCE) -> float:
    k = torch.tensor(rate, requires_grad=True)
    y = mg.implicit.odeint(slope, torch.tensor(START), torch.tensor(TIMES), k, rtol=tolerance, atol=tolerance)
    return torch.autograd.grad(y[-1].sum(), k)[0].item()


def of_torchdiffeq(name: str) -> Callable[..., float]:
    def gradient(rate: float, tolerance: float = TOLERANCE) -> float:
        import torchdiffeq

        net = Relaxing(rate)
        y = getattr(torchdiffeq, name)(net, torch.tensor(START), torch.tensor(TIMES), rtol=tolerance, atol=tolerance)
        y[-1].sum().backward()
        return net.rate.grad.item()

    return gradient


def of_jax(rate: float) -> float:
    import jax
    import jax.numpy as jnp
    from jax.experimental.ode import odeint

    jax.config.update("jax_enable_x64", True)

    def end(k: Any) -> Any:
        f = lambda y, t, k: k * (jnp.cos(t) - y**3)  # noqa: E731
        options = {"rtol": TOLERANCE, "atol": TOLERANCE, "mxstep": 100_000}
        return odeint(f, jnp.array(START), jnp.array(TIMES), k, **options)[-1].sum()

    return float(jax.grad(end)(rate))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    contenders: dict[str, Callable[[float], float]] = {"mg.implicit.odeint": ours}
    steps = of_torchdiffeq("odeint")
    if importlib.util.find_spec("torchdiffeq") is not None:
        contenders |= {"torchdiffeq, adjoint": of_torchdiffeq("odeint_adjoint"), "torchdiffeq, its steps": steps}
    if importlib.util.find_spec("jax") is not None:
        contenders["jax.experimental.ode"] = of_jax
    exact = steps if len(contenders) > 2 else ours
    print("| k |", " | ".join(contenders), "|\n| ---", "| --- " * len(contenders), "|")
    for rate in RATES:
        expected, cells = exact(rate, 1e-12), []
        for gradient in contenders.values():
            start = time.perf_counter()
            try:
                error = abs(gradient(rate) / expected - 1)
                cells.append(f"{error:.0e}, {time.perf_counter() - start:.2f} s")
            except Exception as problem:
                cells.append(f"raises: {str(problem).split('.')[0][:40]}")
        print(f"| {rate:g} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
