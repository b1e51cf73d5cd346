# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Why is my second derivative nan?
#
# A gradient penalty keeps the slope of a network near 1. It differentiates a derivative, so each operator of the network needs
# a second derivative that is right. Here is a network for which PyTorch's is nan, the search for the cause, and the way out.

# %%
import torch
from torch import nn

import torch_manualgrad as mg

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## A network that breaks in the first step
#
# The network reads 8 x 8 images in patches of 2 x 2, and takes the length of each filtered patch. Images have black
# corners, so some patches are exactly zero.

# %%
images = torch.rand(32, 1, 8, 8)
images[:, :, :2, :2] = 0
images[:, :, -2:, -2:] = 0
targets = images.mean((1, 2, 3))


class Lengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(1, 4, 2, stride=2, bias=False)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        lengths = torch.linalg.vector_norm(self.filters(x), dim=1)
        return self.head(lengths.flatten(1)).squeeze(1)


def step(network, optimizer):
    """One step with a gradient penalty; the loss before it."""
    x = images.clone().requires_grad_()
    value = network(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    penalty = (slope.square().sum((1, 2, 3)) - 1).square().mean()
    loss = (value - targets).square().mean() + 0.1 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(steps):
    torch.manual_seed(0)
    network = Lengths()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    return [step(network, optimizer) for _ in range(steps)], network


losses, network = train(3)
print("losses:", losses)
print("nan in:", [name for name, p in network.named_parameters() if p.isnan().any()])
assert torch.tensor(losses[1:]).isnan().all()

# %% [markdown]
# The first loss is a number, so the forward and the first derivative are finite. The gradient of the penalty is not.
#
# ## Find the operation
#
# `trace_nan` runs a function in every mode, and names the operation that made the first nan out of finite numbers.

# %%
network = Lengths()
modes = ("forward", "rev", "rev-rev")
report = mg.testing.trace_nan(lambda x: network(x).sum(), images[:1], modes=modes)
print(report)
assert list(report.origins) == ["rev-rev"]

# %% [markdown]
# The forward and reverse mode are clean; reverse over reverse is not. The operation belongs to the backward of the norm. Its first
# derivative is $x / \vert x \vert$, which PyTorch sets to 0 at $x = 0$. It does so after the division, and the derivative of that
# division is 0 / 0.
#
# ## Check before it happens
#
# `audit` observes one training step, and lists the operators that are differentiated in a mode where PyTorch is known to be wrong.

# %%
network = Lengths()
with mg.audit() as report:
    step(network, torch.optim.SGD(network.parameters(), lr=0.0))
for operator in report.doubtful:
    print(operator.operator)
assert "aten::linalg_vector_norm" in [d.operator for d in report.doubtful]

# %% [markdown]
# ## Remedies that do not help
#
# - `torch.where(x == 0, 0, x.norm())` selects after the norm: its gradient is 0 times nan.
# - An eps under the root gives another function, whose second derivative at 0 is 1 / eps.
# - `torch.nan_to_num` on gradients hides this nan, and the next.
#
# ## The way out
#
# The rule of the norm has the convention "zero at a kink, in every order". Under `mg.override()` it acts wherever the
# norm is called, and the forward values stay bitwise identical.

# %%
with mg.override():
    mended, network = train(60)
print(f"losses: {mended[0]:.4f} ... {mended[-1]:.4f}")
assert mended[0] == losses[0]
assert all(p.isfinite().all() for p in network.parameters())
assert mended[-1] < mended[0]

# %% [markdown]
# The same helps with a norm in a distance, a normalization, or a loss, and with every call that reaches `linalg.vector_norm`,
# `torch.norm`, `cdist`, `dist` or `pdist`.
