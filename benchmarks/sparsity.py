"""Sparse Jacobians and Hessians next to dense ones, and to asdex's on JAX: colors, detection, evaluation.

    python benchmarks/sparsity.py            # the tables of docs/sparsity.md
    python benchmarks/sparsity.py ours       # one contender, as JSON

asdex is skipped where it is not installed. Each contender runs in a process of its own, on one thread.
"""

from __future__ import annotations

import time

from processes import in_processes

CONTENDERS = ["ours", "asdex"]
DENSE = 2048  # the most inputs for which the dense derivative is timed


def least(call, times=5):
    """The seconds of a call, the least of several, after one that is not counted."""
    call()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


# -- the functions, for torch and for JAX -----------------------------------------------------------------------------


def heat(np, u):
    """The heat equation on a periodic square, five points."""
    return sum(np.roll(u, k, d) for k in (1, -1) for d in (0, 1)) - 4 * u + u**3


def brusselator(np, w):
    """Brusselator with diffusion on a periodic square; w has the shape (2, N, N)."""
    u, v = w[0], w[1]
    diffusion = lambda a: sum(np.roll(a, k, d) for k in (1, -1) for d in (0, 1)) - 4 * a  # noqa: E731
    return np.stack([1 + u**2 * v - 4.4 * u + 10 * diffusion(u), 3.4 * u - u**2 * v + 10 * diffusion(v)])


def rosenbrock(np, x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def reactions(np, c):
    """A chain of 1,000 reactions of two neighbors."""
    rate = c[:-1] * c[1:] - 0.1 * c[:-1] ** 2
    zero = np.zeros_like(c[:1])
    return np.concatenate([zero, rate]) - np.concatenate([rate, zero])


def bundle(np, x):
    """Residuals of 400 points in 20 cameras; each is seen by 4 of them. x: 20 x 6 and then 400 x 3 numbers."""
    cameras, points = x[:120].reshape(20, 6), x[120:].reshape(400, 3)
    k = np.arange(1600)
    camera, point = cameras[(7 * k + k // 400) % 20], points[k % 400]
    turned = point + np.stack([
        camera[:, 1] * point[:, 2] - camera[:, 2] * point[:, 1],
        camera[:, 2] * point[:, 0] - camera[:, 0] * point[:, 2],
        camera[:, 0] * point[:, 1] - camera[:, 1] * point[:, 0],
    ], 1) + camera[:, 3:]  # fmt: skip
    return turned[:, :2] / (turned[:, 2:] + 5)


# name -> (function, shape, kind)
PROBLEMS = {
    "heat, 316 x 316": (heat, (316, 316), "jacobian"),
    "heat, 45 x 45": (heat, (45, 45), "jacobian"),
    "Brusselator, N = 32": (brusselator, (2, 32, 32), "jacobian"),
    "reaction network": (reactions, (1001,), "jacobian"),
    "bundle adjustment": (bundle, (1320,), "jacobian"),
    "convolution net": (None, (1, 1, 32, 32), "jacobian"),
    "Rosenbrock, 1e4": (rosenbrock, (10_000,), "hessian"),
    "Rosenbrock, 1e5": (rosenbrock, (100_000,), "hessian"),
}


def measure_ours():
    import torch

    import torch_manualgrad as mg

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    weights = [torch.linspace(-1, 1, a * b * 9).reshape(a, b, 3, 3) for a, b in ((4, 1), (4, 4), (1, 4))]

    def net(x):
        for w in weights:
            x = torch.tanh(torch.nn.functional.conv2d(x, w, padding=1))
        return x

    found = {}
    for name, (function, shape, kind) in PROBLEMS.items():
        f = net if function is None else lambda x, function=function: function(torch, x)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        first_order = kind == "jacobian"
        prepare = mg.sparse_jacobian.prepare if first_order else mg.sparse_hessian.prepare
        plan = prepare(f, x)
        g = f if first_order else torch.func.grad(f)
        v = torch.ones_like(x)
        if plan.mode == "rev":
            cotangent = torch.ones_like(f(x))
            one = lambda g=g, x=x, c=cotangent: torch.func.vjp(g, x)[1](c)  # noqa: E731
        else:
            one = lambda g=g, x=x, v=v: torch.func.jvp(g, (x,), (v,))  # noqa: E731
        from torch_manualgrad.sparsity.detection import detect

        row = {
            "colors": plan.colors,
            "detection": least(lambda: detect(f, x, (), not first_order), 3),
            "preparation": least(lambda: prepare(f, x), 3),
            "evaluation": least(lambda: plan.values(x), 10),
        }
        compiled = torch.compile(plan.values)
        row["compiled"] = least(lambda: compiled(x), 10)
        row["products"] = row["evaluation"] / (plan.colors * least(one, 10))
        if x.numel() <= DENSE:
            dense = torch.func.jacfwd(g)
            row["dense"] = least(lambda: dense(x), 2)
            full = dense(x).reshape(plan.pattern.shape)
            sparse = plan.matrix(x).to_dense().reshape(plan.pattern.shape)
            row["error"] = float((sparse - full).abs().max() / full.abs().max())
        found[name] = row
    return found


def measure_asdex():
    import asdex
    import jax
    import jax.numpy as jnp
    import numpy

    jax.config.update("jax_enable_x64", True)
    found = {}
    for name, (function, shape, kind) in PROBLEMS.items():
        if function is None:
            continue
        size = int(numpy.prod(shape))
        f = lambda x, function=function, shape=shape: function(jnp, x.reshape(shape)).reshape(-1)  # noqa: E731
        x = jnp.array(numpy.random.default_rng(0).standard_normal(size))
        if kind == "hessian":
            f = lambda x, function=function: function(jnp, x)  # noqa: E731
            detect, color = asdex.hessian_sparsity, asdex.hessian_coloring
            make = lambda c, f=f: asdex.hessian_from_coloring(f, c)  # noqa: E731
        else:
            detect, color = asdex.jacobian_sparsity, asdex.jacobian_coloring
            make = lambda c, f=f: asdex.jacobian_from_coloring(f, c)  # noqa: E731
        start = time.perf_counter()
        detect(f, x)
        detection = time.perf_counter() - start
        start = time.perf_counter()
        coloring = color(f, x)
        preparation = time.perf_counter() - start
        evaluate = jax.jit(make(coloring))
        row = {"colors": int(coloring.num_colors), "detection": detection, "preparation": preparation}
        row["evaluation"] = least(lambda: jax.block_until_ready(evaluate(x)), 10)
        found[name] = row
    return found


def main() -> None:
    results = in_processes(CONTENDERS, lambda name: measure_ours() if name == "ours" else measure_asdex())
    columns = ["colors", "detection", "preparation", "evaluation", "compiled", "products", "dense", "error"]
    for contender, rows in results.items():
        print(f"\n{contender}\n| | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
        for name, row in rows.items():
            print(f"| {name} |", " | ".join(f"{row[c]:.3g}" if c in row else "" for c in columns), "|")


if __name__ == "__main__":
    main()
