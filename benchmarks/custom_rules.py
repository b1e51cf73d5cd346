"""Functions with rules of their own, next to torch.autograd.Function and JAX: which modes have the rule.

    python benchmarks/custom_rules.py            # the table of docs/custom_rules.md
    python benchmarks/custom_rules.py ours       # one contender, as JSON

jax is skipped where it is not installed; JAX_PYTHON is an interpreter that has it. The rule is twice the true derivative, so a
mode that passes by the rule is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import timeit

CONTENDERS = ["custom_vjp", "custom_jvp", "Function", "jax.custom_vjp", "jax.custom_jvp"]
POINT = [0.3, -0.7, 1.1]


def expected(np):
    """sin, with twice its derivative; the second and the third derivative are those of 2 cos."""
    x = np.array(POINT)
    return {
        "reverse": 2 * np.cos(x),
        "forward": 2 * np.cos(x),
        "reverse over reverse": -2 * np.sin(x),
        "forward over reverse": -2 * np.sin(x),
        "reverse over forward": -2 * np.sin(x),
        "forward over forward": -2 * np.sin(x),
        "third order, reverse": -2 * np.cos(x),
        "third order, mixed": -2 * np.cos(x),
        "of the square, second order": 2 * ((2 * np.cos(x)) ** 2 - 2 * np.sin(x) ** 2),
        "vmap of reverse": 2 * np.cos(x),
        "vmap of forward": 2 * np.cos(x),
        "a tensor read by closure": None,
    }


def derivatives(f, closed, grad, jvp, vmap, x, ones):
    """The same by transforms; ``closed(w)`` is a function of x that reads w by closure."""
    rev = lambda f: grad(lambda x: f(x).sum())  # noqa: E731
    fwd = lambda f: lambda x: jvp(f, (x,), (ones,))[1]  # noqa: E731
    return {
        "reverse": lambda: rev(f)(x),
        "forward": lambda: fwd(f)(x),
        "reverse over reverse": lambda: rev(rev(f))(x),
        "forward over reverse": lambda: fwd(rev(f))(x),
        "reverse over forward": lambda: rev(fwd(f))(x),
        "forward over forward": lambda: fwd(fwd(f))(x),
        "third order, reverse": lambda: rev(rev(rev(f)))(x),
        "third order, mixed": lambda: fwd(rev(fwd(f)))(x),
        "of the square, second order": lambda: rev(rev(lambda x: f(x) ** 2))(x),
        "vmap of reverse": lambda: vmap(grad(f))(x),
        "vmap of forward": lambda: vmap(lambda x: jvp(f, (x,), (ones[0],))[1])(x),
        "a tensor read by closure": lambda: grad(lambda w: closed(w)(x).sum())(x),
    }


def of_torch(kind: str):
    import torch

    import torch_manualgrad as mg

    torch.set_default_dtype(torch.float64)

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, t):
            return 2 * t * ctx.saved_tensors[0].cos()

    def make(function):
        if kind == "custom_vjp":
            f = mg.custom_vjp(function)
            f.defvjp(lambda x: (f(x), x), lambda x, g: (2 * g * x.cos(),))
        else:
            f = mg.custom_jvp(function)
            f.defjvp(lambda p, t: (f(*p), 2 * t[0] * p[0].cos()))
        return f

    def closed(w):
        if kind != "Function":
            return make(lambda x: x * w)

        class Closed(Function):
            @staticmethod
            def forward(x):
                return x * w

        return Closed.apply

    f = Function.apply if kind == "Function" else make(torch.sin)
    x = torch.tensor(POINT)
    found = derivatives(f, closed, torch.func.grad, torch.func.jvp, torch.vmap, x, torch.ones(3))
    x = x.clone().requires_grad_()
    seconds = min(timeit.repeat(lambda: f(x).sum().backward(), number=1000, repeat=5)) / 1000
    plain = min(timeit.repeat(lambda: x.sin().sum().backward(), number=1000, repeat=5)) / 1000
    return found, {"microseconds more than of sin": 1e6 * (seconds - plain)}


def of_jax(kind: str):
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def make(function):
        if kind == "jax.custom_vjp":
            f = jax.custom_vjp(function)
            f.defvjp(lambda x: (f(x), x), lambda x, g: (2 * g * jnp.cos(x),))
        else:
            f = jax.custom_jvp(function)
            f.defjvp(lambda p, t: (f(*p), 2 * t[0] * jnp.cos(p[0])))
        return f

    x = jnp.array(POINT)
    closed = lambda w: make(lambda x: x * w)  # noqa: E731
    return derivatives(make(jnp.sin), closed, jax.grad, jax.jvp, jax.vmap, x, jnp.ones(3)), {}


def outcomes(kind: str) -> dict[str, str]:
    import numpy as np

    modes, more = (of_jax if kind.startswith("jax") else of_torch)(kind)
    found = {}
    for name, wanted in expected(np).items():
        try:
            value = np.asarray(modes[name]())
        except Exception as problem:
            found[name] = f"raises {type(problem).__name__}"
            continue
        close = wanted is not None and value.shape == wanted.shape and abs(value - wanted).max() < 1e-12
        found[name] = "ok" if close else "**zero**" if not value.any() else "**another**"
    return found | {name: f"{value:.0f}" for name, value in more.items()}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(outcomes(sys.argv[1])))
        return
    columns = {}
    for kind in CONTENDERS:
        python = os.environ.get("JAX_PYTHON", sys.executable) if kind.startswith("jax") else sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([python, __file__, kind], capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{kind}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        columns[kind] = json.loads(done.stdout.splitlines()[-1])
    print(f"| | {' | '.join(columns)} |\n{'| --- ' * (len(columns) + 1)}|")
    for name in next(iter(columns.values())):
        print(f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |")


if __name__ == "__main__":
    main()
