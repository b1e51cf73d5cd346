"""A few eigenpairs or singular triplets of an operator, given its products.

A solver finds $k$ eigenvectors $X_0$ of $A$ at the given parameters, without a derivative. Nearby, the basis
$X$ of the invariant subspace that begins at $X_0$ is a root of

    $F(X) = A X - X (X_0^H A X) + X_0 (X_0^H X - 1) S$,

with $X_0^H X = 1$. At $X_0$ its Jacobian has the columns $A - l_i$ outside of the subspace and a constant $s_i - l_i$
in it: it is Hermitian, and singular only if one of these eigenvalues equals one of the others. Within the subspace the
eigenpairs are those of the small matrices $X^H A X$ and $X^H X$, by `mg.linalg.eigh_generalized`, with its treatment of
repeated eigenvalues.

The singular values of $A$ are the positive eigenvalues of $(0, A; A^H, 0)$, with $(u, v) / sqrt(2)$ as the eigenvectors.

References:
    Stewart and Sun, Matrix Perturbation Theory (1990), section V.2; Golub and Van Loan, Matrix Computations (2013),
    section 8.6.1.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked, described
from ..core.internals import pytree
from ..linalg import Degeneracy, eigh_generalized
from ..linalg.decompositions import EXACT, Gauge
from ..programs.functions import Values, in_this_autocast, pull_back
from .arguments import Unknown, check_function
from .equations import called, of_lists, options_of
from .graphs import Node, solvers
from .problem import Problem, Root, solution
from .solving import DIRECT_UP_TO, Options, Report
from .vectors import Structure

__all__ = ["Eigenpairs", "SingularTriplets", "eigsh", "svds"]

_SOLVERS = ("auto", "direct", "scipy")
_FIXED = 0.5  # of the largest wanted eigenvalue: the shift of those in the subspace

Which = Literal["LA", "SA", "LM"]
Product = Callable[[Tensor, Values], Tensor]


class Eigenpairs(NamedTuple):
    """Eigenvalues (k,), in ascending order, and eigenvectors (n, k)."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class SingularTriplets(NamedTuple):
    """Left singular vectors (m, k), singular values (k,), in descending order, and right singular vectors (k, n)."""

    U: Tensor
    S: Tensor
    Vh: Tensor


class _Chosen(NamedTuple):
    """The options of a call, as arguments; ``degeneracy`` by its numbers."""

    k: int
    which: str
    solver: Any
    tangent_solver: Any
    degeneracy: tuple[float | None, float, float]
    gauge: Gauge
    rtol: float | None
    atol: float
    maxiter: int | None
    on_failure: str

    @property
    def options(self) -> Options:
        """The options of the linear problems, checked."""
        if isinstance(self.solver, str) and self.solver not in _SOLVERS:
            names = ", ".join(map(repr, _SOLVERS))
            raise ArgumentError(f"solver: expected one of {names} or a function, got {self.solver!r}")
        return options_of("tangent_solver", self.tangent_solver, self.rtol, self.atol, self.maxiter, self.on_failure)


def _numbers_of(degeneracy: Degeneracy) -> tuple[float | None, float, float]:
    return degeneracy.rtol, degeneracy.atol, degeneracy.broadening


class _Subspace(Problem):
    """An orthonormal basis of eigenvectors, by a solver. The tensors are an example of the vectors, (n,), and parameters.

    Args:
        product: ``(X, parameters)``, the products with the columns of a matrix.
        chosen: the options of the call.
        name: in messages.
        halves: of the matrix of a singular value decomposition, the rows of the first half, which has to have half of
            the norm; 0 of others.
    """

    count = 1

    def __init__(self, product: Product, chosen: _Chosen, name: str, halves: int = 0) -> None:
        super().__init__()
        self.product, self.k, self.which, self.solver = product, chosen.k, chosen.which, chosen.solver
        self.options, self.name, self.halves = chosen.options, name, halves

    def like(self, tensors: Values) -> Values:
        return [tensors[0].new_empty(tensors[0].shape[0], self.k)]

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        example, parameters = tensors[0], tensors[1:]

        def block(X: Tensor) -> Tensor:
            return self.product(X, parameters)

        X, _ = torch.linalg.qr(self._found(block, example))
        AX = block(X)
        H = X.mH @ AX
        # sorted, so that the shifts of the columns are their eigenvalues
        X = X @ torch.linalg.eigh((H + H.mH) / 2)[1]
        residual = torch.linalg.matrix_norm(AX - X @ (X.mH @ AX))
        scale = torch.linalg.matrix_norm(H)
        if self.halves:
            half = X[: self.halves]
            uneven = torch.linalg.matrix_norm(2 * half.mH @ half - torch.eye(self.k, dtype=X.dtype, device=X.device))
            residual = torch.maximum(residual, uneven * scale)
        bound = (self.options.relative(X.dtype, 1 / 2) * scale).clamp(min=self.options.atol)
        return [X], Report(residual, bound, bound.new_zeros((), dtype=torch.bool))

    def _found(self, block: Callable[[Tensor], Tensor], example: Tensor) -> Tensor:
        n, solver = example.shape[0], self.solver
        if callable(solver):
            _, X = solver(lambda x: block(x[:, None])[:, 0] if x.dim() == 1 else block(x), n, self.k)
            if not isinstance(X, Tensor) or X.shape != (n, self.k):
                raise ArgumentError(f"solver: expected eigenvectors of shape {[n, self.k]}, got {described(X)}")
            return X.to(example.dtype)
        if solver == "auto":
            solver = "direct" if n <= DIRECT_UP_TO or 4 * self.k >= n else "scipy"
        if solver == "direct":
            L, V = torch.linalg.eigh(block(torch.eye(n, dtype=example.dtype, device=example.device)))
            order = (L.abs() if self.which == "LM" else -L if self.which == "SA" else L).argsort(descending=True)
            return V[:, order[: self.k]]
        return self._by_arpack(block, example)

    def _by_arpack(self, block: Callable[[Tensor], Tensor], example: Tensor) -> Tensor:
        if importlib.util.find_spec("scipy") is None:
            raise ModuleNotFoundError(
                f"{self.name} of an operator with {example.shape[0]} rows needs scipy, which is not installed, or a solver"
            )
        sparse: Any = importlib.import_module("scipy.sparse.linalg")  # optional
        n = example.shape[0]

        def product(v: Any) -> Any:
            found: Any = block(torch.from_numpy(v.reshape(n, 1)).to(example))[:, 0].cpu().resolve_conj()
            return found.numpy()

        start = torch.cos(torch.arange(n, dtype=torch.float64, device="cpu")).to(example.dtype).numpy()
        operator = sparse.LinearOperator((n, n), matvec=product, dtype=start.dtype)
        try:
            _, X = sparse.eigsh(operator, self.k, which=self.which, v0=start, maxiter=self.options.maxiter)
        except sparse.ArpackNoConvergence as error:  # the residual shows it: warn or raise, as the user chose
            found = torch.from_numpy(error.eigenvectors)
            rest = torch.eye(n, self.k - found.shape[1], dtype=found.dtype, device="cpu")
            return torch.cat([found, rest], 1).to(example)
        return torch.from_numpy(X).to(example)

    def announce(self, report: Report) -> None:
        advice = "Raise maxiter, or pass another solver."
        if self.halves:
            advice += " A singular value of 0 has no derivative: ask for fewer."
        report.announce(self.name, self.options.on_failure, advice)


def _eigenpairs(subspace: _Subspace, example: Tensor, tensors: Values, chosen: _Chosen) -> Eigenpairs:
    """The eigenpairs of the problem at these parameters, tracked at every level."""
    which, k, tangent_solver = subspace.which, subspace.k, chosen.tangent_solver
    (X0,) = solution(subspace, [example.detach(), *[t.detach() for t in tensors]])

    def residual(xs: Values, parameters: Values) -> list[Tensor]:
        X, (X0, *rest) = xs[0], parameters
        AX = subspace.product(X, rest)
        L = (X0.conj() * subspace.product(X0, rest)).sum(0).real.detach()
        largest = L.abs().amax()
        shift = L + torch.where(largest == 0, 1, largest) * (-_FIXED if which == "LA" else _FIXED)
        inside = X0.mH @ X - torch.eye(k, dtype=X.dtype, device=X.device)
        return [AX - X @ (X0.mH @ AX) + X0 @ (inside * shift)]

    def nothing(xs: Values, x0: Values, parameters: Values) -> Report:
        zero = xs[0].new_zeros((), dtype=xs[0].dtype.to_real())
        return Report(zero, zero, zero.bool())

    if tangent_solver == "auto":
        size = X0.numel() * (2 if X0.is_complex() else 1)
        tangent_solver = "direct" if size <= DIRECT_UP_TO else "minres"
    options = subspace.options._replace(solver=of_lists(tangent_solver, Unknown(X0, "X"), "tangent_solver"))
    # not symmetric: the Jacobian is Hermitian only at X0, and a third derivative depends on how it changes
    root = Root(residual, 1, lambda xs, _: xs, nothing, lambda report: None, options, False, subspace.name)
    (X,) = solution(root, [X0, X0, *tensors])
    # X^H X is 1 at this point; its second derivatives are not 0
    L, W = eigh_generalized(
        X.mH @ subspace.product(X, tensors), X.mH @ X, degeneracy=Degeneracy(*chosen.degeneracy), gauge=chosen.gauge
    )
    return Eigenpairs(L, X @ W)


def _example(n: int, params: Sequence[Any], dtype: torch.dtype | None, device: Any) -> Tensor:
    """A vector with the dtype and device of the parameters, unless given."""
    tensors = [x for x in pytree.tree_leaves(tuple(params)) if isinstance(x, Tensor)]
    if dtype is None:
        numbers = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
        dtype = functools.reduce(torch.promote_types, numbers) if numbers else torch.get_default_dtype()
    if not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"dtype: expected a floating point or complex dtype, got {dtype}")
    if device is None:
        device = tensors[0].device if tensors else None
    return torch.zeros(n, dtype=dtype, device=device)


def _checked_count(n: int, k: int, largest: int) -> None:
    if n < 1:
        raise ArgumentError(f"n: expected at least 1, got {n}")
    if not 1 <= k <= largest:
        raise ArgumentError(f"k: expected 1 to {largest}, got {k}")


def _columns(function: Callable[[Tensor], Tensor], X: Tensor, rows: int, what: str) -> Tensor:
    """The products of a function of a vector with the columns of a matrix."""

    def column(x: Tensor) -> Tensor:
        found = function(x)
        if not isinstance(found, Tensor) or found.shape != (rows,) or found.is_complex() != x.is_complex():
            kind = "complex" if x.is_complex() else "real"
            raise ArgumentError(f"{what}: expected a {kind} tensor of shape {[rows]}, got {described(found)}")
        return found

    return torch.vmap(column, in_dims=1, out_dims=1)(X)


@checked
def eigsh(
    matvec: Callable[..., Any],
    n: int,
    k: int,
    *params: Any,
    which: Which = "LA",
    solver: str | Callable[..., Any] = "auto",
    tangent_solver: str | Callable[..., Any] = "auto",
    degeneracy: Degeneracy = EXACT,
    gauge: Gauge = "warn",
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    on_failure: Literal["warn", "raise", "ignore"] = "warn",
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> Eigenpairs:
    """The $k$ largest or smallest eigenvalues of a Hermitian operator, and their eigenvectors; derivatives of every order.

    A derivative is one linear solve for the change of the eigenvectors' span, with the operator deflated by it. Within
    the span, repeated eigenvalues are treated as in `mg.linalg.eigh`.

    Args:
        matvec: ``matvec(x, *params)``, the product of the Hermitian matrix with $x$, (n,) -> (n,), differentiable; it is
            called under ``torch.vmap``. Tensors that it reads, other than arguments, must not require grad.
        n: the order of the matrix.
        k: how many eigenpairs, 1 to n.
        params: trees of anything.
        which: "LA", the largest; "SA", the smallest; "LM", the largest in magnitude.
        solver: "direct", with the whole matrix; "scipy", with ARPACK on the CPU; "auto", direct up to 256 rows; or
            ``(matvec, n, k) -> (eigenvalues, eigenvectors)``, whose matvec takes (n,) or (n, m).
        tangent_solver: as in `root`, of a matrix (n, k); "auto" is direct up to 256 numbers, and minres above.
        degeneracy: as in `mg.linalg.eigh`.
        gauge: as in `mg.linalg.eigh`.
        rtol: of the eigenpairs, as $||A V - V L|| <= rtol ||L||$, and of the linear solves. None: eps^(1/2), eps^(2/3).
        atol: absolute tolerance of the same.
        maxiter: the most restarts of ARPACK, and the most products of a linear solve.
        on_failure: as in `root`.
        dtype: of the vectors; None: of the parameters.
        device: of the vectors; None: of the parameters.

    Returns:
        `Eigenpairs`: eigenvalues (k,) in ascending order, eigenvectors (n, k). Under vmap the solver is called for each
        element of the batch.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: ``matvec`` returns another shape, or a number or name is invalid.
        HiddenTensorError: ``matvec`` reads a tensor that requires grad and is not an argument.
        ModuleNotFoundError: scipy is needed and not installed.

    Note:
        Where not differentiable: where one of the $k$ eigenvalues equals one of the others. The linear solve then warns
        that it did not converge, or that its matrix is singular.

    References:
        Stewart and Sun, Matrix Perturbation Theory (1990), section V.2; ``scipy.sparse.linalg.eigsh``.
    """
    _checked_count(n, k, n)
    chosen = _Chosen(k, which, solver, tangent_solver, _numbers_of(degeneracy), gauge, rtol, atol, maxiter, on_failure)
    example = _example(n, params, dtype, device)
    node = Node("eigsh", (matvec,), ("x",), functools.partial(_like_eigenpairs, k))
    return called(_eigsh, [(matvec, "matvec")], example, params, chosen._asdict(), node)


def _like_eigenpairs(k: int, example: Tensor, params: Sequence[Any], results: Sequence[Any]) -> Eigenpairs:
    return Eigenpairs(example.real.new_empty(k), example.new_empty(example.shape[0], k))


def _eigsh(
    functions: Sequence[Any], wrapped: Any, example: Tensor, params: Sequence[Any], **options: Any
) -> Eigenpairs:
    chosen, n = _Chosen(**options), example.shape[0]
    given = Structure(params)
    tensors, here = given.split(params), in_this_autocast(functions[0])

    def product(X: Tensor, values: Values) -> Tensor:
        joined = given.join(values)
        return _columns(lambda x: here(x, *joined), X, n, "matvec")

    check_function(lambda xs, values: [product(xs[0][:, None], values)], "matvec", [example], tensors)
    return _eigenpairs(_Subspace(product, chosen, "eigsh"), example, tensors, chosen)


@checked
def svds(
    matvec: Callable[..., Any],
    n: int,
    k: int,
    *params: Any,
    solver: str | Callable[..., Any] = "auto",
    tangent_solver: str | Callable[..., Any] = "auto",
    degeneracy: Degeneracy = EXACT,
    gauge: Gauge = "warn",
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    on_failure: Literal["warn", "raise", "ignore"] = "warn",
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> SingularTriplets:
    """The $k$ largest singular values of an operator, and their vectors; derivatives of every order.

    It is `eigsh` of $(0, A; A^H, 0)$. Products with $A^H$ are those of the vjp of ``matvec``.

    Args:
        matvec: ``matvec(x, *params)``, the product with $x$, (n,) -> (m,), linear in $x$ and differentiable; it is called
            under ``torch.vmap``. Tensors that it reads, other than arguments, must not require grad.
        n: the number of columns of $A$.
        k: how many singular triplets, 1 to the smaller of m and n. The $k$-th singular value must not be 0.
        params: trees of anything.
        solver: as in `eigsh`, of the matrix of order m + n.
        tangent_solver: as in `eigsh`.
        degeneracy: as in `mg.linalg.eigh`.
        gauge: as in `mg.linalg.eigh`.
        rtol: as in `eigsh`.
        atol: as in `eigsh`.
        maxiter: as in `eigsh`.
        on_failure: as in `root`.
        dtype: of the vectors; None: of the parameters.
        device: of the vectors; None: of the parameters.

    Returns:
        `SingularTriplets`: U (m, k), S (k,) in descending order, Vh (k, n).

    Raises:
        TypeError: as in `eigsh`.
        ValueError: as in `eigsh`.
        HiddenTensorError: as in `eigsh`.
        ModuleNotFoundError: as in `eigsh`.

    Note:
        Where not differentiable: where one of the $k$ singular values equals one of the others, or is 0.

    References:
        Golub and Van Loan, Matrix Computations (2013), section 8.6.1.
    """
    _checked_count(n, k, n)
    chosen = _Chosen(k, "LA", solver, tangent_solver, _numbers_of(degeneracy), gauge, rtol, atol, maxiter, on_failure)
    example = _example(n, params, dtype, device)
    node = Node("svds", (matvec,), ("tensor",), functools.partial(_like_triplets, k))
    return called(_svds, [(matvec, "matvec")], example, params, chosen._asdict(), node)


def _like_triplets(k: int, example: Tensor, params: Sequence[Any], results: Sequence[Any]) -> SingularTriplets:
    m, n = results[0].shape[0], example.shape[0]
    return SingularTriplets(example.new_empty(m, k), example.real.new_empty(k), example.new_empty(k, n))


def _svds(
    functions: Sequence[Any], wrapped: Any, example: Tensor, params: Sequence[Any], **options: Any
) -> SingularTriplets:
    chosen, n = _Chosen(**options), example.shape[0]
    given = Structure(params)
    tensors, here = given.split(params), in_this_autocast(functions[0])
    with torch.no_grad():
        image = here(example, *given.join([t.detach() for t in tensors]))
    if not isinstance(image, Tensor) or image.dim() != 1:
        raise ArgumentError(f"matvec: expected a tensor of one dim, got {described(image)}")
    m = image.shape[0]
    _checked_count(n, chosen.k, min(m, n))

    def product(X: Tensor, values: Values) -> Tensor:
        joined = given.join(values)

        def forward(V: Tensor) -> list[Tensor]:
            return [_columns(lambda x: here(x, *joined), V, m, "matvec")]

        # the vjp is the same at every point: the product is linear
        _, pull = pull_back(forward, [torch.ones_like(X[m:])])
        return torch.cat([*forward(X[m:]), *pull([X[:m]])])

    both = example.new_zeros(m + n)
    check_function(lambda xs, values: [product(xs[0][:, None], values)], "matvec", [both], tensors)
    L, X = _eigenpairs(_Subspace(product, chosen, "svds", m), both, tensors, chosen)
    X = X.flip(-1) * 2**0.5
    return SingularTriplets(X[:m], L.flip(-1), X[m:].mH)


solvers["eigsh"], solvers["svds"] = _eigsh, _svds
