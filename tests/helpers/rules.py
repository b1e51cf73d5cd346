"""What tests of all rules share: their samples, as functions of the differentiable inputs."""

import warnings

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import torch_manualgrad as mg
from helpers.tensors import is_dense_differentiable
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.rule import parameters
from torch_manualgrad.testing.comparison.problem import seed_generators

RULES = list(mg.rules.values())
DTYPES = [torch.float64, torch.complex128]
TURNS = pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])


def samples(rule, dtype):
    """The rule's samples that the operator itself accepts in this dtype."""
    found = []
    for sample in rule.samples(dtype, "cpu"):
        try:
            rule.aten(*sample.args, **sample.kwargs)
        except (RuntimeError, NotImplementedError):
            assert dtype.is_complex, f"{rule.name} refuses its own sample {sample}"
            continue
        found.append(sample)
    return found


def dtype_of(rule, turn):
    """Real and complex in turn, half of the rules in the other order. A rule without complex samples is always real."""
    return DTYPES[(RULES.index(rule) + turn) % 2] if samples(rule, torch.complex128) else torch.float64


def without_tangent(rule):
    """The names of the arguments in which a rule has no derivative, and raises where one has a tangent."""
    if not rule.jvp:
        return set()
    read = {p.removesuffix("_t") for f in rule.jvp.values() for p in parameters(f) if p.endswith("_t")}
    return set(rule.signature.names) - read - {n for key in rule.vjp for n in key}


def random_like(tensors, seed=1, batch=()):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((*batch, *x.shape), dtype=x.dtype, generator=generator).to(x.device) for x in tensors]


def zero_if_none(found, like):
    return [torch.zeros_like(x) if d is None else d for x, d in zip(like, found, strict=True)]


class Call:
    """One sample of a rule as a function of its differentiable inputs: the rule's probe, outputs as a list."""

    def __init__(self, rule, sample):
        self.rule, self.sample = rule, sample
        self._leaves, self._spec = tree_flatten(sample.args)
        self._places = [i for i, a in enumerate(self._leaves) if is_dense_differentiable(a)]
        self.inputs = [self._leaves[i].detach() for i in self._places]
        owners = [n for n, a in zip(rule.signature.names, sample.args) for _ in tree_leaves(a)]
        self.names = [owners[i] for i in self._places]
        self.outputs = [o.detach() for o in self(*self.inputs)]

    def __repr__(self):
        return f"{self.rule.name}{self.sample}"

    def arguments(self, inputs):
        """The positional arguments of the call with these in place of the inputs."""
        leaves = list(self._leaves)
        for i, x in zip(self._places, inputs):
            leaves[i] = x
        return tree_unflatten(leaves, self._spec)

    def __call__(self, *inputs):
        return self.outputs_of(self.rule.probe, inputs)

    def outputs_of(self, function, inputs):
        """The differentiable outputs of a function that takes what the operator takes."""
        found = function(*self.arguments(inputs), **self.sample.kwargs)
        return [o for o in ([found] if isinstance(found, Tensor) else found) if is_dense_differentiable(o)]


def calls(rule, dtype):
    """A `Call` for each of the rule's samples that has entries and that the operator takes in this dtype."""
    for sample in rule.samples(dtype, "cpu"):
        tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
        if any(not x.numel() for x in tensors if x.is_floating_point() or x.is_complex()):
            continue
        try:
            call = Call(rule, sample)
        except (RuntimeError, NotImplementedError):
            assert dtype.is_complex, f"{rule.name} refuses its own sample {sample}"
            continue
        yield call


def orders(call, values, order=3):
    """The outputs, and the derivatives of each order along random cotangents; None where there is none."""
    inputs = [x.clone().requires_grad_() for x in values]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_generators(0)
        found = [o for o in call(*inputs) if o.requires_grad]
        results = [*found]
        for k in range(order):
            cotangents = random_like(found, seed=k)
            last = k == order - 1
            grads = torch.autograd.grad(found, inputs, cotangents, allow_unused=True, create_graph=not last)
            results += grads
            found = [g for g in grads if g is not None and g.requires_grad]
            if not found:
                break
    return results


def played_and_in_python(call, rule, others, **how):
    """The results of `orders` at other values under "*": played from a recording, and in Python. None if Python raises."""
    with mg.override(rule, "*", **how):
        try:
            with compiled_calls.recording_after(-1):
                expected = orders(call, others)
        except (RuntimeError, NotImplementedError):
            return None
        with compiled_calls.recording_after(0):
            orders(call, call.inputs)
            orders(call, call.inputs)
            return orders(call, others), expected


def local(name, **about):
    """A rule that is in no table."""
    return mg.rule(name, register=False, **about)


def has_history(rule):
    """Whether PyTorch's result has one. Through these special functions it returns no gradient and no error."""
    return not any(word in rule.name for word in ("bessel", "_polynomial_", "airy"))
