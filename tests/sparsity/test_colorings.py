"""Colorings: validity, the numbers of published examples, and C++ next to Python."""

from __future__ import annotations

import pytest
import torch

from torch_manualgrad.core import libraries
from torch_manualgrad.sparsity import color, greedy
from torch_manualgrad.sparsity.coloring import colored
from torch_manualgrad.sparsity.pattern import pattern_of

ORDERINGS = ["natural", "largest_first", "smallest_last", "incidence", "random"]


def tridiagonal(n):
    return torch.ones(n, n).triu(-1).tril(1)


def arrow(n):
    found = torch.eye(n)
    found[0] = found[:, 0] = 1
    return found


def stencil(rows, columns):
    """The five points of a grid with free boundaries."""
    a, b = (tridiagonal(n) - torch.eye(n) for n in (rows, columns))
    return torch.kron(a, torch.eye(columns)) + torch.kron(torch.eye(rows), b) + torch.eye(rows * columns)


def matrix(*rows):
    return torch.tensor([[float(c) for c in row] for row in rows])


# Figures of the papers that the examples of SparseMatrixColorings are taken from, and the numbers of colors there.
FIGURE_4_1 = matrix("110000", "111011", "011100", "001101", "010010", "010101")
FIGURE_6_1 = matrix(
    "1100001000", "1110100000", "0111010000", "0011000001", "0100110100", "0010110010", "1000001100", "0000101110",
    "0000010111", "0001000011",
)  # fmt: skip


def random(m, n, per_row, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(m, n, generator=generator) < per_row / n).double()


def symmetric(n, per_row, seed):
    found = random(n, n, per_row / 2, seed)
    return ((found + found.T + torch.eye(n)) > 0).double()


def is_valid(a, colors, kind) -> bool:
    """By the definition, with loops over everything."""
    a = a != 0
    if kind == "rows":
        return is_valid(a.T, colors, "columns")
    one_hot = torch.nn.functional.one_hot(colors).double()
    if kind == "columns":
        return bool((a.double() @ one_hot <= 1).all())
    n = len(a)
    edges = [(i, j) for i in range(n) for j in range(n) if i != j and a[i, j]]
    if any(colors[i] == colors[j] for i, j in edges):
        return False
    for c in range(one_hot.shape[1]):
        for d in range(c):
            between = [(i, j) for i, j in edges if (int(colors[i]), int(colors[j])) == (c, d)]
            if kind == "star":  # the graph of two colors consists of stars: each edge has an end without another
                degree = torch.zeros(n)
                for i, j in between:
                    degree[i] += 1
                    degree[j] += 1
                if any(degree[i] > 1 and degree[j] > 1 for i, j in between):
                    return False
            else:  # of trees
                parent = list(range(n))

                def find(i, parent=parent):
                    while parent[i] != i:
                        i = parent[i]
                    return i

                for i, j in between:
                    if find(i) == find(j):
                        return False
                    parent[find(i)] = find(j)
    return True


@pytest.mark.parametrize("ordering", [*ORDERINGS, "auto"])
@pytest.mark.parametrize("kind", ["columns", "rows", "star", "acyclic"])
@pytest.mark.parametrize("seed", range(3))
def test_colorings_are_valid(kind, ordering, seed):
    a = symmetric(25, 4, seed) if kind in ("star", "acyclic") else random(20, 30, 3, seed)
    assert is_valid(a, color(a, kind, ordering), kind)


@pytest.mark.parametrize(
    "a, kind, most",
    [
        (tridiagonal(40), "columns", 3),
        (tridiagonal(40), "star", 3),
        (tridiagonal(40), "acyclic", 2),
        (arrow(40), "columns", 40),
        (arrow(40), "star", 2),
        (arrow(40), "acyclic", 2),
        (torch.eye(9), "columns", 1),
        (torch.ones(5, 7), "columns", 7),
        (torch.ones(5, 7), "rows", 5),
        (torch.ones(30, 30).triu(-4).tril(4), "columns", 9),
        (FIGURE_4_1, "star", 3),
        (FIGURE_6_1, "acyclic", 3),
        (FIGURE_6_1, "star", 5),
    ],
)
def test_numbers_of_colors(a, kind, most):
    assert int(color(a, kind).max()) + 1 <= most


def test_figures_of_papers_have_the_published_numbers_of_colors():
    """Figure 4.1 and 6.1 of Gebremedhin, Manne and Pothen (2005), and figure 1 of Gebremedhin et al. (2009)."""
    assert int(color(FIGURE_4_1, "star").max()) + 1 == 3
    assert int(color(FIGURE_6_1, "acyclic").max()) + 1 == 3


def test_empty_patterns():
    assert color(torch.zeros(3, 4)).tolist() == [0, 0, 0, 0]
    assert color(torch.zeros(0, 4)).tolist() == [0, 0, 0, 0]
    assert color(torch.zeros(4, 0)).tolist() == []
    assert color(torch.zeros(0, 0), "star").tolist() == []
    assert color(torch.zeros(3, 3), "acyclic").tolist() == [0, 0, 0]


def test_errors():
    with pytest.raises(ValueError, match="expected a symmetric pattern for star coloring"):
        color(torch.ones(3, 3).triu(), "star")
    with pytest.raises(ValueError, match="kind: expected 'columns' or 'rows'"):
        color(torch.ones(3, 3), "purple")
    with pytest.raises(TypeError, match="pattern: expected a matrix"):
        color(torch.ones(3))
    with pytest.raises(TypeError, match="pattern: expected a tensor or a sparse matrix"):
        color([[1]])


def in_python(monkeypatch):
    """Have the operators run in Python."""
    for name in greedy.__all__:
        monkeypatch.setattr(greedy, name, getattr(greedy, f"_{name}"))


@pytest.mark.skipif(not any(x.loaded for x in libraries.status() if x.device == "cpu"), reason="no compiled library")
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("kind", ["columns", "rows", "star", "acyclic"])
def test_kernels_and_python_return_the_same(kind, ordering, monkeypatch):
    patterns = [
        symmetric(60, 5, 0), symmetric(40, 9, 1), tridiagonal(30), arrow(20), stencil(6, 7), FIGURE_4_1, FIGURE_6_1
    ]  # fmt: skip
    if kind in ("columns", "rows"):
        patterns += [random(50, 70, 4, 0), random(1, 5, 3, 1), torch.zeros(3, 2)]
    compiled = [colored(pattern_of(a, "a"), kind, ordering) for a in patterns]
    in_python(monkeypatch)
    for a, found in zip(patterns, compiled):
        assert torch.equal(colored(pattern_of(a, "a"), kind, ordering), found)


@pytest.mark.skipif(not any(x.loaded for x in libraries.status() if x.device == "cpu"), reason="no compiled library")
def test_kernel_and_python_eliminate_in_the_same_order():
    for a in (symmetric(60, 5, 0), tridiagonal(30), arrow(20), stencil(6, 7), FIGURE_6_1, torch.zeros(3, 3)):
        pattern = pattern_of(a, "a")
        colors = colored(pattern, "acyclic")
        found = greedy.elimination(pattern.crow, pattern.col, colors)
        assert torch.equal(greedy._elimination(pattern.crow, pattern.col, colors), found)
        assert (found > -2).all()


def test_kernels_check_their_arguments():
    pattern = pattern_of(tridiagonal(4), "a")
    order = torch.arange(4)
    with pytest.raises(RuntimeError, match="symmetric"):
        greedy.star(torch.tensor([0, 1, 1]), torch.tensor([1]), torch.arange(2))
    if any(x.loaded for x in libraries.status() if x.device == "cpu"):
        with pytest.raises(RuntimeError, match="order: no permutation"):
            greedy.star(pattern.crow, pattern.col, torch.zeros(4, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="is out of range"):
            greedy.acyclic(pattern.crow, pattern.col + 9, order)
        with pytest.raises(RuntimeError, match="expected a contiguous tensor of int64"):
            greedy.star(pattern.crow.int(), pattern.col, order)
        with pytest.raises(RuntimeError, match="colors: 7 is out of range"):
            greedy.elimination(pattern.crow, pattern.col, torch.full((4,), 7))


def test_stencils():
    """Measured: 5 is the least possible, and the number of entries of a row."""
    assert int(color(stencil(20, 20)).max()) + 1 <= 8
    for ordering in ORDERINGS:
        assert is_valid(stencil(8, 9), color(stencil(8, 9), "columns", ordering), "columns")
