"""The cost of a call in Python: an overridden operator and a custom op, small, with gradient and without."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from side_by_side import main, measure, summary

import torch_manualgrad as mg

COLUMNS = ["what", "stock", "compiled stock", "ours", "plain autograd.Function", "floor"]


@torch.library.custom_op("overhead_benchmark::stock", mutates_args=())
def stock_op(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


stock_op.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=_save)


@mg.custom_op("overhead_benchmark::ours(Tensor x) -> Tensor")
def our_op(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


our_op.impl_save_for_backward(lambda inputs, output: inputs.x)
our_op.impl_backward(lambda ctx, x, grad: {"x": grad * x.cos()})


class PlainNorm(torch.autograd.Function):
    """No dispatcher, one mode: what the same kernel costs at the least when called from Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x)
        ctx.save_for_backward(x, norm)
        return norm

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, norm = ctx.saved_tensors
        return mg.ops.norm_backward(grad, x, 2.0, norm, None, False)


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    x = torch.randn(1000, device=arguments.device, requires_grad=True)
    plain, norm = x.detach(), torch.linalg.vector_norm

    def compare(what: str, call: Any, **others: Any) -> dict[str, Any]:
        contenders = {"stock": lambda: call(norm), "ours": lambda: call(norm), "floor": lambda: plain * 2}
        rules = {"ours": mg.override("aten::linalg_vector_norm")}
        return {"what": what, **summary(measure(contenders | others, arguments.seconds, rules), "stock")}

    def both(f: Any) -> Any:
        return torch.autograd.grad(f(x), x)

    function = {"plain autograd.Function": lambda: both(PlainNorm.apply)}
    found = [
        compare("vector_norm, 1000 elements, forward and backward", both, **function),
        compare("vector_norm, 1000 elements, forward with gradient", lambda f: f(x)),
        compare("vector_norm, 1000 elements, no gradient", lambda f: f(plain)),
        compare("torch.func.grad of vector_norm, 1000 elements", lambda f: torch.func.grad(f)(plain)),
    ]
    pairs = {
        "custom op, 1000 elements, forward with gradient": (lambda: stock_op(x), lambda: our_op(x)),
        "custom op, 1000 elements, forward and backward": (
            lambda: torch.autograd.grad(stock_op(x), x, plain),
            lambda: torch.autograd.grad(our_op(x), x, plain),
        ),
        "custom op, 1000 elements, no gradient": (lambda: stock_op(plain), lambda: our_op(plain)),
    }
    for what, (stock, ours) in pairs.items():
        found.append({"what": what, **summary(measure({"stock": stock, "ours": ours}, arguments.seconds), "stock")})
    # last, because Python frames cost more once the compiler has been used in a process
    compiled = torch.compile(norm)
    function["compiled stock"] = lambda: both(compiled)
    found.append(compare("the first row again, after torch.compile was used", both, **function))
    return found


if __name__ == "__main__":
    main(
        "overhead",
        "Cost of a call (stock: PyTorch's own; for custom ops torch.library.custom_op)",
        rows,
        COLUMNS,
        threads=[1],
    )
