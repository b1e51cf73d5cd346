"""Functions that are computed again in the backward, next to torch.utils.checkpoint and JAX: what works, memory and time.

    python benchmarks/checkpoint.py            # the tables of docs/checkpoint.md
    python benchmarks/checkpoint.py modes ours # one contender, as JSON

JAX_PYTHON is an interpreter that has jax; without it jax is left out. Memory is the highest number of bytes that were allocated
during forward and backward, less those before; JAX plans memory as a compiler and is not measured.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time

MODES = ["none", "ours", "torch, reentrant", "torch", "jax"]
NETS = ["none", "ours", "ours, save_products", "torch, reentrant", "torch"]
LAYERS, WIDTH, LENGTH, BATCH = 12, 192, 128, 8


def wrapper(kind: str):
    import torch.utils.checkpoint

    import torch_manualgrad as mg

    if kind == "none":
        return lambda f: f
    if kind.startswith("ours"):
        return lambda f: mg.checkpoint(f, mg.checkpointing.save_products if "products" in kind else None)
    reentrant = "reentrant" in kind
    return lambda f: lambda *x: torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=reentrant)


# -- modes ------------------------------------------------------------------------------------------------------------


def modes_of_torch(wrap):
    import torch
    from torch.func import grad, jvp, vmap

    torch.set_default_dtype(torch.float64)
    x = torch.tensor([0.3, -0.7, 1.1])
    rev = lambda f: grad(lambda x: f(x).sum())  # noqa: E731
    fwd = lambda f: lambda x: jvp(f, (x,), (torch.ones(3),))[1]  # noqa: E731

    def eager(order):
        def run(f):
            a = x.clone().requires_grad_()
            y = f(a)
            for _ in range(order - 1):
                (y,) = torch.autograd.grad(y.sum(), a, create_graph=True)
            y.sum().backward()
            return a.grad

        return run

    def dual(f):
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(
                f(torch.autograd.forward_ad.make_dual(x, torch.ones(3)))
            ).tangent

    def hooked(f):
        with torch.autograd.graph.save_on_cpu():
            return eager(1)(f)

    def masked(f):
        torch.manual_seed(0)
        return eager(1)(lambda x: wrap(lambda x: torch.dropout(f(x), 0.5, True))(x))

    f = lambda x: torch.sin(x) * x.exp()  # noqa: E731
    g = wrap(f)
    runs = {
        "autograd, first order": eager(1),
        "autograd, second order": eager(2),
        "dual numbers": dual,
        "func.grad": lambda f: rev(f)(x),
        "func.jvp": lambda f: fwd(f)(x),
        "func.hessian": lambda f: torch.func.hessian(lambda x: f(x).sum())(x),
        "reverse over forward": lambda f: rev(fwd(f))(x),
        "forward over forward": lambda f: fwd(fwd(f))(x),
        "vmap of func.grad": lambda f: vmap(grad(f))(x),
        "autograd of vmap": lambda f: eager(1)(vmap(f)),
        "dropout": masked,
        "Taylor series": lambda f: __import__("torch_manualgrad").forward_ad.directional(f, x, torch.ones(3), 4)[-1],
    }
    return {name: (lambda r=r: r(g), lambda r=r: r(f)) for name, r in runs.items()}


def modes_of_jax():
    import jax
    import jax.numpy as jnp
    from jax.experimental.jet import jet

    jax.config.update("jax_enable_x64", True)
    x = jnp.array([0.3, -0.7, 1.1])
    f = lambda x: jnp.sin(x) * jnp.exp(x)  # noqa: E731
    rev = lambda f: jax.grad(lambda x: f(x).sum())  # noqa: E731
    fwd = lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones(3),))[1]  # noqa: E731
    g = jax.checkpoint(f)
    key = jax.random.PRNGKey(0)
    drop = lambda f: rev(jax.checkpoint(lambda x: f(x) * jax.random.bernoulli(key, 0.5, (3,))))(x)  # noqa: E731
    runs = {
        "func.grad": lambda f: rev(f)(x),
        "func.jvp": lambda f: fwd(f)(x),
        "func.hessian": lambda f: jax.hessian(lambda x: f(x).sum())(x),
        "reverse over forward": lambda f: rev(fwd(f))(x),
        "forward over forward": lambda f: fwd(fwd(f))(x),
        "vmap of func.grad": lambda f: jax.vmap(jax.grad(f))(x),
        "dropout": drop,
        "Taylor series": lambda f: jet(f, (x,), ([jnp.ones(3), *[jnp.zeros(3)] * 3],))[1][-1],
    }
    return {name: (lambda r=r: r(g), lambda r=r: r(f)) for name, r in runs.items()}


def modes(kind: str) -> dict[str, str]:
    import warnings

    import numpy as np

    warnings.simplefilter("ignore")
    found = {}
    for name, (ours, plain) in (modes_of_jax() if kind == "jax" else modes_of_torch(wrapper(kind))).items():
        try:
            value = np.asarray(ours())
        except Exception as problem:
            found[name] = f"raises {type(problem).__name__}"
            continue
        found[name] = "ok" if np.allclose(value, np.asarray(plain()), rtol=1e-12) else "**wrong**"
    return found


# -- memory and time --------------------------------------------------------------------------------------------------


def peak(call) -> int:
    """The highest number of bytes that a call has allocated at one time."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def net(rounds: int = 9) -> dict[str, dict[str, float]]:
    """Memory and seconds of the processor for each contender, in turns."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    make = lambda: torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True)  # noqa: E731
    layers = torch.nn.ModuleList([make() for _ in range(LAYERS)])
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)

    def step(wrap):
        layers.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        y = x
        for layer in layers:
            y = wrap(layer)(y)
        y.square().mean().backward()
        return sum(float(p.grad.double().abs().sum()) for p in layers.parameters())

    wraps = {kind: wrapper(kind) for kind in NETS}
    plain = step(wraps["none"])
    layer = peak(lambda: layers[0](x))
    found: dict[str, dict[str, float]] = {}
    for kind, wrap in wraps.items():
        assert math.isclose(step(wrap), plain, rel_tol=1e-12), kind
        found[kind] = {"peak": peak(lambda wrap=wrap: step(wrap)), "layer": layer, "seconds": math.inf}
    for _ in range(rounds):
        for kind, wrap in wraps.items():
            start = time.process_time()
            step(wrap)
            found[kind]["seconds"] = min(found[kind]["seconds"], time.process_time() - start)
    return found


def run(python: str, *arguments: str):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, __file__, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{arguments}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(modes(sys.argv[2]) if sys.argv[1] == "modes" else net()))
        return
    kinds = [k for k in MODES if k != "none"]
    columns = {
        k: run(os.environ.get("JAX_PYTHON", sys.executable) if k == "jax" else sys.executable, "modes", k)
        for k in kinds
    }
    columns = {k: column for k, column in columns.items() if column}
    print(f"| | {' | '.join(columns)} |\n{'| --- ' * (len(columns) + 1)}|")
    for name in columns["ours"]:
        print(f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |")
    print(
        f"\n| {LAYERS} layers | peak, MB | of a layer's | seconds | of those without |\n| --- | --- | --- | --- | --- |"
    )
    found = run(sys.executable, "net")
    base = found["none"]
    for kind, row in found.items():
        memory, seconds = row["peak"], row["seconds"]
        print(
            f"| {kind} | {memory / 1e6:.0f} | {memory / base['layer']:.1f} | {seconds:.2f} | {seconds / base['seconds']:.2f} |"
        )
    print(f"2 sqrt({LAYERS}) is {2 * math.sqrt(LAYERS):.1f}.")


if __name__ == "__main__":
    main()
