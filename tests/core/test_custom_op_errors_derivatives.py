"""The exact text of every error of differentiating a custom op; files, lines and the numbers of ops are masked.

After a change of wording: ``EXPECTTEST_ACCEPT=1 pytest tests/core/test_custom_op_errors_derivatives.py``.
"""

import expecttest
import torch
from helpers.error_texts import cosine, message, sine
from helpers.ops import define
from helpers.tensors import random
from torch.func import grad, jvp


def keep_x(inputs, output):
    return inputs.x


def run_backward(gradients, schema="(Tensor x) -> Tensor", args=()):
    op = define(
        schema,
        lambda *args: random(3),
        save_for_backward=lambda inputs, output: None,
        backward=lambda ctx, saved, g: gradients,
    )
    op(*(args or (random(3).requires_grad_(),))).sum().backward()


def run_jvp(tangent, schema="(Tensor x) -> Tensor", result=None):
    op = define(schema, lambda x: x * 2 if result is None else result(x), jvp=lambda i, o, t: tangent)
    jvp(op, (random(3),), (random(3),))


def variable():
    return random(3).requires_grad_()


class TestNoDerivative(expecttest.TestCase):
    def check(self, act, expected):
        self.assertExpectedInline(message(act), expected, skip=1)

    def test_reverse(self):
        op = sine()
        assert not op(random(3)).requires_grad
        with torch.no_grad():
            op(variable())
        self.check(
            lambda: op(variable()),
            """mgtest::op has no derivative in reverse mode, but an input requires grad. Register one with impl_save_for_backward and impl_backward, or call it under torch.no_grad().""",
        )

    def test_reverse_in_a_list(self):
        op = define("(Tensor[] xs, Tensor?[] ys) -> Tensor", lambda xs, ys: sum(xs))
        op([random(3)], [None])
        self.check(
            lambda: op([random(3), variable()], []),
            """mgtest::op has no derivative in reverse mode, but an input requires grad. Register one with impl_save_for_backward and impl_backward, or call it under torch.no_grad().""",
        )
        message(lambda: op([random(3)], [None, variable()]))

    def test_reverse_in_a_transform(self):
        op = sine()
        self.check(
            lambda: grad(lambda x: op(x).sum())(random(3)),
            """mgtest::op has no derivative in reverse mode, but an input requires grad. Register one with impl_save_for_backward and impl_backward, or call it under torch.no_grad().""",
        )

    def test_forward(self):
        op = sine()
        self.check(
            lambda: jvp(op, (random(3),), (random(3),)),
            """mgtest::op has no derivative in forward mode, but an input has a tangent. Register impl_jvp, or impl_save_for_backward and a differentiable impl_backward, from which a jvp is derived.""",
        )

    def test_only_backward(self):
        op = sine(backward=cosine)
        self.check(
            lambda: op(variable()),
            """mgtest::op has a backward implementation, written at FILE:LINE, but no save_for_backward implementation. A gradient needs both: register the other with impl_save_for_backward.""",
        )

    def test_only_save_for_backward(self):
        op = sine(save_for_backward=keep_x)
        self.check(
            lambda: op(variable()),
            """mgtest::op has a save_for_backward implementation, written at FILE:LINE, but no backward implementation. A gradient needs both: register the other with impl_backward.""",
        )

    def test_jvp_of_a_backward_that_detaches(self):
        op = sine(save_for_backward=keep_x, backward=lambda ctx, x, g: {"x": g.detach()})
        self.check(
            lambda: jvp(op, (random(3),), (random(3),)),
            """mgtest::op: no jvp is registered, and none can be derived from its backward: the gradient that it returns for 'x' does not depend differentiably on the cotangent. Register a jvp, write the backward in differentiable operations, or return None for a gradient that is zero.""",
        )

    def test_jvp_of_a_backward_in_numpy(self):
        op = sine(save_for_backward=keep_x, backward=lambda ctx, x, g: {"x": torch.from_numpy(g.numpy())})
        self.check(
            lambda: jvp(op, (random(3),), (random(3),)),
            """\
Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.
mgtest::op has no jvp, and this was raised while one was derived from its backward. Register a jvp, or write the backward in differentiable operations.""",
        )

    def test_autograd_function_in_a_transform(self):
        class Plain(torch.autograd.Function):
            @staticmethod
            def forward(x):
                return op.below_autograd(x)

            @staticmethod
            def setup_context(ctx, inputs, output):
                pass

            @staticmethod
            def backward(ctx, g):
                return 2 * g

        class Old(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return op.below_autograd(x)

            @staticmethod
            def backward(ctx, g):
                return 2 * g

        for function in (Plain, Old):
            op = sine(autograd=function.apply)
            x = variable()
            assert (torch.autograd.grad(op(x).sum(), x)[0] == 2).all()
            op = sine(autograd=lambda x: function.apply(x))  # noqa: B023
            text = message(lambda: grad(lambda x: op(x).sum())(random(3)))  # noqa: B023
        self.assertExpectedInline(
            text,
            """mgtest::op: the autograd implementation, written at FILE:LINE, applies a torch.autograd.Function, which cannot run inside a torch.func transform here. Derive it from torch_manualgrad.SingleLevelFunction instead.""",
        )


class TestGradients(expecttest.TestCase):
    def check(self, gradients, expected, *more):
        self.assertExpectedInline(message(lambda: run_backward(gradients, *more)), expected, skip=1)

    def test_no_dict(self):
        self.check(
            random(3),
            """In the backward of mgtest::op, written at FILE:LINE: expected a dict from input name to gradient, got Tensor.""",
        )

    def test_missing(self):
        self.check(
            {"x": None},
            """In the backward of mgtest::op, written at FILE:LINE: expected a gradient (None for zero) for each of the tensor arguments ['x', 'y'] and for nothing else; missing ['y'].""",
            "(Tensor x, Tensor? y, int n) -> Tensor",
            (variable(), None, 1),
        )

    def test_surplus(self):
        self.check(
            {"x": None, "n": None, "m": None},
            """In the backward of mgtest::op, written at FILE:LINE: expected a gradient (None for zero) for each of the tensor arguments ['x'] and for nothing else; surplus ['n', 'm'].""",
            "(Tensor x, int n) -> Tensor",
            (variable(), 1),
        )

    def test_no_tensor(self):
        self.check(
            {"x": 3.0},
            """In the backward of mgtest::op, written at FILE:LINE: expected a Tensor or None as the gradient for input 'x', got float.""",
        )

    def test_shape(self):
        self.check(
            {"x": random(1)},
            """In the backward of mgtest::op, written at FILE:LINE: the gradient for input 'x' has shape (1,), but the input has shape (3,).""",
        )

    def test_for_none(self):
        self.check(
            {"x": None, "y": random(3)},
            """In the backward of mgtest::op, written at FILE:LINE: expected None as the gradient for input 'y', which was not a Tensor but None; got a Tensor.""",
            "(Tensor x, Tensor? y=None) -> Tensor",
            (variable(), None),
        )

    def test_list_expected(self):
        self.check(
            {"xs": random(3)},
            """In the backward of mgtest::op, written at FILE:LINE: input 'xs' is a list: expected a list of gradients, got Tensor.""",
            "(Tensor[] xs) -> Tensor",
            ([variable()],),
        )

    def test_length_of_list(self):
        self.check(
            {"xs": [None]},
            """In the backward of mgtest::op, written at FILE:LINE: input 'xs' is a list of 2: expected as many gradients, got 1.""",
            "(Tensor[] xs) -> Tensor",
            ([variable(), variable()],),
        )

    def test_element_of_list(self):
        self.check(
            {"xs": [None, 2]},
            """In the backward of mgtest::op, written at FILE:LINE: expected a Tensor or None as the gradient for input 'xs[1]', got int.""",
            "(Tensor[] xs) -> Tensor",
            ([variable(), variable()],),
        )

    def test_shape_of_element(self):
        self.check(
            {"xs": [None, random(2)]},
            """In the backward of mgtest::op, written at FILE:LINE: the gradient for input 'xs[1]' has shape (2,), but the input has shape (3,).""",
            "(Tensor[] xs) -> Tensor",
            ([variable(), variable()],),
        )

    def test_element_for_none(self):
        self.check(
            {"xs": [None, random(3)]},
            """In the backward of mgtest::op, written at FILE:LINE: expected None as the gradient for input 'xs[1]', which was not a Tensor but None; got a Tensor.""",
            "(Tensor?[] xs) -> Tensor",
            ([variable(), None],),
        )


class TestTangents(expecttest.TestCase):
    TWO = ("(Tensor x) -> (Tensor a, Tensor[] b)", lambda x: (x * 2, [x * 3, x * 4]))

    def check(self, tangent, expected, *more):
        self.assertExpectedInline(message(lambda: run_jvp(tangent, *more)), expected, skip=1)

    def test_number(self):
        self.check(
            (None,),
            """In the jvp of mgtest::op, written at FILE:LINE: expected a tuple of 2 tangents, one for each output (None for zero), got 1.""",
            *self.TWO,
        )

    def test_no_tuple(self):
        self.check(
            random(3),
            """In the jvp of mgtest::op, written at FILE:LINE: expected a tuple of 2 tangents, one for each output (None for zero), got Tensor.""",
            *self.TWO,
        )

    def test_type(self):
        self.check(
            3.0,
            """In the jvp of mgtest::op, written at FILE:LINE: expected a Tensor or None as the tangent of output 'result', got float.""",
        )

    def test_tuple_for_one(self):
        self.check(
            (random(3),),
            """In the jvp of mgtest::op, written at FILE:LINE: expected a Tensor or None as the tangent of output 'result', got tuple.""",
        )

    def test_shape(self):
        self.check(
            random(1),
            """In the jvp of mgtest::op, written at FILE:LINE: the tangent of output 'result' has shape (1,), but the output has shape (3,).""",
        )

    def test_complex_for_real(self):
        self.check(
            random(3) * 1j,
            """In the jvp of mgtest::op, written at FILE:LINE: the tangent of output 'result' is torch.complex128, but the output is torch.float64.""",
        )

    def test_list_expected(self):
        self.check(
            (None, random(3)),
            """In the jvp of mgtest::op, written at FILE:LINE: output 'b' is a list of 2: expected as many tangents, got Tensor.""",
            *self.TWO,
        )

    def test_length_of_list(self):
        self.check(
            (None, [None]),
            """In the jvp of mgtest::op, written at FILE:LINE: output 'b' is a list of 2: expected as many tangents, got 1.""",
            *self.TWO,
        )

    def test_for_a_number(self):
        self.check(
            (None, random(3)),
            """In the jvp of mgtest::op, written at FILE:LINE: expected None as the tangent of output 'result1', which is not a Tensor.""",
            "(Tensor x) -> (Tensor, int)",
            lambda x: (x * 2, 3),
        )
