"""Ways of using a model with its loss: training, compiled, checkpointed, under torch.func."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
from program_list import Program
from torch import Tensor, nn

Numbers = dict[str, Tensor]
Loss = Callable[[nn.Module, int], Tensor]
WAYS: dict[str, Way] = {}


class Way:
    """A way of using a model: gives numbers, which are to be the same to a relative tolerance."""

    def __init__(self, run: Callable[..., Numbers], dtype: torch.dtype, rtol: float, heavy: bool) -> None:
        self.run, self.dtype, self.rtol, self.heavy = run, dtype, rtol, heavy

    def __call__(self, program: Program, dtype: torch.dtype | None = None) -> Numbers:
        if program.one_thread and self.run is _threads:
            raise NotImplementedError(f"{program.package} is for one thread")
        torch.manual_seed(0)
        model, loss = program.build(dtype or self.dtype)
        return self.run(model.train(), loss)


def way(dtype: torch.dtype = torch.float64, rtol: float = 1e-10, heavy: bool = False) -> Callable[[Any], Any]:
    def add(run: Callable[..., Numbers]) -> Callable[..., Numbers]:
        WAYS[run.__name__.strip("_")] = Way(run, dtype, rtol, heavy)
        return run

    return add


def gradients(model: nn.Module, step: int = 0) -> Numbers:
    found = {f"gradient {n} at {step}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def one_step(model: nn.Module, loss: Loss, step: int = 0) -> Numbers:
    torch.manual_seed(step)
    value = loss(model, step)
    value.backward()
    return {f"loss at {step}": value.detach(), **gradients(model, step)}


class Whole(nn.Module):
    """A model with its loss, which is scaled by the input."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, scale: Tensor) -> Tensor:
        return self.loss(self.model, 0) * scale


def one(model: nn.Module) -> Tensor:
    return torch.ones((), dtype=next(p for p in model.parameters()).dtype)


def train(model: nn.Module, loss: Loss) -> Numbers:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    found = {}
    for i in range(5):
        torch.manual_seed(i)
        value = loss(model, i)
        value.backward()
        optimizer.step()
        found |= {f"loss at {i}": value.detach(), **gradients(model, i)}
    return found


@way(torch.float32, 1e-4)
def _train_float32(model: nn.Module, loss: Loss) -> Numbers:
    return train(model, loss)


@way()
def _train_float64(model: nn.Module, loss: Loss) -> Numbers:
    return train(model, loss)


@way()
def _eval(model: nn.Module, loss: Loss) -> Numbers:
    with torch.no_grad():
        torch.manual_seed(1)
        first = loss(model.eval(), 1)
    return {"loss without gradients": first, **one_step(model, loss)}


@way(torch.float32, 5e-2)
def _autocast(model: nn.Module, loss: Loss) -> Numbers:
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model, 0)
    value.backward()
    return {"loss": value.detach(), **gradients(model)}


@way(rtol=1e-7)
def _training_loop(model: nn.Module, loss: Loss) -> Numbers:
    """Accumulated gradients, clipping, a scaler, AdamW, a schedule, an average of the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True, eps=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=3)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    found = {}
    for i in range(3):
        for part in range(2):
            torch.manual_seed(i)
            scaler.scale(loss(model, 2 * i + part) / 2).backward()
        scaler.unscale_(optimizer)
        found[f"norm at {i}"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(model)
        optimizer.zero_grad()
    return found | {f"weight {n}": p.detach() for n, p in average.named_parameters()}


@way(rtol=1e-6)
def _lbfgs(model: nn.Module, loss: Loss) -> Numbers:
    optimizer = torch.optim.LBFGS(model.parameters(), 1e-2, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(0)
        value = loss(model.eval(), 0)
        value.backward()
        return value

    optimizer.step(closure)
    return {"loss": closure().detach(), **gradients(model)}


@way()
def _checkpointed(model: nn.Module, loss: Loss) -> Numbers:
    value = torch.utils.checkpoint.checkpoint(Whole(model, loss), one(model), use_reentrant=False)
    value.backward()
    return {"loss": value.detach(), **gradients(model)}


@way()
def _checkpointed_reentrant(model: nn.Module, loss: Loss) -> Numbers:
    value = torch.utils.checkpoint.checkpoint(Whole(model, loss), one(model).requires_grad_(), use_reentrant=True)
    value.backward()
    return {"loss": value.detach(), **gradients(model)}


@way(rtol=1e-8)
def _gradient_penalty(model: nn.Module, loss: Loss) -> Numbers:
    value = loss(model, 0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    (value + sum(g.abs().square().sum() for g in found if g is not None)).backward()
    return {"loss": value.detach(), **gradients(model)}


def functional(model: nn.Module, loss: Loss) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    whole, scale = Whole(model.eval(), loss), one(model)
    parameters = {n: p.detach() for n, p in whole.named_parameters()}
    return lambda p: torch.func.functional_call(whole, p, (scale,)), parameters


@way(rtol=1e-8)
def _hessian_vector(model: nn.Module, loss: Loss) -> Numbers:
    f, at = functional(model, loss)
    value, tangents = torch.func.jvp(torch.func.grad(f), (at,), ({n: torch.ones_like(p) for n, p in at.items()},))
    return {**{f"g {n}": x for n, x in value.items()}, **{f"H {n}": x for n, x in tangents.items()}}


@way(rtol=1e-8)
def _ensemble(model: nn.Module, loss: Loss) -> Numbers:
    f, at = functional(model, loss)
    several = {n: torch.stack([p, p * 1.1, p * 0.9]) for n, p in at.items()}
    return torch.func.vmap(torch.func.grad(f), randomness="same")(several)


@way()
def _copied(model: nn.Module, loss: Loss) -> Numbers:
    one_step(model, loss)
    return {
        **one_step(copy.deepcopy(model), loss),
        **{f"2 {n}": x for n, x in one_step(pickle.loads(pickle.dumps(model)), loss, 1).items()},
    }


@way(rtol=1e-8)
def _threads(model: nn.Module, loss: Loss) -> Numbers:
    """Two threads train their copies, in turns that the interpreter chooses."""
    copies = [copy.deepcopy(model.eval()) for _ in range(2)]
    state = torch.get_rng_state()
    loss(copies[0], 0)
    if not torch.equal(state, torch.get_rng_state()):
        raise NotImplementedError("the threads share their random numbers")
    found: list[Any] = [None, None]

    def work(k: int) -> None:
        try:
            found[k] = [loss(copies[k], i).backward() for i in range(2)] and gradients(copies[k])
        except Exception as error:
            found[k] = error

    workers = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return {f"{k} {n}": x for k, result in enumerate(found) for n, x in result.items()}


@way()
def _traced(model: nn.Module, loss: Loss) -> Numbers:
    whole, scale = Whole(model.eval(), loss), one(model)
    traced = torch.jit.trace(whole, (scale,), check_trace=False)
    value = traced(scale)
    value.backward()
    return {"loss": value.detach(), **gradients(whole)}


@way()
def _exported(model: nn.Module, loss: Loss) -> Numbers:
    whole, scale = Whole(model.eval(), loss), one(model)
    program = torch.export.export(whole, (scale,)).module()
    value = program(scale)
    value.backward()
    return {"loss": value.detach(), **gradients(program)}


def compiled(model: nn.Module, loss: Loss, backend: str) -> Numbers:
    torch._dynamo.reset()
    return one_step(torch.compile(model.eval(), backend=backend), loss)


@way(rtol=1e-8)
def _aot_eager(model: nn.Module, loss: Loss) -> Numbers:
    return compiled(model, loss, "aot_eager")


@way(torch.float32, 1e-4, heavy=True)
def _inductor(model: nn.Module, loss: Loss) -> Numbers:
    return compiled(model, loss, "inductor")
