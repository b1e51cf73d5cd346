"""Calls of JAX that against_jax.py times: compiled, on one thread, in a process of its own.

Each line of the input is a request, in JSON. A list names a case: it is compiled, and the answer is whether that worked. A
number runs the case that many times, and the answer is the time in seconds. JAX and PyTorch in one process can deadlock.
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

jax.config.update("jax_enable_x64", True)

OPERATORS = {
    "lu": lambda a: jax.lax.linalg.lu(a)[0],
    "svd": lambda a: jnp.linalg.svd(a, full_matrices=False),
    "eigh": jnp.linalg.eigh,
    "cholesky": jnp.linalg.cholesky,
    "solve": lambda a: jnp.linalg.solve(a, jax.lax.stop_gradient(a)),
    "qr": jnp.linalg.qr,
}
DEFINITE = ("eigh", "cholesky", "solve")


def decomposition(name: str, shape: str, dtype: str) -> tuple[Callable[..., Any], Any]:
    """Forward and backward of one operator."""
    generator = np.random.default_rng(0)
    a = generator.standard_normal([int(n) for n in shape.split("x")])
    if name in DEFINITE:
        a = a @ a.swapaxes(-1, -2) / a.shape[-1] + np.eye(a.shape[-1])
    value = jnp.asarray(a.astype(dtype))
    like = jax.eval_shape(OPERATORS[name], value)
    given = jax.tree.map(lambda o: jnp.asarray(generator.standard_normal(o.shape).astype(o.dtype)), like)
    return lambda value, given: jax.vjp(OPERATORS[name], value)[1](given), (value, given)


def laplacian(activation: str, widths: str, shape: str, way: str) -> tuple[Callable[..., Any], Any]:
    """The Laplacian of a network for each example: the trace of the Hessian, or folx's with a sparsity threshold."""
    generator = np.random.default_rng(0)
    sizes = [int(n) for n in widths.split("-")]
    weights = [jnp.asarray(generator.standard_normal(s) / s[0] ** 0.5, jnp.float32) for s in zip(sizes, sizes[1:])]
    biases = [jnp.asarray(generator.standard_normal(n), jnp.float32) for n in sizes[1:]]
    function = {"silu": jax.nn.silu, "tanh": jnp.tanh}[activation]

    def network(x: jax.Array) -> jax.Array:
        for w, b in zip(weights[:-1], biases):
            x = function(x @ w + b)
        return (x @ weights[-1] + biases[-1]).sum()

    x = jnp.asarray(generator.standard_normal([int(n) for n in shape.split("x")]), jnp.float32)
    if way.startswith("folx"):
        import folx  # an optional contender

        return jax.vmap(folx.ForwardLaplacianOperator(int(way[4:]))(network)), (x,)

    def trace(x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda v: network(v.reshape(x.shape)))
        basis = jnp.eye(x.size, dtype=x.dtype)
        along = jax.vmap(lambda v: jax.jvp(gradient, (x.reshape(-1),), (v,))[1] @ v)
        return along(basis).sum()

    return jax.vmap(trace), (x,)


def main() -> None:
    call: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, list):
            make, *words = request
            try:
                function, arguments = {"decomposition": decomposition, "laplacian": laplacian}[make](*words)
                compiled = jax.jit(function).lower(*arguments).compile()
                call = lambda f=compiled, x=arguments: jax.block_until_ready(f(*x))  # type: ignore[misc] # noqa: E731
                call()
                found: Any = True
            except (ImportError, NotImplementedError) as error:
                print(error, file=sys.stderr)
                found = False
        else:
            start = time.perf_counter()
            for _ in range(request):
                call()
            found = time.perf_counter() - start
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
