"""Modules, threads and processes."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rows import Call
from torch import Tensor

from .base import DEAR, Numbers, first, gradient, named, second, total, variables, way
from .compilers import accumulated
from .transforms import _loss


class Model(torch.nn.Module):
    """The function of its own parameters."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.row = call
        self.parameters_ = torch.nn.ParameterList(
            [torch.nn.Parameter(x.detach().clone()) for x in call.problem.primals]
        )

    def forward(self, *_: Tensor) -> Any:
        return self.row.problem.call(*self.parameters_)


def of_model(model: Model) -> Numbers:
    out = model()
    forward = [o.detach().clone() for o in out]
    total(model.row.problem, out).backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in model.parameters_])


@way("module, deepcopied", first)
def deepcopied(c: Call) -> Numbers:
    model = Model(c)
    of_model(model)
    other = copy.deepcopy(model)
    other.zero_grad()
    return of_model(other)


@way("module, pickled", first)
def pickled(c: Call) -> Numbers:
    model = Model(c)
    of_model(model)
    other = pickle.loads(pickle.dumps(model))
    other.zero_grad()
    return of_model(other)


@way("functional_call", first)
def functional_call(c: Call) -> Numbers:
    model = Model(c)
    p = c.problem

    def loss(values: dict[str, Tensor]) -> Tensor:
        return total(p, torch.func.functional_call(model, values, ()))

    found = torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()})
    return named("gradient", list(found.values()))


def in_threads(f: Callable[[], Any], count: int = 3) -> list[Any]:
    """What `f` returns in each of several threads that run at once; raises what one of them raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = f()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


@way("threads", lambda c: {f"thread {i}, {n}": v for n, v in second(c).items() for i in range(3)})
def threads(c: Call) -> Numbers:
    results = in_threads(lambda: [second(c) for _ in range(2)][-1])
    return {f"thread {i}, {n}": v for i, found in enumerate(results) for n, v in found.items()}


@way("DataParallel: forward in threads, one backward", first)
def data_parallel(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    grad = torch.is_grad_enabled()

    def replica() -> Sequence[Tensor]:
        with torch.set_grad_enabled(grad):
            return p.call(*xs)

    outs = in_threads(replica)
    total(p, [sum(o[1:], o[0]) / len(outs) for o in zip(*outs)]).backward()
    return named("gradient", [accumulated(x) for x in xs])


@way("one graph, backward in threads", first)
def backward_in_threads(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    value = _loss(p)(*xs)
    grads = in_threads(lambda: gradient(value, xs, retain_graph=True))
    return named("gradient", grads[-1])


@way("forked process", first, cost=DEAR)
def forked(c: Call) -> Numbers:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child() -> None:
        stream = io.BytesIO()
        torch.save(dict(first(c)), stream)
        there.send_bytes(stream.getvalue())

    process = context.Process(target=child)
    process.start()
    there.close()
    try:
        if not here.poll(60):
            raise RuntimeError("the forked process does not answer")
        return dict(torch.load(io.BytesIO(here.recv_bytes())))
    except EOFError:
        raise RuntimeError(f"the forked process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
