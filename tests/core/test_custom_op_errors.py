"""The exact text of every error of defining a custom op; files, lines and the numbers of ops are masked.

After a change of wording: ``EXPECTTEST_ACCEPT=1 pytest tests/core/test_custom_op_errors.py``.
"""

import expecttest
import pytest
import torch
from helpers.error_texts import cosine, message, sine
from helpers.ops import define
from helpers.tensors import random
from torch._subclasses import FakeTensorMode

import torch_manualgrad as mg


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
            "mgtest::bad(Tensor(a!) x) -> Tensor",
            """mgtest::bad: argument 'x' of the schema mutates memory (mgtest::bad(Tensor(a!) x) -> Tensor). A custom op must be functional: return new tensors, and write in place outside of it.""",
        )

    def test_aliasing(self):
        self.check(
            "mgtest::bad(Tensor x, Tensor(a) y) -> Tensor(a)",
            """mgtest::bad: argument 'y' of the schema aliases memory (mgtest::bad(Tensor x, Tensor(a) y) -> Tensor(a)). A custom op must be functional: return new tensors, and write in place outside of it.""",
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
        self.check("aten::sin(Tensor x) -> Tensor", """aten::sin is already defined; a duplicate name is an error (custom_op(..., redefine=True) replaces it)""")

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
        ("backward", lambda ctx, grad: {}, "4 arguments, (ctx, saved, grad_result0, grad_result1), but its parameters are (ctx, grad)"),
        ("backward", lambda ctx, saved, a, b, c: {}, "4 arguments"),
        ("save_for_backward", lambda inputs: None, "2 arguments, (inputs, output), but its parameters are (inputs)"),
        ("jvp", lambda inputs, tangents: None, "3 arguments, (inputs, output, tangents), but its parameters are (inputs, tangents)"),
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
