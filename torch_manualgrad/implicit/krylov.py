"""Iterative solvers of linear systems on one vector: cg, minres, gmres, bicgstab.

Each is called as ``(A, b, M, rtol, atol, maxiter)`` and returns the solution and the number of products with $A$. $A$ and
the preconditioner $M$, which approximates $A^-1$, are functions of a vector. A solver stops where
$||b - A x|| <= max(rtol ||b||, atol)$, after ``maxiter`` products, or if it breaks down; the caller checks the
residual.

References:
    Saad, Iterative Methods for Sparse Linear Systems (SIAM 2003), algorithms 6.9, 7.7 and 9.1; Paige and Saunders, SIAM J.
    Numer. Anal. 12 (1975) 617; van der Vorst, SIAM J. Sci. Stat. Comput. 13 (1992) 631.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["SOLVERS", "bicgstab", "cg", "gmres", "minres"]

Map = Callable[[Tensor], Tensor]
RESTART = 50  # vectors that gmres keeps


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _goal(b: Tensor, rtol: float, atol: float) -> float:
    return max(rtol * _norm(b), atol)


def cg(A: Map, b: Tensor, M: Map | None, rtol: float, atol: float, maxiter: int) -> tuple[Tensor, int]:
    """Conjugate gradients. $A$ and $M$ are Hermitian and positive definite."""
    x, r, goal = torch.zeros_like(b), b.clone(), _goal(b, rtol, atol)
    if _norm(r) <= goal:
        return x, 0
    p = z = r if M is None else M(r)
    rho = torch.vdot(r, z)
    for count in range(1, maxiter + 1):
        q = A(p)
        alpha = rho / torch.vdot(p, q)
        x = x + alpha * p
        r = r - alpha * q
        size = _norm(r)
        if size <= goal or not math.isfinite(size):
            return x, count
        z = r if M is None else M(r)
        before, rho = rho, torch.vdot(r, z)
        p = z + (rho / before) * p
    return x, maxiter


def minres(A: Map, b: Tensor, M: Map | None, rtol: float, atol: float, maxiter: int) -> tuple[Tensor, int]:
    """The minimal residual method. $A$ is Hermitian and may be indefinite; $M$ is Hermitian and positive definite."""
    x, goal, count = torch.zeros_like(b), _goal(b, rtol, atol), 0
    for _ in range(10):  # the recurrence's residual is in the norm of M, and drifts: compare with the true one
        r = b - A(x) if count else b
        size = _norm(r)
        if size <= goal or not math.isfinite(size) or count >= maxiter:
            return x, count
        change, used = _minres_cycle(A, r, M, goal / size, maxiter - count)
        x, count = x + change, count + used + 1
    return x, count


def _minres_cycle(A: Map, b: Tensor, M: Map | None, factor: float, maxiter: int) -> tuple[Tensor, int]:
    x = torch.zeros_like(b)
    r1 = r2 = b
    y = b if M is None else M(b)
    beta = math.sqrt(max(torch.vdot(b, y).real.item(), 0.0))
    if beta == 0:
        return x, 0
    phi, goal = beta, 0.5 * factor * beta
    old_beta = dbar = epsilon = 0.0
    c, s = -1.0, 0.0
    w = w2 = torch.zeros_like(b)
    tiny = torch.finfo(b.dtype).eps
    for count in range(1, maxiter + 1):
        v = y / beta
        y = A(v)
        if count > 1:
            y = y - (beta / old_beta) * r1
        alpha = torch.vdot(v, y).real.item()
        y = y - (alpha / beta) * r2
        r1, r2 = r2, y
        y = r2 if M is None else M(r2)
        old_beta, beta = beta, math.sqrt(max(torch.vdot(r2, y).real.item(), 0.0))
        before = epsilon
        delta, gbar = c * dbar + s * alpha, s * dbar - c * alpha
        epsilon, dbar = s * beta, -c * beta
        gamma = max(math.hypot(gbar, beta), tiny)
        c, s = gbar / gamma, beta / gamma
        step, phi = c * phi, s * phi
        w1, w2 = w2, w
        w = (v - before * w1 - delta * w2) / gamma
        x = x + step * w
        if abs(phi) <= goal or beta <= tiny * old_beta or not math.isfinite(phi):
            return x, count
    return x, maxiter


def gmres(A: Map, b: Tensor, M: Map | None, rtol: float, atol: float, maxiter: int) -> tuple[Tensor, int]:
    """The generalized minimal residual method, restarted, with $M$ on the right. $A$ is any matrix."""
    x, goal, count = torch.zeros_like(b), _goal(b, rtol, atol), 0
    r, last = b, math.inf
    while (size := _norm(r)) > goal and math.isfinite(size) and count < maxiter and size < last * (1 - 1e-3):
        last = size
        change, used = _gmres_cycle(A, r, M, goal, min(RESTART, b.numel(), maxiter - count))
        x = x + change
        r = b - A(x)
        count += used + 1
    return x, count


def _gmres_cycle(A: Map, r: Tensor, M: Map | None, goal: float, steps: int) -> tuple[Tensor, int]:
    size = _norm(r)
    basis = r.new_empty(steps + 1, r.numel())
    basis[0] = r / size
    # the triangular factor of the Hessenberg matrix, by Givens rotations, in Python's numbers
    columns: list[list[complex]] = []
    rotations: list[tuple[float, complex]] = []
    g: list[complex] = [size]
    for k in range(steps):
        w = A(basis[k] if M is None else M(basis[k]))
        before = _norm(w)
        h = torch.zeros_like(basis[: k + 1, 0])
        below = before
        for _ in range(2):  # Gram-Schmidt, twice if much has cancelled
            change = basis[: k + 1].conj() @ w
            w = w - change @ basis[: k + 1]
            h = h + change
            above, below = below, _norm(w)
            if below > 0.7 * above:
                break
        column: list[complex] = h.tolist()
        for i, (c, s) in enumerate(rotations):
            a, d = column[i], column[i + 1] if i + 1 < len(column) else 0
            column[i], column[i + 1 :] = c * a + s * d, [-s.conjugate() * a + c * d, *column[i + 2 :]]
        top = column[k]
        length = math.hypot(abs(top), below)
        if length == 0 or not math.isfinite(length):
            break
        c, s = abs(top) / length, (top / abs(top) if top else 1) * below / length
        rotations.append((c, s))
        column[k] = c * top + s * below
        columns.append(column)
        g[k:] = [c * g[k], -s.conjugate() * g[k]]
        if abs(g[k + 1]) <= goal or below <= torch.finfo(r.dtype).eps * before:
            break
        basis[k + 1] = w / below
    count = len(columns)
    y: list[complex] = [0.0] * count
    for i in reversed(range(count)):
        rest = sum(columns[j][i] * y[j] for j in range(i + 1, count))
        y[i] = (g[i] - rest) / columns[i][i] if columns[i][i] else 0.0
    change = torch.tensor(y, dtype=r.dtype, device=r.device) @ basis[:count]
    return change if M is None else M(change), count


def bicgstab(A: Map, b: Tensor, M: Map | None, rtol: float, atol: float, maxiter: int) -> tuple[Tensor, int]:
    """The stabilized biconjugate gradient method, with $M$ on the right. $A$ is any matrix."""
    x, r, goal, count = torch.zeros_like(b), b, _goal(b, rtol, atol), 0
    shadow, rho, p = r, torch.vdot(b, b), r
    while _norm(r) > goal and count < maxiter:
        u = p if M is None else M(p)
        v = A(u)
        alpha = rho / torch.vdot(shadow, v)
        s = r - alpha * v
        z = s if M is None else M(s)
        t = A(z)
        count += 2
        square = torch.vdot(t, t)
        omega = torch.vdot(t, s) / square if square.abs() > 0 else square
        x = x + alpha * u + omega * z
        r = s - omega * t
        size = _norm(r)
        if not math.isfinite(size):
            break
        before, rho = rho, torch.vdot(shadow, r)
        if not abs(rho) > torch.finfo(b.dtype).eps * size * _norm(shadow):  # a breakdown: restart here
            r = b - A(x)
            count += 1
            shadow, rho, p = r, torch.vdot(r, r), r
            continue
        p = r + (rho / before) * (alpha / omega) * (p - omega * v)
    return x, count


#: By name.
SOLVERS = {"cg": cg, "minres": minres, "gmres": gmres, "bicgstab": bicgstab}
