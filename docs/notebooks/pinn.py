# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A PINN in a quarter of the time
#
# A physics-informed network $u$ is trained until a differential equation holds at random points. The derivatives of $u$ in $x$
# are expensive: with reverse mode over reverse mode, each order doubles the graph. A truncated Taylor series carries
# all orders forward in one pass, and there is one backward, that of training.
#
# The equation is Kawahara's, which describes waves under surface tension. One implicit step of it in time is, on a period,
#
# $$u + u\, u_x + u_{xxx} - u_{xxxxx} = f,$$
#
# here with $f$ such that $u = \sin x + \tfrac{1}{2} \cos 2x$ is the solution.

# %%
import time

import torch
from matplotlib import pyplot
from torch import nn

import torch_manualgrad as mg

torch.manual_seed(0)
torch.set_num_threads(1)


def solution(x):
    return torch.sin(x) + 0.5 * torch.cos(2 * x)


def right_side(x):
    u = solution(x)
    return u + u * (x.cos() - torch.sin(2 * x)) - 2 * x.cos() + 20 * torch.sin(2 * x)


class Network(nn.Module):
    """A periodic function of x, (batch, 1), with values (batch,)."""

    def __init__(self, width=32):
        super().__init__()
        hidden = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(2):
            hidden += [nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(torch.cat([x.sin(), x.cos()], 1)).squeeze(1)


# %% [markdown]
# ## The residual, twice
#
# By one Taylor series along $x$; and by nested calls of `torch.autograd.grad`.


# %%
def by_series(u, x):
    along_x = ([torch.ones_like(x), None, None, None, None],)
    value, (first, _, third, _, fifth) = mg.forward_ad.jet(u, (x,), along_x)
    return value + value * first + third - fifth - right_side(x[:, 0])


def by_reverse(u, x):
    x = x.detach().requires_grad_()
    derivatives = [value := u(x)]
    for _ in range(5):
        (slope,) = torch.autograd.grad(derivatives[-1].sum(), x, create_graph=True)
        derivatives.append(slope[:, 0])
    _, first, _, third, _, fifth = derivatives
    return value + value * first + third - fifth - right_side(x[:, 0])


network = Network().double()
points = 2 * torch.pi * torch.rand(256, 1, dtype=torch.float64)
assert torch.allclose(by_series(network, points), by_reverse(network, points))

# %% [markdown]
# Both are the same function to rounding. The cost of one gradient of the loss, in processor time, as the minimum of
# several runs in turns:


# %%
def seconds(ways, repeats=8):
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, residual in ways.items():
            start = time.process_time()
            residual(network, points).square().mean().backward()
            best[name] = min(best[name], time.process_time() - start)
    return best


best = seconds({"series": by_series, "reverse": by_reverse})
print({name: f"{1e3 * t:.1f} ms" for name, t in best.items()})
print(f"the series take {best['series'] / best['reverse']:.2f} of the time (torch {torch.__version__}, CPU)")

# %% [markdown]
# ## Compiled
#
# `mg.compile` takes the whole residual, with the series inside, and compiles its backward too. The derivatives are the same.


# %%
compiled = mg.compile(by_series, fullgraph=True, dynamic=False)
assert torch.allclose(compiled(network, points), by_series(network, points))
best = seconds({"series": by_series, "compiled": compiled})
print(f"compiled, the series take {best['compiled'] / best['series']:.2f} of the time")

# %% [markdown]
# ## Train it


# %%
def train(residual, steps, planned=600):
    torch.manual_seed(0)
    u = Network().double()
    optimizer = torch.optim.Adam(u.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, planned)
    losses = []
    for _ in range(steps):
        x = 2 * torch.pi * torch.rand(128, 1, dtype=torch.float64)
        loss = residual(u, x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, u


losses, u = train(by_series, 600)
same, _ = train(by_reverse, 10)
assert max(abs(a - b) / b for a, b in zip(losses, same)) < 1e-6  # the same training
x = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
with torch.no_grad():
    found = u(x[:, None])
error = ((found - solution(x)).norm() / solution(x).norm()).item()
print(f"loss {losses[0]:.3g} -> {losses[-1]:.3g}, relative error of u: {error:.1e}")
assert losses[-1] < losses[0] / 100

# %%
pyplot.plot(x, solution(x), label="solution")
pyplot.plot(x, found, "--", label="network")
pyplot.xlabel("x")
pyplot.legend()
pyplot.show()

# %% [markdown]
# ## When it pays
#
# The higher the order, the more: each order more about doubles the time in reverse mode, and adds little to a series. This
# equation has order five. At order four, as in the Kuramoto-Sivashinsky equation of `examples/pinn.py`, the series take a
# third of the time; at order six, less than a tenth. For a Laplacian in two dimensions the two ways take about the same
# time, as there are only two second derivatives, each cheap in reverse mode; the series need less memory.
# [Jets and Laplacians](../forward_ad_jets.md) lists the cost of each derivative.
