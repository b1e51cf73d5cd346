"""Arguments that do not fit, made from ones that do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Recipe", "guarded", "mutated"]


class Recipe:
    """An argument that is made, by a public function, when the call is: its error counts as the call's."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args
        self.names = ("values", "offsets", "shape", "sizes")

    def made(self) -> Any:
        return self.function(*guarded(self.args))

    def __repr__(self) -> str:
        return f"{self.function.__name__}{self.args}"


_NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 7, -2, 100, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**70),
    *(0.0, -0.5, 1e300, -1e300, 1e-320, float("nan"), float("inf"), -float("inf"), 1j, True, False),
]
_OTHERS: list[Any] = [
    None,
    "mean",
    "",
    "\0",
    "sum",
    "bogus",
    [],
    {},
    [None],
    [0],
    [-1],
    [1, 2, 3],
    object,
    b"x",
    torch.float32,
]
_INDICES = (-1, -2, -100, 1, 5, 100, 10**4, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**63))
_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]


def guarded(value: Any) -> Any:
    """A copy whose memory is as large as it has to be, with the same strides."""
    if isinstance(value, Recipe):
        return value.made()
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested and type(value) is Tensor:
        if value.device.type == "meta":
            return value
        if any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape)):
            size = [1 if s == 0 and n else n for s, n in zip(value.stride(), value.shape)]
            small = torch.empty(size, dtype=value.dtype)
            small.copy_(value[tuple(slice(0, n) for n in size)])
            return small.expand(value.shape).requires_grad_(value.requires_grad)
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        with torch.no_grad():
            made.copy_(value)
        return made.requires_grad_(value.requires_grad)
    if isinstance(value, list):
        return [guarded(v) for v in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(guarded(v) for v in value)
    if type(value) is dict:
        return {k: guarded(v) for k, v in value.items()}
    return value


def mutated(value: Any, choice: random.Random) -> Any:
    """Another value instead of this one; in one of five cases of another type."""
    if choice.random() < 0.2:
        return choice.choice([*_OTHERS, *_NUMBERS, lambda: None, _random(choice)])
    if isinstance(value, Tensor):
        return _tensor(value, choice)
    if isinstance(value, Recipe):
        args = list(value.args)
        at = choice.randrange(len(args))
        args[at] = mutated(args[at], choice)
        return Recipe(value.function, *args)
    if isinstance(value, bool):
        return choice.choice([not value, not value, not value, 2, None])
    if isinstance(value, (int, float, complex)):
        return choice.choice([*_NUMBERS, value + 1, value - 1, value * 2])
    if isinstance(value, str):
        return choice.choice(
            ["none", "mean", "sum", "max", "min", "prod", "amax", "r", "complete", "reduced", "", "tanh"]
        )
    if isinstance(value, (list, tuple)):
        return type(value)(_list(list(value), choice)) if type(value) in (list, tuple) else value
    if isinstance(value, torch.dtype):
        return choice.choice(_DTYPES)
    return choice.choice([*_OTHERS, *_NUMBERS, _random(choice)])


def _list(value: list[Any], choice: random.Random) -> list[Any]:
    kind = choice.randrange(5)
    if kind == 0:
        return value[:-1]
    if kind == 1:
        return value + value[-1:] if value else [1]
    if kind == 2:
        return []
    if not value:
        return [choice.choice(_NUMBERS)]
    at = choice.randrange(len(value))
    return [*value[:at], mutated(value[at], choice), *value[at + 1 :]]


def _random(choice: random.Random) -> Tensor:
    shape = [choice.choice((0, 1, 2, 3, 4, 5, 7, 17)) for _ in range(choice.randrange(5))]
    dtype = choice.choice(_DTYPES)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 5, shape).to(dtype)


def _tensor(x: Tensor, choice: random.Random) -> Any:
    ways = [_shrunk, _grown, _emptied, _rank, _rank, _permuted, _dtype, _values, _values, _strides, _other_kind, _flat]
    try:
        return choice.choice(ways)(x, choice)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return _random(choice)


def _axis(x: Tensor, choice: random.Random) -> int:
    return choice.randrange(x.dim()) if x.dim() else 0


def _shrunk(x: Tensor, choice: random.Random) -> Tensor:
    dim = _axis(x, choice)
    return x.narrow(dim, 0, choice.randrange(x.shape[dim]))


def _grown(x: Tensor, choice: random.Random) -> Tensor:
    dim = _axis(x, choice)
    return torch.cat([x] * choice.choice((2, 2, 3, 20)), dim)


def _emptied(x: Tensor, choice: random.Random) -> Tensor:
    return x.narrow(_axis(x, choice), 0, 0)


def _rank(x: Tensor, choice: random.Random) -> Tensor:
    kind = choice.randrange(4)
    if kind == 0:
        return x.unsqueeze(choice.randrange(x.dim() + 1))
    if kind == 1:
        return x.select(_axis(x, choice), 0)
    if kind == 2:
        return x.flatten()[0]
    return x.expand(choice.choice((1, 2, 3)), *x.shape)


def _flat(x: Tensor, choice: random.Random) -> Tensor:
    return x.flatten()


def _permuted(x: Tensor, choice: random.Random) -> Tensor:
    dims = list(range(x.dim()))
    choice.shuffle(dims)
    return x.permute(dims)


def _dtype(x: Tensor, choice: random.Random) -> Tensor:
    return x.to(choice.choice(_DTYPES))


def _values(x: Tensor, choice: random.Random) -> Tensor:
    x = x.clone()
    if not x.numel():
        return x
    at = choice.randrange(x.numel())
    if x.is_floating_point() or x.is_complex():
        value: Any = choice.choice([float("nan"), float("inf"), -float("inf"), 0.0, 1e30, -1.0])
    elif x.dtype is torch.bool:
        value = bool(choice.randrange(2))
    else:
        info = torch.iinfo(x.dtype)
        value = max(info.min, min(info.max, choice.choice([*_INDICES, int(x.flatten()[at]) + 1, int(x.max()) + 1])))
    if choice.randrange(2):
        return x.fill_(value)
    x.view(-1)[at] = value
    return x


def _strides(x: Tensor, choice: random.Random) -> Tensor:
    kind = choice.randrange(4)
    if kind == 0:  # all entries are the first
        return x.flatten()[:1].as_strided(x.shape, [0] * x.dim())
    if kind == 1:  # rows overlap
        return x.contiguous().as_strided(x.shape, [1] * x.dim())
    if kind == 2:
        dim = _axis(x, choice)
        return torch.repeat_interleave(x, 2, dim).narrow(dim, 0, 2 * x.shape[dim])[
            (slice(None),) * dim + (slice(None, None, 2),)
        ]
    return x.flip(_axis(x, choice)).mT if x.dim() > 1 else x.flip(0)


def _other_kind(x: Tensor, choice: random.Random) -> Tensor:
    kind = choice.randrange(7)
    if kind <= 2:
        return x.to("meta")
    if kind == 3:
        return x.to_sparse()
    if kind == 4:
        return torch.nested.nested_tensor([x, x])
    if kind == 5:
        return x.clone().requires_grad_()
    return torch.empty(x.shape, dtype=x.dtype, device="meta").requires_grad_()
