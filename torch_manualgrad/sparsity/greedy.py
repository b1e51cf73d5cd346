"""Orderings and greedy colorings of patterns, as operators: in Python, and in C++ if the library is built.

The kernels in csrc/sparsity return the same, entry for entry. A bipartite graph is a list of nets for each vertex, and the
vertices of each net: to color columns, a vertex is a column and a net a row.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["acyclic", "degree_order", "distance2", "elimination", "star"]

_library = torch.library.Library("manualgrad_sparsity", "FRAGMENT")
_BIPARTITE = "Tensor vertex_ptr, Tensor nets, Tensor net_ptr, Tensor vertices"
for _schema in (
    f"degree_order({_BIPARTITE}, int kind) -> Tensor",
    f"distance2({_BIPARTITE}, Tensor order) -> Tensor",
    "star(Tensor crow, Tensor col, Tensor order) -> Tensor",
    "acyclic(Tensor crow, Tensor col, Tensor order) -> Tensor",
    "elimination(Tensor crow, Tensor col, Tensor colors) -> Tensor",
):
    _library.define(_schema)
_ops = torch.ops.manualgrad_sparsity

Lists = Sequence[Sequence[int]]


def _rows(begin: Tensor, entry: Tensor) -> list[list[int]]:
    ends, entries = begin.tolist(), entry.tolist()
    return [entries[a:b] for a, b in zip(ends, ends[1:])]


def _neighbors(v: int, nets: Lists, vertices: Lists) -> Iterator[int]:
    """The vertices that share a net with ``v``, each once."""
    seen = {v}
    for net in nets[v]:
        for w in vertices[net]:
            if w not in seen:
                seen.add(w)
                yield w


def _degree_order(vertex_ptr: Tensor, nets: Tensor, net_ptr: Tensor, vertices: Tensor, kind: int) -> Tensor:
    """The vertices in the order in which to color them: largest degree first (0), smallest last (1), incidence (2).

    References:
        Gebremedhin, Manne and Pothen, SIAM Review 47 (2005) 629, section 4.
    """
    of_vertex, of_net = _rows(vertex_ptr, nets), _rows(net_ptr, vertices)
    n = len(of_vertex)
    degree = [sum(1 for _ in _neighbors(v, of_vertex, of_net)) for v in range(n)]
    if kind == 0:
        return torch.tensor(sorted(range(n), key=lambda v: -degree[v]), dtype=torch.int64, device=nets.device)
    buckets: list[list[int]] = [[] for _ in range(n + 2)]  # entries with outdated keys are skipped
    order: list[int] = []
    if kind == 1:
        for v in range(n):
            buckets[degree[v]].append(v)
        key = 0
        while len(order) < n:
            if not buckets[key]:
                key += 1
                continue
            v = buckets[key].pop()
            if degree[v] != key:
                continue
            degree[v] = -1
            order.append(v)
            for w in _neighbors(v, of_vertex, of_net):
                if degree[w] > 0:
                    degree[w] -= 1
                    buckets[degree[w]].append(w)
            key = max(key - 1, 0)
        order.reverse()
    else:
        buckets[0] = sorted(range(n), key=lambda v: degree[v])
        ordered, key = [0] * n, 0
        while len(order) < n:
            if not buckets[key]:
                key -= 1
                continue
            v = buckets[key].pop()
            if ordered[v] != key:
                continue
            ordered[v] = -1
            order.append(v)
            for w in _neighbors(v, of_vertex, of_net):
                if ordered[w] >= 0:
                    ordered[w] += 1
                    buckets[ordered[w]].append(w)
            key = min(key + 1, n)
    return torch.tensor(order, dtype=torch.int64, device=nets.device)


def _least(forbidden: set[int]) -> int:
    c = 0
    while c in forbidden:
        c += 1
    return c


def _distance2(vertex_ptr: Tensor, nets: Tensor, net_ptr: Tensor, vertices: Tensor, order: Tensor) -> Tensor:
    """Colors such that vertices that share a net differ.

    References:
        Gebremedhin, Manne and Pothen, SIAM Review 47 (2005) 629, algorithm 3.2.
    """
    of_vertex, of_net = _rows(vertex_ptr, nets), _rows(net_ptr, vertices)
    color = [-1] * len(of_vertex)
    for v in order.tolist():
        color[v] = _least({color[w] for net in of_vertex[v] for w in of_net[net]})
    return torch.tensor(color, dtype=torch.int64, device=order.device)


class _Graph:
    """A symmetric pattern: the neighbors of each vertex with their places, and the place of (j, i) for each (i, j)."""

    def __init__(self, crow: Tensor, col: Tensor) -> None:
        begin, entry = crow.tolist(), col.tolist()
        places = {(i, entry[p]): p for i in range(len(begin) - 1) for p in range(begin[i], begin[i + 1])}
        if any((j, i) not in places for i, j in places):
            raise RuntimeError("manualgrad_sparsity: col: the pattern is not symmetric")
        self.count = len(begin) - 1
        self.around = [
            [(entry[p], p) for p in range(begin[i], begin[i + 1]) if entry[p] != i] for i in range(self.count)
        ]
        self.mirror = {p: places[j, i] for (i, j), p in places.items()}

    def edge(self, p: int) -> int:
        return min(p, self.mirror[p])


def _star(crow: Tensor, col: Tensor, order: Tensor) -> Tensor:
    """Colors such that neighbors differ, and each path of four vertices has three colors.

    References:
        Gebremedhin, Tarafdar, Manne and Pothen, SIAM J. Sci. Comput. 29 (2007) 1042, algorithm 4.1.
    """
    graph = _Graph(crow, col)
    color, shared = [-1] * graph.count, [False] * col.numel()  # at (x, w): another neighbor of x has the color of w
    for v in order.tolist():
        forbidden, first = {-1}, dict[int, int]()
        for w, _ in graph.around[v]:
            c = color[w]
            if c < 0:
                continue
            forbidden.add(c)
            if c in first:  # two neighbors of one color: v must differ from all around them
                forbidden.update(color[x] for u in (first[c], w) for x, _ in graph.around[u])
                continue
            first[c] = w
            forbidden.update(color[x] for x, p in graph.around[w] if shared[graph.mirror[p]])
        color[v] = c = _least(forbidden)
        for x, p in graph.around[v]:
            for y, q in graph.around[x]:
                if y != v and color[y] == c:
                    shared[q] = shared[graph.mirror[p]] = True
    return torch.tensor(color, dtype=torch.int64, device=order.device)


def _acyclic(crow: Tensor, col: Tensor, order: Tensor) -> Tensor:
    """Colors such that neighbors differ, and each cycle has three colors.

    References:
        Gebremedhin, Tarafdar, Manne and Pothen, SIAM J. Sci. Comput. 29 (2007) 1042, algorithm 3.1.
    """
    graph = _Graph(crow, col)
    color, parent = [-1] * graph.count, [*range(col.numel())]  # sets of edges: connected edges of two colors

    def find(e: int) -> int:
        while parent[e] != e:
            parent[e] = e = parent[parent[e]]
        return e

    for v in order.tolist():
        forbidden = {color[w] for w, _ in graph.around[v]} | {-1}
        visited: dict[int, int] = {}
        for w, _ in graph.around[v]:
            if color[w] < 0:
                continue
            for x, p in graph.around[w]:
                if color[x] not in forbidden and visited.setdefault(find(graph.edge(p)), w) != w:
                    forbidden.add(color[x])
        color[v] = c = _least(forbidden)
        first: dict[int, int] = {}
        for w, p in graph.around[v]:
            if color[w] < 0:
                continue
            if color[w] in first:
                parent[find(graph.edge(p))] = find(graph.edge(first[color[w]]))
            else:
                first[color[w]] = p
            for x, q in graph.around[w]:
                if x != v and color[x] == c:
                    parent[find(graph.edge(p))] = find(graph.edge(q))
    return torch.tensor(color, dtype=torch.int64, device=order.device)


def _elimination(crow: Tensor, col: Tensor, colors: Tensor) -> Tensor:
    """For each entry off the diagonal, the step that computes it, and the row of the compressed matrix that it is read
    from.

    An entry (v, w) is ``B[v, color of w]`` minus the entries of row v whose columns have that color too. It can be computed
    at step k if these are known from the steps before.

    Returns:
        (nnz), $2 k + 1$ if the entry is computed from its own row, $2 k$ if from that of its mirror image; -1 on the
        diagonal, and -2 if colors have a cycle, so that it is never known.
    """
    graph, color = _Graph(crow, col), colors.tolist()
    step, group = [-2] * col.numel(), [-1] * col.numel()
    for i, (a, b) in enumerate(zip(crow.tolist(), crow.tolist()[1:])):
        diagonal = a + bisect.bisect_left(col[a:b].tolist(), i)
        if diagonal < b and int(col[diagonal]) == i:
            step[diagonal] = -1
    members: dict[int, list[int]] = {}
    left = [0] * col.numel()
    for v in range(graph.count):
        first: dict[int, int] = {}
        for w, p in graph.around[v]:
            group[p] = first.setdefault(color[w], p)
            members.setdefault(group[p], []).append(p)
            left[group[p]] += 1
    now, k = [g for g in range(col.numel()) if left[g] == 1], 0
    while now:
        then = []
        for g in now:
            if left[g] != 1:
                continue
            p = next(q for q in members[g] if step[q] == -2)
            step[p], step[graph.mirror[p]], left[g] = 2 * k + 1, 2 * k, 0
            other = group[graph.mirror[p]]
            left[other] -= 1
            if left[other] == 1:
                then.append(other)
        now, k = then, k + 1
    return torch.tensor(step, dtype=torch.int64, device=col.device)


for _function in (_degree_order, _distance2, _star, _acyclic, _elimination):
    _library.impl(_function.__name__[1:], _function, "CompositeExplicitAutograd")

degree_order, distance2 = _ops.degree_order, _ops.distance2
star, acyclic, elimination = _ops.star, _ops.acyclic, _ops.elimination
