"""A gradient penalty on real digits: PyTorch's own derivatives, and those of torch_manualgrad.

The network looks at edges. A convolution gives pairs of filter responses, and the length of each pair, a vector norm,
says how strong an edge is, whichever way it runs. Training adds the penalty of WGAN-GP, (||d score / d image|| - 1)^2.
The penalty is made of a derivative, so training differentiates every norm in the network twice. Where the image is
blank, both responses are exactly zero, and the norm is differentiated twice at zero.

The last layer starts at zero, as is common, so at the first step the input gradient is exactly zero too. The norm in
the penalty is differentiated only once. There PyTorch's derivative at zero is 0, like ours, and harmless.

Run it:  python examples/digits_gradient_penalty.py
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import torch_manualgrad as mg

# The whole difference between the two runs.
DERIVATIVES = {"stock": nullcontext, "override": mg.override}


class EdgeNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(1, 32, kernel_size=3, bias=False)
        self.hidden = nn.Linear(16 * 6 * 6, 64)
        self.last = nn.Linear(64, 10)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def edges(self, images: Tensor) -> Tensor:
        pairs = self.filters(images).unflatten(1, (16, 2))
        return torch.linalg.vector_norm(pairs, dim=2)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.hidden(self.edges(images).flatten(1)).tanh())


def input_gradient_norm(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The norm of d(score of the right class) / d(image), one for each image; differentiable."""
    images = images.detach().requires_grad_()
    scores = model(images).gather(1, labels[:, None])
    (gradients,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    return torch.linalg.vector_norm(gradients.flatten(1), dim=1)


class Run:
    """One network in training, and its record."""

    def __init__(self, model: EdgeNetwork, penalty: float) -> None:
        self.model = copy.deepcopy(model)
        self.penalty = penalty
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.accuracies: list[tuple[int, float]] = []
        self.first_norm = 0.0  # of the input gradient, at the first step
        self.nan_step: int | None = None  # after this step a weight is nan
        self.nan_weights: list[str] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(images), labels)
        if self.penalty:
            norms = input_gradient_norm(self.model, images, labels)
            if not self.losses:
                self.first_norm = norms.max().item()
            loss = loss + self.penalty * ((norms - 1) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        if self.nan_step is None:
            self.nan_weights = [name for name, w in self.model.named_parameters() if w.isnan().any()]
            self.nan_step = len(self.losses) if self.nan_weights else None

    @torch.no_grad()
    def test(self, images: Tensor, labels: Tensor) -> None:
        right = self.model(images).argmax(1) == labels
        self.accuracies.append((len(self.losses), right.double().mean().item()))

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1][1]

    def __str__(self) -> str:
        return f"loss {self.losses[-1]:.3f} accuracy {self.accuracy:5.1%}"


def train(data: list[Tensor], penalty: float, steps: int, seed: int = 0) -> dict[str, Run]:
    """Both runs, step by step: the same first weights, the same batches."""
    train_x, test_x, train_y, test_y = data
    torch.manual_seed(seed)
    model = EdgeNetwork()
    runs = {name: Run(model, penalty) for name in DERIVATIVES}
    title = "with penalty   " if penalty else "without penalty"
    layout = "{desc} {n_fmt}/{total_fmt} {bar} {elapsed} {postfix}"
    with tqdm(range(1, steps + 1), title, bar_format=layout, ncols=120, mininterval=0.5) as progress:
        for step in progress:
            batch = torch.randint(len(train_x), (64,))
            for name, run in runs.items():
                with DERIVATIVES[name]():
                    run.step(train_x[batch], train_y[batch])
                if step == 1 or step % 10 == 0 or step == steps:
                    run.test(test_x, test_y)
            progress.set_postfix_str(" | ".join(f"{name}: {run}" for name, run in runs.items()), refresh=False)
    return runs


def digits() -> list[Tensor]:
    """Training images, test images, training labels, test labels; images are 1 x 8 x 8, from 0 to 1."""
    bunch = load_digits()
    parts = train_test_split(bunch.images, bunch.target, test_size=0.25, random_state=0, stratify=bunch.target)
    images = [torch.as_tensor(part, dtype=torch.float32).div(16).unsqueeze(1) for part in parts[:2]]
    return [*images, *(torch.as_tensor(part) for part in parts[2:])]


def report(data: list[Tensor], penalized: dict[str, Run], plain: dict[str, Run]) -> float:
    """Print the measurements. Returns the largest difference between the losses of the two runs without penalty."""
    blank = nn.functional.max_pool2d(data[0], 3, stride=1).eq(0).double().mean().item()
    print(f"\nWindows of 3 x 3 pixels that are blank in the training images: {blank:.1%}.")
    for name, run in penalized.items():
        print(f"{name}: the largest input gradient at the first step has norm {run.first_norm:g}; ", end="")
        if run.nan_step is None:
            print(f"no weight became nan in {len(run.losses)} steps.")
        else:
            print(f"after step {run.nan_step}, nan in {', '.join(run.nan_weights)}.")

    print(
        f"\n{'penalty':<9}{'derivatives':<13}{'nan after step':<16}{'first loss':>10}{'last loss':>11}{'accuracy':>10}"
    )
    for label, runs in (("yes", penalized), ("no", plain)):
        for name, run in runs.items():
            nan = "never" if run.nan_step is None else str(run.nan_step)
            losses = f"{run.losses[0]:>10.4f}{run.losses[-1]:>11.4f}"
            print(f"{label:<9}{name:<13}{nan:<16}{losses}{run.accuracy:>10.1%}")

    stock, override = (torch.tensor(run.losses, dtype=torch.float64) for run in plain.values())
    difference = (stock - override).abs().max().item()
    print(f"\nWithout the penalty the two loss curves differ by at most {difference:.1e}.")
    for name, context in DERIVATIVES.items():
        with context():
            strength = plain[name].model.edges(data[0][:1])
        print(f"The backward of the norm in that network, {name}: {strength.grad_fn.name()}.")
    return difference


def plot(penalized: dict[str, Run], plain: dict[str, Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    for column, (title, runs) in enumerate((("with gradient penalty", penalized), ("without", plain))):
        losses, accuracies = axes[:, column]
        for (name, run), style in zip(runs.items(), ({"lw": 4, "alpha": 0.4}, {"lw": 1.2}), strict=True):
            (line,) = losses.plot(range(1, len(run.losses) + 1), run.losses, label=name, **style)
            accuracies.plot(*zip(*run.accuracies, strict=True), color=line.get_color(), label=name, **style)
            if run.nan_step is not None:
                losses.plot(1, run.losses[0], "x", color=line.get_color(), ms=10)
                losses.annotate(
                    f"{name}: nan after step {run.nan_step}", (1, run.losses[0]), (20, -6), textcoords="offset points"
                )
        losses.set(title=title, ylabel="loss")
        accuracies.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
        losses.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"Plot: {path}")


def main(steps: int = 300, penalty: float = 0.1, out: str | Path = "out") -> dict[str, object]:
    """Train all four, print, plot. Returns the measurements."""
    data = digits()
    print("Handwritten digits, 1 x 8 x 8. The same network, seed and batches, with PyTorch's derivatives (stock) and")
    print("under mg.override(); first with the gradient penalty, then without.\n")
    penalized = train(data, penalty, steps)
    plain = train(data, 0.0, steps)
    difference = report(data, penalized, plain)
    plot(penalized, plain, Path(out) / "digits_gradient_penalty.png")
    return {"penalized": penalized, "plain": plain, "difference": difference}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (default: 300)")
    parser.add_argument("--penalty", type=float, default=0.1, help="weight of the gradient penalty (default: 0.1)")
    parser.add_argument("--out", default="out", help="folder for the plot (default: out)")
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)  # the network is too small to share out
    main(**arguments)
