"""PyTorch's own database of operators on jagged nested tensors: what returns without override returns the same under it.

Every entry with every sample, contiguous, transposed and with holes, forward and backward: values, gradients, and the
structure: layout, ragged dim, the offsets and lengths as objects (and with them the nested int), and what is known of the
lengths.
"""

import warnings

import pytest
import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.internals import pytree
from torch_manualgrad.testing.database.opinfo import nested_entries, nested_samples

# of these PyTorch's own backward ends the process
ABORTS = {"split_with_sizes"}


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")


def tensors(tree):
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def forward(op, sample):
    torch.manual_seed(1)
    return op.op(sample.input, *sample.args, **sample.kwargs)


def backward(sample, outputs):
    """The gradients of the sample's tensors, of a loss that depends on every entry of the outputs."""
    given = [x for x in tensors((sample.input, sample.args, sample.kwargs)) if x.requires_grad]
    outputs = [y for y in outputs if y.requires_grad]
    if not outputs or not given:
        return []
    torch.manual_seed(2)
    cotangents = [without_holes((y.detach() * 3 + 1).cos()) for y in outputs]
    return torch.autograd.grad(outputs, given, cotangents, allow_unused=True)


def attempt(call):
    """(what it returned, what it raised)."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def described(x, known):
    """The structure of a result, where the tensors of the sample are named by their place in it."""
    if not isinstance(x, Tensor) or not x.is_nested:
        return type(x).__name__, *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else ())
    place = {id(t): i for i, t in enumerate(known)}
    inner = [(None if t is None else place.get(id(t), t.tolist())) for t in (x.offsets(), x.lengths())]
    values = x.values()
    # on a GPU ours stay unknown where reading the offsets would wait for it
    lengths = None if values.is_cuda else (x._maybe_min_seqlen, x._maybe_max_seqlen)
    return "jagged", x._ragged_idx, *inner, lengths, tuple(values.shape), x.dtype, x.dim()


def compare(sample, ours, stocks):
    """What differs; empty where nothing does."""
    known = [
        t
        for x in tensors((sample.input, sample.args, sample.kwargs))
        if x.is_nested
        for t in (x.offsets(), x.lengths())
    ]
    ours, stocks = pytree.tree_leaves(ours), pytree.tree_leaves(stocks)
    if len(ours) != len(stocks):
        return f"{len(ours)} results, stock {len(stocks)}"
    for o, s in zip(ours, stocks):
        if described(o, known) != described(s, known):
            return f"structure {described(o, known)}, stock {described(s, known)}"
        if isinstance(s, Tensor):
            try:
                torch.testing.assert_close(places(o), places(s), equal_nan=True)
            except AssertionError as error:
                return f"values: {error}"
        elif o != s:
            return f"{o}, stock {s}"
    return ""


def places(x):
    return x.values() if x.is_nested else x


def without_holes(cotangent):
    """Zeros where the buffer belongs to no component: PyTorch's gradients of numbers count these, ours do not."""
    if cotangent.is_nested and cotangent.lengths() is not None:
        values = cotangent.values()
        used = torch.zeros(values.shape[cotangent._ragged_idx - 1], dtype=torch.bool, device=values.device)
        for start, length in zip(cotangent.offsets().tolist(), cotangent.lengths().tolist()):
            used[start : start + length] = True
        shape = [-1 if d == cotangent._ragged_idx - 1 else 1 for d in range(values.dim())]
        values.mul_(used.reshape(shape))
    return cotangent


def moved(sample, step):
    """The sample with its differentiable tensors moved along a fixed direction, and that direction."""
    directions = []

    def move(x):
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        directions.append((x.detach() * 5 + 2).sin())
        return x.detach() + step * directions[-1]

    given = pytree.tree_map(move, (sample.input, list(sample.args), sample.kwargs))
    return type(sample)(given[0], args=tuple(given[1]), kwargs=given[2]), directions


def along(op, sample, outputs, grads):
    """How far gradients are from a central difference of the forward along one direction, relative."""
    cotangents = [places(without_holes((y.detach() * 3 + 1).cos())) for y in outputs if y.requires_grad]

    def loss(step):
        made = [y for y, o in zip(tensors(forward(op, moved(sample, step)[0])), outputs) if o.requires_grad]
        return sum((places(y) * c).sum() for y, c in zip(made, cotangents))

    step = 1e-5
    difference = (loss(step) - loss(-step)) / (2 * step)
    directions = moved(sample, 0)[1]
    derivative = sum((places(g) * places(d)).sum() for g, d in zip(grads, directions) if g is not None)
    return abs(float(difference - derivative)) / (1 + abs(float(difference)))


def differences(op, limit=None, device="cpu"):
    """(sample, what, how) for each that differs, and how many were compared.

    A gradient that differs from stock's is right where stock's own forward, taken by central differences, says so.
    """
    found, compared = [], 0
    samples = nested_samples(op, device=device)
    for sample in samples[:limit]:
        stocks, refused = attempt(lambda: forward(op, sample))
        if refused is not None:
            continue
        compared += 1
        grads, no_gradient = None, op.full_name in ABORTS
        if not no_gradient:
            grads, no_gradient = attempt(lambda: backward(sample, tensors(stocks)))
        with mg.override("nested"):
            ours, error = attempt(lambda: forward(op, sample))
            how = f"raises {type(error).__name__}: {error}" if error else compare(sample, ours, stocks)
            if how:
                found.append((sample.name, "forward", how))
                continue
            if no_gradient:
                continue
            compared += 1
            our_grads, error = attempt(lambda: backward(sample, tensors(ours)))
            how = f"raises {type(error).__name__}: {error}" if error else compare(sample, our_grads, grads)
        if how.startswith("values"):
            off = [along(op, sample, tensors(stocks), g) for g in (our_grads, grads)]
            how = "" if off[0] < 1e-6 < off[1] else f"{how}, from central differences {off[0]}, stock {off[1]}"
        if how:
            found.append((sample.name, "backward", how))
    return found, compared


# one of a kind, in the fast tests; all are in the slow ones
FAST = """
    add amax chunk clone exp masked_select matmul max.reduction_with_dim mean narrow nn.functional.embedding
    nn.functional.gelu nn.functional.linear nn.functional.rms_norm nn.functional.silu nn.functional.threshold
    prod select split sum unsqueeze where
"""


def entries():
    for op in nested_entries():
        marks = () if op.full_name in FAST.split() else pytest.mark.slow
        yield pytest.param(op, id=op.full_name, marks=marks)


@pytest.mark.parametrize("op", entries())
def test_parity(op):
    found, _ = differences(op)
    assert not found, "\n".join(": ".join(f) for f in found)


def test_the_oracle_detects_lost_gradients():
    """A result that forgets what was known of the lengths, one with other offsets, and one that is off."""
    (op,) = [op for op in nested_entries() if op.full_name == "exp"]
    sample = nested_samples(op)[0]
    right = forward(op, sample)
    known = right._maybe_max_seqlen
    assert known is not None and not compare(sample, right, forward(op, sample))
    forgetful = torch.nested.nested_tensor_from_jagged(right.values(), right.offsets())
    assert compare(sample, forgetful, right).startswith("structure")
    others = torch.nested.nested_tensor_from_jagged(right.values(), right.offsets().clone())
    assert compare(sample, others, forgetful).startswith("structure")
    assert compare(sample, right * 1.01, right).startswith("values")


if __name__ == "__main__":
    import sys

    total = bad = 0
    for op in nested_entries():
        if len(sys.argv) > 1 and not any(a in op.full_name for a in sys.argv[1:]):
            continue
        found, compared = differences(op)
        total, bad = total + compared, bad + len(found)
        if not found:
            print(op.full_name, compared, flush=True)
        for f in found:
            print(op.full_name, "|", " | ".join(p.splitlines()[0] if p else "" for p in f)[:400], flush=True)
    print(total, "compared,", bad, "differ")
