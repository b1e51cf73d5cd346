# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A whitening layer that trains
#
# A whitening layer multiplies centred features by $C^{-1/2}$, where $C$ is their covariance plus a small multiple of the
# identity. The usual way is an eigendecomposition. Its derivative divides by differences of eigenvalues, and they become
# equal as soon as two units are dead: two rows of $C$ are then zero.

# %%
import warnings

import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch import nn

import torch_manualgrad as mg

torch.set_num_threads(1)
images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
images = images.float() / 16
EPS = 1e-2

# %% [markdown]
# ## Two ways to the same matrix
#
# Both compute $(C + \epsilon I)^{-1/2}$. The second differentiates the function of the matrix itself, which is smooth
# also where eigenvalues are equal.


# %%
def by_eigh(C):
    values, vectors = torch.linalg.eigh(C)
    return (vectors * (values + EPS).rsqrt()) @ vectors.mT


def by_rsqrtm(C):
    return mg.linalg.rsqrtm(C + EPS * torch.eye(len(C), dtype=C.dtype), assume="hermitian")


class Whitening(nn.Module):
    def __init__(self, inverse_root):
        super().__init__()
        self.inverse_root = inverse_root

    def forward(self, x):
        x = x - x.mean(0)
        return x @ self.inverse_root(x.mT @ x / len(x))


# %% [markdown]
# ## Train it
#
# One layer with ReLU, whitened, and a classifier, on real digits. The weights and the batches are the same in each run.


# %%
def train(inverse_root, steps=120):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Whitening(inverse_root), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        batch = torch.randperm(1500)[:256]
        loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = network(images[1500:]).argmax(1) == labels[1500:]
    return losses, right.float().mean().item()


runs = {"eigh, PyTorch's derivative": train(by_eigh)}
with mg.override(), warnings.catch_warnings():
    warnings.simplefilter("ignore", mg.linalg.GaugeWarning)
    runs["eigh, under override"] = train(by_eigh)
runs["rsqrtm"] = train(by_rsqrtm)

for name, (losses, accuracy) in runs.items():
    lost = next((k for k, loss in enumerate(losses) if loss != loss), None)
    print(f"{name:28}", f"nan from step {lost}" if lost else f"accuracy {accuracy:.0%}")
assert runs["rsqrtm"][1] > 0.85

# %%
for (name, (losses, _)), style in zip(runs.items(), ("-", "--", ":")):
    pyplot.semilogy(losses, style, label=name)
pyplot.xlabel("step")
pyplot.ylabel("cross entropy")
pyplot.legend()
pyplot.show()

# %% [markdown]
# ## Why
#
# With two dead units, $C$ has two eigenvalues that are exactly 0. PyTorch's derivative of `eigh` divides by their
# difference, and gives nan, even though no loss of $C^{-1/2}$ depends on the choice of the two eigenvectors.

# %%
C = torch.diag(torch.tensor([2.0, 1.0, 0.0, 0.0], dtype=torch.float64))
weights = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)


def gradient(inverse_root):
    return torch.func.grad(lambda C: (weights * inverse_root(C)).sum())(C)


stock, exact = gradient(by_eigh), gradient(by_rsqrtm)
with mg.override():
    ours = gradient(by_eigh)
print("PyTorch's gradient is nan in", int(stock.isnan().sum()), "of 16 entries")
print("under override it differs from the exact one by", float((ours - exact).abs().max() / exact.abs().max()))
assert stock.isnan().any()
assert torch.allclose(ours, exact)

# %% [markdown]
# ## Which to use
#
# `mg.linalg.rsqrtm` where you can change the code: it needs no choice of eigenvectors, and is exact in every mode and
# order. `mg.override()` where you cannot. It decides from the cotangents whether the loss depends on the choice of basis, and
# warns if it cannot rule that out.
