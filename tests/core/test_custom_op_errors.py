"""The exact text of every error of defining and of differentiating a custom op; files, lines and the numbers of ops are masked.

After a change of wording: ``EXPECTTEST_ACCEPT=1 pytest tests/core/test_custom_op_errors.py``.
"""

import re

import expecttest
import pytest
import torch
from helpers.ops import define
from helpers.sine import keep_x, sine
from helpers.tensors import random
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp

import torch_manualgrad as mg


def message(function, expected=RuntimeError):
    with pytest.raises(expected) as caught:
        function()
    text = re.sub(r"/\S+\.py:\d+", "FILE:LINE", str(caught.value))
    return re.sub(r"mgtest::op\d+", "mgtest::op", text)


def cosine(ctx, x, g):
    return {"x": g * x.cos()}


# -- defining ---------------------------------------------------------------------------------------------------------


class TestDefinition(expecttest.TestCase):
    def check(self, schema, expected, error=ValueError, reference=lambda x: x):
        self.assertExpectedInline(message(lambda: mg.custom_op(schema)(reference), error), expected, skip=1)

    def test_no_namespace(self):
        self.check(
            "wave(Tensor x) -> Tensor",
            """schema 'wave(Tensor x) -> Tensor' has no namespace: expected 'namespace::name(...) -> ...'""",
        )

    def test_mutating(self):
        self.check(
            "mgtest::bad(Tensor(a!) x) -> Tensor(b!)",
            """mgtest::bad: result 0 of the schema aliases no argument (mgtest::bad(Tensor(a!) x) -> Tensor(b!))""",
        )

    def test_aliasing(self):
        self.check(
            "mgtest::bad(Tensor x, Tensor(a) y) -> Tensor(a)",
            """mgtest::bad: argument 'y' of the schema aliases memory (mgtest::bad(Tensor x, Tensor(a) y) -> Tensor(a)). Expected an operator that returns new tensors, and no view of an argument.""",
        )

    def test_unreadable(self):
        self.check(
            "mgtest::bad(Tensr x) -> Tensor",
            """\
schema 'mgtest::bad(Tensr x) -> Tensor' cannot be read: unknown type specifier. Common valid schema types include Tensor, SymInt, int, float, bool, Scalar; for a full list, please see https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/README.md#func :
mgtest::bad(Tensr x) -> Tensor
            ~~~~~ <--- HERE""",
        )

    def test_overload(self):
        self.check(
            "mgtest::bad.out(Tensor x) -> Tensor",
            """schema 'mgtest::bad.out(Tensor x) -> Tensor' names an overload; a custom op is one operator, without overloads""",
        )

    def test_duplicate(self):
        self.check(
            "aten::sin(Tensor x) -> Tensor",
            """aten::sin is already defined; a duplicate name is an error (custom_op(..., redefine=True) replaces it)""",
        )

    def test_two_results_of_one_name(self):
        self.check(
            "mgtest::bad(Tensor x) -> (Tensor y, Tensor y)",
            """mgtest::bad: two results of the schema are called 'y' (mgtest::bad(Tensor x) -> (Tensor y, Tensor y))""",
        )

    def test_a_result_called_like_a_written_argument(self):
        for _ in range(2):  # the first one leaves nothing behind
            self.check(
                "mgtest::bad(Tensor(a!) x) -> Tensor x",
                """mgtest::bad_functional: two results of the schema are called 'x' (mgtest::bad_functional(Tensor x) -> (Tensor x, Tensor x))""",
            )

    def test_one_letter_for_two_arguments(self):
        self.check(
            "mgtest::bad(Tensor(a!) x, Tensor(a!) y) -> Tensor(a!)",
            """mgtest::bad: arguments 'x' and 'y' have one letter in the schema (mgtest::bad(Tensor(a!) x, Tensor(a!) y) -> Tensor(a!)). Expected a letter for each written argument.""",
            reference=lambda x, y: x,
        )

    def test_no_annotations(self):
        self.check(
            "mgtest::bad",
            """infer_schema(func): Parameter x must have a type annotation. Got func with signature (x))""",
        )

    def test_no_schema(self):
        self.check(sine, """custom_op takes a schema, 'namespace::name(...) -> ...', got function""", TypeError)

    def test_no_function(self):
        self.check("mgtest::bad(Tensor x) -> Tensor", """a custom op is defined by a function, got int""", TypeError, 3)


class TestRegistration(expecttest.TestCase):
    def check(self, act, expected, error=RuntimeError):
        op = define("(Tensor x) -> (Tensor, int)", lambda x: (x * 2, 3))
        self.assertExpectedInline(message(lambda: act(op), error), expected, skip=1)

    def test_unknown_device(self):
        self.check(
            lambda op: op.impl("gpu"),
            """device 'gpu' is unknown; expected one of ['default', 'cpu', 'cuda', 'mps', 'xpu', 'hpu', 'meta']""",
            ValueError,
        )

    def test_not_a_function(self):
        self.check(
            lambda op: op.impl_jvp(3), """mgtest::op: the jvp implementation must be a function, got int""", TypeError
        )

    def test_length_of_output_differentiability(self):
        self.check(
            lambda op: op.impl_backward(cosine, output_differentiability=[True]),
            """mgtest::op: output_differentiability=[True] has 1 entries, but the op has 2 outputs.""",
        )

    def test_differentiable_number(self):
        self.check(
            lambda op: op.impl_backward(cosine, output_differentiability=[True, True]),
            """mgtest::op: output_differentiability=[True, True] marks output 1 as differentiable, but it is of type int, not a Tensor or a list of them.""",
        )

    def test_swap_of_an_unknown_kind(self):
        self.check(
            lambda op: op.swap(forward=cosine),
            """mgtest::op: swap has no 'forward'; expected some of ['default', 'fake', 'vmap', 'save_for_backward', 'backward', 'jvp', 'autograd', 'cpu', 'cuda', 'mps', 'xpu', 'hpu', 'meta']""",
            TypeError,
        )

    def test_swap_of_something_else_than_a_function(self):
        self.check(
            lambda op: op.swap(backward=3),
            """mgtest::op: swap(backward=...) takes a function or None, got int""",
            TypeError,
        )

    def test_swap_of_output_differentiability_alone(self):
        self.check(
            lambda op: op.swap(output_differentiability=[True, False]),
            """mgtest::op: swap(output_differentiability=...) goes with a backward, and there is none""",
            TypeError,
        )


class TestImplementations(expecttest.TestCase):
    def check(self, schema, reference, expected):
        op = define(schema, reference)
        self.assertExpectedInline(message(lambda: op(random(3))), expected, skip=1)

    def test_returns_an_input(self):
        self.check(
            "(Tensor x) -> Tensor",
            lambda x: x,
            """mgtest::op, implemented at FILE:LINE: an output is the input 'x' itself. A custom op returns new tensors; return a clone.""",
        )

    def test_returns_a_keyword_input(self):
        op = define("(Tensor x, *, Tensor[] k) -> (Tensor, Tensor)", lambda x, *, k: (x * 2, k[0]))
        self.assertExpectedInline(
            message(lambda: op(random(3), k=[random(3)])),
            """mgtest::op, implemented at FILE:LINE: an output is the input 'k' itself. A custom op returns new tensors; return a clone.""",
        )

    def test_returns_a_view(self):
        self.check(
            "(Tensor x) -> Tensor",
            lambda x: x[1:],
            """mgtest::op, implemented at FILE:LINE: an output shares memory with an input or another output. A custom op returns new tensors.""",
        )

    def test_returns_the_same_twice(self):
        self.check(
            "(Tensor x) -> (Tensor, Tensor)",
            lambda x: (x.sin(),) * 2,
            """mgtest::op, implemented at FILE:LINE: an output shares memory with an input or another output. A custom op returns new tensors.""",
        )

    def test_number_of_outputs(self):
        self.check(
            "(Tensor x) -> (Tensor, Tensor)",
            lambda x: (x * 2,),
            """mgtest::op, implemented at FILE:LINE: expected a tuple of 2 outputs, got 1.""",
        )

    def test_list_for_a_tuple(self):
        self.check(
            "(Tensor x) -> (Tensor, Tensor)",
            lambda x: [x * 2, x * 3],
            """mgtest::op, implemented at FILE:LINE: expected a tuple of 2 outputs, got list.""",
        )

    def test_none(self):
        self.check(
            "(Tensor x) -> Tensor",
            lambda x: None,
            """mgtest::op, implemented at FILE:LINE: expected a Tensor as output 'result', got NoneType.""",
        )

    def test_tensor_for_a_list(self):
        self.check(
            "(Tensor x) -> Tensor[]",
            lambda x: x * 2,
            """mgtest::op, implemented at FILE:LINE: expected a list of tensors as output 'result', got Tensor.""",
        )

    def test_something_for_nothing(self):
        self.check(
            "(Tensor x) -> ()", lambda x: x * 2, """mgtest::op, implemented at FILE:LINE: expected None, got Tensor."""
        )

    def test_no_fake(self):
        op = define("(Tensor x) -> Tensor", lambda x: torch.from_numpy(x.numpy() * 2))
        with FakeTensorMode() as mode:
            x = mode.from_tensor(random(3))
            self.assertExpectedInline(
                message(lambda: op(x)),
                """\
.numpy() is not supported for tensor subclasses.
mgtest::op has no fake implementation, and its reference cannot run on tensors without data. Register one with impl_fake.""",
            )

    def test_no_fake_in_a_compiled_function(self):
        op = define("(Tensor x) -> Tensor", lambda x: torch.from_numpy(x.numpy() * 2))
        compiled = torch.compile(op, backend="eager", fullgraph=True)
        assert "Register one with impl_fake" in message(lambda: compiled(random(3)), Exception)


@pytest.mark.parametrize(
    "kind, function, expected",
    [
        (
            "backward",
            lambda ctx, grad: {},
            "4 arguments, (ctx, saved, grad_result0, grad_result1), but its parameters are (ctx, grad)",
        ),
        ("backward", lambda ctx, saved, a, b, c: {}, "4 arguments"),
        ("save_for_backward", lambda inputs: None, "2 arguments, (inputs, output), but its parameters are (inputs)"),
        (
            "jvp",
            lambda inputs, tangents: None,
            "3 arguments, (inputs, output, tangents), but its parameters are (inputs, tangents)",
        ),
    ],
)
def test_the_wrong_number_of_parameters(kind, function, expected):
    op = define("(Tensor x) -> (Tensor, Tensor)", lambda x: (x.sin(), x.cos()))
    for register in (getattr(op, f"impl_{kind}"), lambda f: op.swap(**{kind: f})):
        with pytest.raises(TypeError) as error:
            register(function)
        text = str(error.value)
        assert text.startswith(f"{op.name}: the {kind} implementation, written at {__file__}:") and expected in text
    for right in (lambda *args: None, lambda a, b, c=1, d=2, *rest: None):
        getattr(op, f"impl_{kind}")(right)


# -- differentiating --------------------------------------------------------------------------------------------------


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


class TestBatches(expecttest.TestCase):
    def check(self, returned, expected):
        op = define("(Tensor x) -> Tensor", lambda x: x * 2)
        op.impl_vmap(lambda info, in_dims, x: returned(x * 2))
        self.assertExpectedInline(message(lambda: torch.func.vmap(op)(random(2, 3))), expected, skip=1)

    def test_without_out_dims(self):
        self.check(
            lambda y: y,
            """mgtest::op: impl_vmap: expected (output, out_dims), got a Tensor of shape [2, 3] and torch.float64""",
        )

    def test_another_number_of_out_dims(self):
        self.check(
            lambda y: ([y], (0, 0)), """mgtest::op: impl_vmap: expected 1 out_dims, one for each output, got (0, 0)"""
        )

    def test_no_dim(self):
        self.check(
            lambda y: (y, 2),
            """mgtest::op: impl_vmap: out_dims has 2 for a Tensor of shape [2, 3] and torch.float64: expected one of its dims, or None""",
        )

    def test_another_size(self):
        self.check(
            lambda y: (y[:1], 0),
            """mgtest::op: impl_vmap: expected a batch of 2 in dim 0 of the output, got a Tensor of shape [1, 3] and torch.float64""",
        )
