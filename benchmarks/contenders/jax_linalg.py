"""JAX's forward plus backward of one operator, compiled, on one thread: prints seconds, one entry a call, as JSON.

    python jax_linalg.py solve 1000x4x4 float32 5

In a process of its own, because next to PyTorch's threads JAX's wait for each other for good.
"""

from __future__ import annotations

import json
import os
import sys
import time

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
    "det": jnp.linalg.det,
    "inv": jnp.linalg.inv,
    "solve": lambda a: jnp.linalg.solve(a, jax.lax.stop_gradient(a)),
    "qr": jnp.linalg.qr,
}
DEFINITE = ("eigh", "cholesky", "det", "inv", "solve")


def main(name: str, shape: str, dtype: str, calls: str) -> None:
    generator = np.random.default_rng(0)
    a = generator.standard_normal([int(n) for n in shape.split("x")])
    if name in DEFINITE:
        a = a @ a.swapaxes(-1, -2) / a.shape[-1] + np.eye(a.shape[-1])
    value = jnp.asarray(a.astype(dtype))

    @jax.jit
    def both(value, given):
        return jax.vjp(OPERATORS[name], value)[1](given)

    like = jax.eval_shape(OPERATORS[name], value)
    given = jax.tree.map(lambda o: jnp.asarray(generator.standard_normal(o.shape).astype(o.dtype)), like)
    seconds = []
    for _ in range(int(calls) + 1):
        start = time.perf_counter()
        jax.block_until_ready(both(value, given))
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds[1:]))  # the first one compiles


if __name__ == "__main__":
    main(*sys.argv[1:])
