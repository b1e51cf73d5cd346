"""JAX's gradients of the programs of compiled.py, compiled, on one thread: prints seconds, one entry a step, as JSON.

    python jax_compiled.py "energy and forces" 2

In a process of its own, because next to PyTorch's threads JAX's wait for each other for good.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp
import numpy as np

generator = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(generator.standard_normal(shape) / max(shape[-1], 1) ** 0.5, jnp.float32)


def linear(n: int, m: int) -> dict[str, jax.Array]:
    return {"w": draw(m, n), "b": draw(m)}


def apply(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ p["w"].T + p["b"]


def layer_norm(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * p["w"] + p["b"]


def scale(n: int) -> dict[str, jax.Array]:
    return {"w": jnp.ones(n), "b": jnp.zeros(n)}


def potential() -> tuple[Callable[..., Any], Any]:
    """The gradient of a loss of energy and forces."""
    atoms, width = 24, 64
    parameters = {
        "filters": [linear(8, width) for _ in range(2)],
        "updates": [linear(width, width) for _ in range(2)],
        "start": jnp.ones(width),
        "energy": linear(width, 1),
    }
    centers, others = jnp.linspace(0.5, 3, 8), 1 - jnp.eye(atoms)
    grid = np.stack(np.meshgrid(np.arange(3.0), np.arange(4.0), np.arange(2.0), indexing="ij"), -1).reshape(-1, 3)
    x = jnp.asarray(grid + 0.1 * generator.standard_normal((atoms, 3)), jnp.float32)

    def energy(p: Any, x: jax.Array) -> jax.Array:
        r = jnp.sqrt(((x[:, None] - x) ** 2).sum(-1) + 1 - others)
        features = jnp.exp(-2 * (r[..., None] - centers) ** 2) * others[..., None]
        state = jnp.broadcast_to(p["start"], (atoms, width))
        for f, update in zip(p["filters"], p["updates"]):
            messages = jax.nn.silu(apply(f, features)) * state * others[..., None]
            state = state + jax.nn.silu(apply(update, messages.sum(1)))
        return apply(p["energy"], state).sum()

    def loss(p: Any) -> jax.Array:
        e, g = jax.value_and_grad(energy, 1)(p, x)
        return (g**2).mean() + 0.01 * e

    return jax.grad(loss), (parameters,)


def critic() -> tuple[Callable[..., Any], Any]:
    """The gradient of a gradient penalty."""
    parameters = [linear(32, 64), scale(64), linear(64, 64), linear(64, 1)]
    x = draw(64, 32)

    def value(p: Any, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(layer_norm(p[1], apply(p[0], x)))
        return apply(p[3], jax.nn.silu(apply(p[2], hidden)))

    def loss(p: Any) -> jax.Array:
        g = jax.grad(lambda x: value(p, x).sum())(x)
        return ((jnp.linalg.norm(g, axis=1) - 1) ** 2).mean() - value(p, x).mean()

    return jax.grad(loss), (parameters,)


def laplacian() -> tuple[Callable[..., Any], Any]:
    """Poisson's equation in two dimensions by two nested gradients."""
    parameters, x = [linear(2, 64), linear(64, 64), linear(64, 1)], draw(256, 2)

    def value(p: Any, x: jax.Array) -> jax.Array:
        for layer in p[:-1]:
            x = jnp.tanh(apply(layer, x))
        return apply(p[-1], x).sum()

    def loss(p: Any) -> jax.Array:
        first = jax.grad(lambda x: value(p, x))
        second = [jax.grad(lambda x, i=i: first(x)[:, i].sum())(x)[:, i] for i in range(2)]
        return ((second[0] + second[1] + 1) ** 2).mean()

    return jax.grad(loss), (parameters,)


def hessian_vector() -> tuple[Callable[..., Any], Any]:
    """The product of a Hessian and a vector, of two transformer blocks and their parameters."""
    width, heads, x = 64, 4, draw(4, 16, 64)
    block = lambda: {  # noqa: E731
        "norm1": scale(width), "norm2": scale(width), "qkv": linear(width, 3 * width), "out": linear(width, width),
        "up": linear(width, 4 * width), "down": linear(4 * width, width),
    }  # fmt: skip
    parameters = [block(), block()]
    mask = jnp.tril(jnp.ones((16, 16), bool))

    def forward(p: Any, x: jax.Array) -> jax.Array:
        for b in p:
            qkv = apply(b["qkv"], layer_norm(b["norm1"], x)).reshape(4, 16, 3, heads, -1).transpose(2, 0, 3, 1, 4)
            q, k, v = qkv
            scores = jnp.where(mask, q @ k.swapaxes(-1, -2) / 4, -jnp.inf)
            attended = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(4, 16, width)
            x = x + apply(b["out"], attended)
            x = x + apply(b["down"], jax.nn.gelu(apply(b["up"], layer_norm(b["norm2"], x)), approximate=False))
        return x

    def product(p: Any, v: Any) -> Any:
        return jax.jvp(jax.grad(lambda p: (forward(p, x) ** 2).mean()), (p,), (v,))[1]

    return product, (parameters, jax.tree.map(jnp.ones_like, parameters))


PROGRAMS = {
    "energy and forces": potential,
    "gradient penalty": critic,
    "Laplacian": laplacian,
    "Hessian-vector product": hessian_vector,
}


def main(name: str, seconds: str) -> None:
    function, arguments = PROGRAMS[name]()
    step = jax.jit(function)
    jax.block_until_ready(step(*arguments))  # compiles
    found, begin = [], time.perf_counter()
    while len(found) < 5 or time.perf_counter() < begin + float(seconds):
        start = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        found.append(time.perf_counter() - start)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
