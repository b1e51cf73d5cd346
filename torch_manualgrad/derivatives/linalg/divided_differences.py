"""The derivative of a function of a Hermitian matrix, as a sum over divided differences.

For $A = V diag(l) V^H$ and $F(A) = V diag(f(l)) V^H$, the derivative of order $k$ in the directions $E_1$, ..., $E_k$
is $V X V^H$ with $E~ = V^H E V$ and

    $X_(i_0 i_k)$ is the sum over the orders of $E_1, ..., E_k$ and over $i_1, ..., i_(k-1)$ of
                $f[l_(i_0), ..., l_(i_k)] (E~_1)_(i_0 i_1) (E~_2)_(i_1 i_2) ... (E~_k)_(i_(k-1) i_k)$.

References:
    Daleckii and Krein, AMS Translations 47 (1965) 1; Bhatia, Matrix Analysis (1997), section V.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from torch import Tensor

_CHUNK = 2**20  # the largest number of entries of a table of divided differences in memory


def contract(table: Callable[[Sequence[Tensor]], Tensor], count: int, E: Tensor) -> Tensor:
    """$X$ of the module's docstring, from $E~$; in blocks of rows, because the table has $n^(k+1)$ entries.

    Args:
        table: the divided differences for $k + 1$ index tensors of one shape, in ascending order in each entry.
        count: the number of eigenvalues, batch included.
        E: $E~$, (*, k, n, n).
    """
    order, n = E.shape[-3], E.shape[-1]
    every = torch.arange(n, device=E.device)
    letters = "abcdefghijklmnopqrstuvw"[: order + 1]
    factors = [f"...{letters[i : i + 2]}" for i in range(order)]
    equation = f"...{letters},{','.join(factors)}->...{letters[0]}{letters[-1]}"
    blocks = []
    for rows in every.split(max(1, _CHUNK // max(1, count * n ** (order - 1)))):
        nodes = torch.stack(torch.meshgrid(rows, *[every] * order, indexing="ij")).sort(0).values
        differences = table(nodes.unbind()).to(E.dtype)
        block = torch.zeros((), dtype=E.dtype, device=E.device)
        for first, *others in permutations(E.unbind(-3)):
            block = block + torch.einsum(equation, differences, first[..., rows, :], *others)
        blocks.append(block)
    return torch.cat(blocks, -2) if blocks else E[..., 0, :, :]
