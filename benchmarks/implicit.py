"""Implicit derivatives next to unrolled ones, torchopt's and JAX's: what works, errors, time and memory.

    python benchmarks/implicit.py            # the tables of docs/implicit.md
    python benchmarks/implicit.py ours       # one contender, as JSON

torchopt and jax are skipped where they are not installed. Each contender runs in a process of its own, on one thread.
"""

from __future__ import annotations

import resource
import time

from processes import in_processes

CONTENDERS = ["ours", "unrolled", "torchopt", "jax"]
NEWTON, STEPS, SIDE = 12, 80, 600
VALUES = [0.7, 1.3, 2.1]


def error(found, expected) -> float:
    """The largest, relative to the largest entry."""
    return float(abs(found - expected).max() / abs(expected).max())


def outcomes(modes) -> dict[str, object]:
    """The error of each mode, or the type of what it raises."""
    found: dict[str, object] = {}
    for name, (ours, expected) in modes.items():
        try:
            found[name] = error(ours(), expected())
        except Exception as problem:
            found[name] = type(problem).__name__
    return found


def timed(call) -> tuple[float, float]:
    """The seconds of a call, the least of five, and the bytes by which the first raised the peak of the process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times), peak


# -- torch ------------------------------------------------------------------------------------------------------------


def newton(f, x, a):
    for _ in range(NEWTON):
        x = x - f(x, a) / (3 * x**2)
    return x


def cubic(x, a):
    return x**3 - a


def layer(z, W, u):
    import torch

    return torch.tanh(z @ W + u)


def iterated(f, z, W, u):
    for _ in range(STEPS):
        z = f(z, W, u)
    return z


def of_torch(contender, start):
    """The cube root, as a function of a, and the equilibrium layer, as one of W and u."""
    import torch

    if contender == "unrolled":
        return lambda a: newton(cubic, torch.ones_like(a), a), lambda W, u: iterated(layer, start, W, u)
    if contender == "ours":
        import torch_manualgrad as mg

        root, equilibrium = mg.implicit.root(cubic, newton), mg.implicit.fixed_point(layer, iterated)
        return lambda a: root(torch.ones_like(a), a), lambda W, u: equilibrium(start, W, u)
    import torchopt

    solve = torchopt.linear_solve.solve_normal_cg(maxiter=1000, rtol=1e-10, atol=0.0)
    root = torchopt.diff.implicit.custom_root(cubic, argnums=1, solve=solve)(lambda x, a: newton(cubic, x, a))
    residual = lambda z, W, u: layer(z, W, u) - z  # noqa: E731
    decorate = torchopt.diff.implicit.custom_root(residual, argnums=(1, 2), solve=solve)
    equilibrium = decorate(lambda z, W, u: iterated(layer, z, W, u))
    return lambda a: root(torch.ones_like(a), a), lambda W, u: equilibrium(start, W, u)


def measure_torch(contender):
    import torch
    import torch.autograd.forward_ad as fwAD
    from torch.func import grad, jacfwd, jacrev, vmap

    torch.set_num_threads(1)
    root, equilibrium = of_torch(contender, torch.zeros(SIDE, SIDE, dtype=torch.float64))
    a = torch.tensor(VALUES, dtype=torch.float64)
    closed = lambda a: a ** (1 / 3)  # noqa: E731
    total = lambda f: lambda a: f(a).sum()  # noqa: E731

    def rev(f, order):
        x = a.clone().requires_grad_()
        y = f(x)
        for k in range(order):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=k + 1 < order)
        return y

    def dual(f):
        with fwAD.dual_level():
            return fwAD.unpack_dual(f(fwAD.make_dual(a, torch.ones_like(a)))).tangent

    def nested(*transforms):
        def of(f):
            f = total(f)
            for transform in transforms:
                f = transform(f)
            return f(a)

        return of

    calls = {
        "reverse": lambda f: rev(f, 1),
        "reverse, of a number": lambda f: torch.autograd.grad(f(x := a[0].clone().requires_grad_()), x)[0],
        "second order, reverse": lambda f: rev(f, 2),
        "third order, reverse": lambda f: rev(f, 3),
        "forward, dual numbers": dual,
        "func.grad": nested(grad),
        "func.jvp": nested(jacfwd),
        "func.hessian": nested(jacrev, jacfwd),
        "forward over forward": nested(jacfwd, jacfwd),
        "reverse over forward": nested(jacfwd, jacrev),
        "third order, mixed": nested(jacfwd, jacrev, jacfwd),
        "vmap of func.grad": lambda f: vmap(grad(f))(a),
    }
    modes = {name: (lambda call=call: call(root), lambda call=call: call(closed)) for name, call in calls.items()}
    found = {"modes": outcomes(modes)}
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator) * (0.35 / SIDE**0.5)
    u = torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator)
    W.requires_grad_()

    def step():
        return torch.autograd.grad(equilibrium(W, u).square().sum(), W)[0]

    _, small = of_torch(contender, torch.zeros(8, 8, dtype=torch.float64))  # what is loaded at the first call is loaded
    torch.autograd.grad(small(W[:8, :8], u[:8, :8]).square().sum(), W)
    found["seconds"], found["bytes"] = timed(step)
    found["gradient"] = float(step().norm())
    return found


# -- JAX --------------------------------------------------------------------------------------------------------------


def measure_jax():
    import jax
    import jax.numpy as jnp
    import torch

    jax.config.update("jax_enable_x64", True)

    def root(a):
        f = lambda x: x**3 - a  # noqa: E731
        solve = lambda f, x: jax.lax.fori_loop(0, NEWTON, lambda _, x: x - f(x) / (3 * x**2), x)  # noqa: E731
        return jax.lax.custom_root(f, jnp.ones_like(a), solve, lambda g, y: y / g(jnp.ones_like(y)))

    closed = lambda a: a ** (1 / 3)  # noqa: E731
    a = jnp.array(VALUES)

    def nested(*transforms):
        def of(f):
            g = lambda a: f(a).sum()  # noqa: E731
            for transform in transforms:
                g = transform(g)
            return g(a)

        return of

    grad, fwd, rev = jax.grad, jax.jacfwd, jax.jacrev
    calls = {
        "reverse": nested(grad),
        "reverse, of a number": lambda f: grad(f)(a[0]),
        "second order, reverse": nested(rev, rev),
        "third order, reverse": nested(rev, rev, rev),
        "forward, dual numbers": nested(fwd),
        "func.grad": nested(grad),
        "func.jvp": nested(fwd),
        "func.hessian": nested(rev, fwd),
        "forward over forward": nested(fwd, fwd),
        "reverse over forward": nested(fwd, rev),
        "third order, mixed": nested(fwd, rev, fwd),
        "vmap of func.grad": lambda f: jax.vmap(grad(f))(a),
    }
    modes = {name: (lambda call=call: call(root), lambda call=call: call(closed)) for name, call in calls.items()}
    found = {"modes": outcomes(modes)}
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator) * (0.35 / SIDE**0.5)
    W, u = jnp.array(W.numpy()), jnp.array(torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator).numpy())

    def loss(W, u):
        f = lambda z: jnp.tanh(z @ W + u) - z  # noqa: E731
        solve = lambda f, z: jax.lax.fori_loop(0, STEPS, lambda _, z: f(z) + z, z)  # noqa: E731
        gmres = lambda g, y: jax.scipy.sparse.linalg.gmres(g, y, tol=3.7e-11, restart=50)[0]  # noqa: E731
        tangent = lambda g, y: jax.lax.custom_linear_solve(g, y, gmres, gmres)  # noqa: E731, gmres alone raises
        z = jax.lax.custom_root(f, jnp.zeros_like(u), solve, tangent)
        return (z**2).sum()

    step = jax.jit(jax.grad(loss))
    step(W[:8, :8], u[:8, :8])
    found["seconds"], found["bytes"] = timed(lambda: step(W, u).block_until_ready())
    found["gradient"] = float(jnp.linalg.norm(step(W, u)))
    return found


def main() -> None:
    results = in_processes(CONTENDERS, lambda name: measure_jax() if name == "jax" else measure_torch(name))
    print("| |", " | ".join(results), "|\n|", "--- | " * (len(results) + 1))
    for mode in results["ours"]["modes"]:
        cells = [results[c]["modes"][mode] for c in results]
        print(f"| {mode} |", " | ".join(x if isinstance(x, str) else f"{x:.0e}" for x in cells), "|")
    for name, scale in (("seconds", 1), ("bytes", 1e-6), ("gradient", 1)):
        print(f"| {name} |", " | ".join(f"{results[c][name] * scale:.12g}" for c in results), "|")


if __name__ == "__main__":
    main()
