"""Programs that would lose a Taylor series: each raises, or has the series. Zero is never taken for a missing one."""

import copy
import threading

import pytest
import torch
from helpers.jets import compare

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import directional
from torch_manualgrad.forward_ad.jets import trace as jet_trace

X = torch.linspace(0.2, 1.3, 12, dtype=torch.float64).reshape(3, 4)
V = X.cos()
W = X.clone().requires_grad_()
SPARSE = torch.diag(torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)).to_sparse()
M = torch.ones(4, dtype=torch.float64)


def of_foreach(x):
    y = x.clone()
    torch._foreach_mul_([y], 2.0)
    return y


def of_two_foreach(x):
    y = x * 1
    torch._foreach_add_([y], [x])
    return y


def written_by_an_operator(x):
    y = torch.zeros_like(X)
    torch.ops.jets_lost.write(x, y)
    return y


def written_over_by_an_operator(x):
    y = x * 1
    torch.ops.jets_lost.write(X, y)
    return y


def with_data_set(x):
    y = x * 1
    y.data = x.sin()
    return y


def detached_in_place(x):
    y = x * 2
    y.detach_()
    return y * x


def in_a_level(x):
    with mg.forward_ad.dual_level():
        return mg.forward_ad.unpack_dual(mg.forward_ad.make_dual(x, V) * x).tangent


def in_a_dual_level(x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(torch.autograd.forward_ad.make_dual(x, V) * x).tangent


def in_inference_mode(x):
    with torch.inference_mode():
        y = x.sin()
    return y * x


def without_grad(x):
    with torch.no_grad():
        y = x.sin()
    return y * x


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return -grad

    @staticmethod
    def jvp(ctx, tangent):
        return -tangent


COMPILED = {
    "one output": torch.compile(lambda x: (X.mT @ x.sin()).cosh(), backend="eager"),
    "several outputs": torch.compile(lambda x: (x.sin(), x.cos()), backend="eager"),
    "a layer": torch.compile(torch.nn.Linear(4, 2, dtype=torch.float64).requires_grad_(False), backend="aot_eager"),
}

CELL = torch.nn.LSTMCell(4, 2, dtype=torch.float64).requires_grad_(False)
H = torch.ones(3, 2, dtype=torch.float64)

LOSE = {
    "an inverse of stft, which reads a value to check it": lambda x: torch.istft(
        torch.complex(x, x), 4, window=torch.ones(4, dtype=torch.float64)
    ),
    "a layout that the coefficients do not have": lambda x: x.mT.as_strided((2, 3), (3, 1)),
    "memory beyond a slice": lambda x: x[1:].as_strided((2,), (8,)),
    "memory before a slice": lambda x: x[1:].as_strided((2,), (1,), 0),
    "an autograd.Function": lambda x: StraightThrough.apply(x),
    "an autograd.Function with a jvp": lambda x: Reversal.apply(x),
    "an autograd.Function of what it makes": lambda x: Reversal.apply(x.sin()) * x,
    "a foreach in place": of_foreach,
    "a foreach of two lists": of_two_foreach,
    "an operator of torch.library": lambda x: torch.ops.jets_lost.square(x),
    "an operator that writes": written_by_an_operator,
    "an operator that writes over it": written_over_by_an_operator,
    "a custom op without a derivative": lambda x: without_derivative(x),
    "a custom op with an autograd kernel": lambda x: with_kernel(x),
    "a custom op whose jvp reads another tangent": lambda x: reads_one(X, x),
    "new_tensor": lambda x: x.new_tensor(x),
    "torch.tensor": lambda x: torch.tensor(x),
    "Parameter": lambda x: torch.nn.Parameter(x) * 2,
    "out": lambda x: torch.mul(x, x, out=torch.empty_like(X)),
    "a row of a constant": lambda x: torch.zeros_like(X).index_put_((torch.tensor([0]),), x[0]),
    "copy": lambda x: torch.zeros_like(X).copy_(x),
    "bits": lambda x: x.view(torch.float32),
    "the mean of samples": lambda x: torch.normal(x, 1.0),
    "the deviation of samples": lambda x: torch.normal(0.0, x),
    "jvp": lambda x: torch.func.jvp(torch.square, (x,), (x,))[1],
    "jvp of a product with it": lambda x: torch.func.jvp(lambda y: y * x, (X,), (X,))[1],
    "linearize": lambda x: torch.func.linearize(torch.square, x)[0],
    "grad": lambda x: torch.func.grad(lambda y: y.square().sum())(x),
    "grad of a product with it": lambda x: torch.func.grad(lambda y: (y * x).sum())(X),
    "jacrev of a product with it": lambda x: torch.func.jacrev(lambda y: y * x)(X),
    "vmap of a product with it": lambda x: torch.vmap(lambda y: y * x)(X),
    "autograd.grad of a product with it": lambda x: torch.autograd.grad((W * x).sum(), W)[0],
    "vmap": lambda x: torch.vmap(torch.square)(x),
    "a level": in_a_level,
    "a dual level of PyTorch's": in_a_dual_level,
    "inference mode": in_inference_mode,
    "setting data": with_data_set,
    "detach in place": detached_in_place,
    "dlpack": lambda x: torch.from_dlpack(x),
    "a pointer": lambda x: x * x.data_ptr(),
    "a copy by pickle": lambda x: copy.copy(x),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "a number": lambda x: X * float(x[0, 0]),
    "full_like": lambda x: torch.full_like(X, x[0, 0]),
    "a storage": lambda x: torch.empty(0, dtype=torch.float64).set_(x.untyped_storage()),
    "the mean of running statistics": lambda x: torch.nn.functional.batch_norm(X, x[0], x[1], training=True),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "the factors of a determinant": lambda x: torch.ops.aten._linalg_det(x @ x.mT)[1] * 2,
    "the factors of a solve": lambda x: torch.ops.aten._linalg_solve_ex(x @ x.mT, x)[1],
    "singular values of least squares": lambda x: torch.linalg.lstsq(x.mT, x.mT, driver="gelsd").singular_values,
    "saved statistics": lambda x: torch.ops.aten._native_batch_norm_legit(x, None, None, M, M, True, 0.1, 1e-5)[1] * 2,
    "histogram": lambda x: torch.histogram(x, 3)[1],
}


def of_layer(kind):
    layer = kind(4, 2, dtype=torch.float64).requires_grad_(False)
    return lambda x: layer(x.unsqueeze(1))[0].sin()


KEEP = {
    "an RNN, which adds to a product of constants": of_layer(torch.nn.RNN),
    "an LSTM": of_layer(torch.nn.LSTM),
    "a GRU": of_layer(torch.nn.GRU),
    "a cell": lambda x: CELL(x, (H, H))[1],
    "cosine embeddings": lambda x: torch.nn.functional.cosine_embedding_loss(x, X.cos(), torch.tensor([1, -1, 1])),
    "hinge embeddings": lambda x: torch.nn.functional.hinge_embedding_loss(x, 1 - 2 * (X > 0.7).double(), 2.0),
    "a custom op": lambda x: with_jvp(x),
    "a custom op with two arguments": lambda x: with_jvp(x, x.sin()),
    "a custom op that is constant in one": lambda x: reads_one(x, X),
    "a formula of the package": lambda x: mg.ops.sinc_backward(x, x.exp()),
    "dropout in evaluation, in place": lambda x: torch.dropout_(x.sin(), 0.5, False) * x,
    "no_grad, which is for reverse mode": without_grad,
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin() * y, x, use_reentrant=False),
    "as_tensor": lambda x: torch.as_tensor(x).square(),
    "integers": lambda x: x * (3 * x + 0.15).long(),
    "float32 and back": lambda x: (x.to(torch.complex128) * (1 + 1j)).abs() * x,
    "a slice as the scale of weight_norm": lambda x: torch._weight_norm(x, x[:, :1], 0),
    "the weights of a loss": lambda x: torch.nn.functional.cross_entropy(
        x, torch.tensor([0, 3, 1]), weight=x[0] + x[1]
    ),
    "the positive weights of a loss": lambda x: torch.nn.functional.binary_cross_entropy_with_logits(
        x.sin(), X / 2, weight=x.exp(), pos_weight=x[0].cos()
    ),
    "the weight of binary cross entropy": lambda x: torch.nn.functional.binary_cross_entropy(
        x.sigmoid(), X / 2, weight=x.exp(), reduction="sum"
    ),
    "a product of a sparse and a dense matrix": lambda x: torch.sparse.mm(SPARSE, x),
    "a product of a dense and a sparse matrix": lambda x: torch.sparse.mm(x.mT.contiguous(), SPARSE),
    "a product with CSR": lambda x: SPARSE.to_sparse_csr() @ x,
    "eval batch norm": lambda x: torch.nn.functional.batch_norm(x, x[0].sin(), x[1].exp()),
    "a covariance": lambda x: x.sin().cov(),
    "a circular padding": lambda x: torch.nn.functional.pad(x[None].sin(), (2, 1), mode="circular"),
    "a circular padding that removes elements": lambda x: torch.nn.functional.pad(
        x[None].sin(), (-1, 2), mode="circular"
    ),
    "a reflected padding": lambda x: torch.nn.functional.pad(x[None].sin(), (1, 1), mode="reflect"),
    "a Vandermonde matrix": lambda x: torch.vander(x[0].sin()),
    "a part of a Vandermonde matrix": lambda x: torch.vander(x[0].sin(), 4, increasing=True),
    "a covariance of one variable": lambda x: torch.cov(x[0].sin(), correction=0),
    "a weighted covariance": lambda x: torch.cov(
        torch.complex(x, x.sin()), fweights=torch.tensor([1, 3, 2, 1]), aweights=x[0].exp()
    ),
    "a correlation": lambda x: torch.corrcoef(torch.complex(x.sin(), x.exp())).abs(),
    "a Gaussian loss": lambda x: torch.nn.functional.gaussian_nll_loss(x.sin(), x.exp(), x.square() + 0.5, full=True),
    "a Gaussian loss with one variance": lambda x: torch.nn.functional.gaussian_nll_loss(
        x.sin(), X, x[:, 0].exp(), reduction="none"
    ),
    "a Gaussian loss with a clamped variance": lambda x: torch.nn.functional.gaussian_nll_loss(
        x, x.sin(), 0.5, eps=1.0
    ),
    "overlapping windows of memory": lambda x: x.sin().as_strided((3, 4), (3, 1), 2) * 2,
    "a slice's memory": lambda x: (x[1:] * x[1:]).as_strided((2, 3), (1, 2)).sin(),
    "a Fourier transform of windows": lambda x: torch.stft(
        x.flatten(), 4, hop_length=2, window=x[0].sin(), return_complex=True
    ).abs(),
}


@torch.library.custom_op("jets_lost::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@torch.library.custom_op("jets_lost::write", mutates_args=("y",))
def write(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x)


@mg.custom_op("jets_lost::without_derivative(Tensor x) -> Tensor")
def without_derivative(x):
    return x * x


@mg.custom_op("jets_lost::with_kernel(Tensor x) -> Tensor")
def with_kernel(x):
    return x * x


with_kernel.impl_autograd(lambda x: with_kernel.below_autograd(x))


@mg.custom_op("jets_lost::with_jvp(Tensor x, Tensor? y=None) -> Tensor")
def with_jvp(x, y=None):
    return x.sin() if y is None else x.sin() * y


@with_jvp.impl_jvp
def _(inputs, output, tangents):
    x, y = inputs
    found = None
    if tangents.x is not None:
        found = tangents.x * (x.cos() if y is None else x.cos() * y)
    if tangents.y is not None:
        term = x.sin() * tangents.y
        found = term if found is None else found + term
    return found


@mg.custom_op("jets_lost::reads_one(Tensor x, Tensor y) -> Tensor")
def reads_one(x, y):
    return x.sin() * y


reads_one.impl_jvp(lambda i, output, tangents: None if tangents.x is None else i.x.cos() * tangents.x * i.y)


@pytest.mark.parametrize("name", LOSE)
def test_a_series_that_would_be_lost_is_an_error(name):
    with pytest.raises((NotImplementedError, RuntimeError, TypeError)):
        directional(LOSE[name], X, V, 2)


@pytest.mark.parametrize("name", KEEP)
def test_a_series_that_is_kept(name):
    wrong, agreed = compare(lambda y: [KEEP[name](y)], X)
    assert not wrong and agreed == {1, 2, 3, 4}


def test_errors_name_the_operator_and_the_argument():
    with pytest.raises(NotImplementedError, match=r"jets_lost::reads_one.*'y'.*does not read"):
        directional(LOSE["a custom op whose jvp reads another tangent"], X, V, 1)
    with pytest.raises(NotImplementedError, match="jets_lost::write.*writes to its arguments"):
        directional(written_by_an_operator, X, V, 1)
    with pytest.raises(NotImplementedError, match=r"fractional_max_pool2d.*'random_samples'.*no derivative"):
        f = lambda u: torch.ops.aten.fractional_max_pool2d(X.reshape(1, 1, 3, 4), [2, 2], [1, 1], u)[0]  # noqa: E731
        directional(f, X[:1, :2].reshape(1, 1, 2) / 2, V[:1, :2].reshape(1, 1, 2), 1)


def test_a_trace_does_not_depend_on_active_rules():
    """It is kept: under `forward=True` factorizations call an operator of their own, which has no series of high order."""
    functions = {
        "svd": lambda x: torch.linalg.svd(x)[1],
        "svdvals": torch.linalg.svdvals,
        "eigh": lambda x: torch.linalg.eigh(x + x.mT)[0],
        "eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.mT),
        "lu": lambda x: torch.linalg.lu(x)[2],
        "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
        "pinv": torch.linalg.pinv,
        "det": torch.linalg.det,
        "cond": torch.linalg.cond,
        "norm": torch.norm,
        "gelu": torch.nn.functional.gelu,
    }
    A = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, f in functions.items():
        jet_trace._kept.clear()
        kept = []
        for names, how in (((), {"forward": True}), (("*",), {"forward": True}), (("*",), {}), ((), {})):
            with mg.override(*names, **how):
                kept.append(directional(f, A, A.sin(), 3))
        jet_trace._kept.clear()
        for found in kept:
            torch.testing.assert_close(found, directional(f, A, A.sin(), 3), msg=lambda m, name=name: f"{name}: {m}")
            jet_trace._kept.clear()


def test_inference_mode_around_a_series():
    with torch.inference_mode():
        found = directional(torch.sin, X, V, 1)[0]
    torch.testing.assert_close(found, X.cos() * V)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_functions_run_eagerly_in_a_series(name):
    """Dynamo would trace how a jet is handled, and keep what it has found."""
    compiled = COMPILED[name]
    eager = getattr(compiled, "_torchdynamo_orig_callable", None) or compiled._orig_mod
    for _ in range(3):
        compiled(X)
        for found, expected in zip(directional(compiled, X, V, 3), directional(eager, X, V, 3)):
            torch.testing.assert_close(found, expected)


def test_threads_whose_series_overlap_leave_the_compiler_on():
    """A stance of the whole process would not: each would restore what it found, the other's."""
    first_inside, second_inside = threading.Event(), threading.Event()

    def outlived(x):
        first_inside.set()
        assert second_inside.wait(60)
        return x.sin()

    def outlives(x):
        second_inside.set()
        first.join(60)
        return x.sin()

    first = threading.Thread(target=lambda: directional(outlived, X, V, 1))
    first.start()
    assert first_inside.wait(60)
    directional(outlives, X, V, 1)
    graphs = []
    torch.compile(lambda x: x.cosh(), backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(X)
    assert graphs


def test_a_function_compiled_inside_of_a_series():
    def f(x):
        return torch.compile(lambda y: y.sin(), backend="eager")(x) * x

    for found, expected in zip(directional(f, X, V, 3), directional(lambda x: x.sin() * x, X, V, 3)):
        torch.testing.assert_close(found, expected)


def test_a_swapped_jvp_is_that_of_the_series():
    before = directional(with_jvp, X, V, 1)[0]
    with with_jvp.swap(jvp=lambda inputs, output, tangents: 2 * tangents.x):
        torch.testing.assert_close(directional(with_jvp, X, V, 1)[0], 2 * V)
    torch.testing.assert_close(directional(with_jvp, X, V, 1)[0], before)


def test_complex_numbers_through_their_absolute_value():
    """What calls abs: a spectrum, a loss, sgn, softsign, norms; and var."""
    functions = [
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: torch.nn.functional.l1_loss(x * (1 + 2j), x.sin() * 1j),
        lambda x: torch.sgn(x * (1 + 2j) + x.square() * 1j).real,
        lambda x: torch.nn.functional.softsign(x * (1 + 2j)).imag,
        lambda x: torch.linalg.vector_norm(x * (1 + 2j) + x.sin() * 1j, 3),
        lambda x: torch.var(x * (1 + 2j) + x.square() * 1j, 0),
        lambda x: torch.angle(x * (1 + 2j) + x.square()),
        lambda x: torch.polar(x, x.square()).abs().square() + torch.std(x * 1j + x.square()),
    ]
    wrong, agreed = compare(lambda x: [f(x) for f in functions], X)
    assert not wrong and agreed == {1, 2, 3, 4}
    z = torch.tensor([0j, 3 + 4j], dtype=torch.complex128)
    first, second, third = directional(torch.abs, z, torch.ones_like(z), 3)
    torch.testing.assert_close(first, torch.tensor([0.0, 0.6], dtype=torch.float64))
    torch.testing.assert_close(second, torch.tensor([0.0, 16 / 125], dtype=torch.float64))
    torch.testing.assert_close(third, torch.tensor([0.0, -3 * 0.6 * 16 / 125 / 5], dtype=torch.float64))
