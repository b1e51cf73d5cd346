"""Calls of ``apply`` of an autograd.Function in compiled functions. Each Function has a backward that is not the derivative
of its forward, so that a backward that is not used is seen."""

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached

pytestmark = pytest.mark.skipif(
    not reached("2.13"), reason="Dynamo of this torch ends the graph at functions with rules"
)

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
W = torch.tensor([0.9, 0.4, -0.6], dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def of(forward, backward, setup=None, **attributes):
    """A Function."""
    methods = {"forward": forward, "backward": backward} | ({} if setup is None else {"setup_context": setup})
    return type("Own", (Function,), {n: staticmethod(m) for n, m in methods.items()} | attributes)


def saving(value):
    """A forward that saves its tensors."""

    def forward(ctx, *args):
        ctx.save_for_backward(*args)
        return value(*args)

    return forward


def save_all(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def attributes(ctx, x, k, name=None, function=None):
    ctx.k, ctx.shape, ctx.kept, ctx.function = k, x.shape, [x, {"own": x.exp()}], function
    return x.sum(0, keepdim=True) * k


def of_attributes(ctx, g):
    return (g * ctx.k * ctx.function(ctx.kept[0]) * ctx.kept[1]["own"]).expand(ctx.shape), None, None, None


def with_constant(ctx, x):
    y, z = x.exp(), 2 * x
    ctx.save_for_backward(x, y, z)
    ctx.mark_non_differentiable(z)
    return y, z


def _of_first(ctx):
    if ctx.needs_input_grad[1]:
        raise RuntimeError("only the first argument has a gradient")
    return 3


def masked(ctx, x):
    ctx.positive = x > 0
    return x.clamp(min=0), x.argsort()


def partial(ctx, x):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x)
    return x.sin(), x.cos()


class Classmethods(Function):
    @classmethod
    def forward(cls, ctx, x):
        ctx.save_for_backward(cls.scaled(x))
        return cls.scaled(x)

    @classmethod
    def backward(cls, ctx, g):
        return cls.scaled(g) * ctx.saved_tensors[0]

    scaled = staticmethod(lambda x: 3 * x)


class Mixed(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g * w, 3 * g * x


class Base(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(None, x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        _, x, y = ctx.saved_tensors
        return g * y if ctx.needs_input_grad[0] else None, g * x if ctx.needs_input_grad[1] else None


class Derived(Base):
    @staticmethod
    def backward(ctx, g):
        of_x, of_y = Base.backward(ctx, g)
        return 3 * of_x, of_y


Sine = of(lambda x: x.sin(), lambda ctx, g: 2 * g * ctx.saved_tensors[0] * ctx.saved_tensors[1], save_all)
Sine.generate_vmap_rule = True
Product = of(saving(lambda x, y: x * y), lambda ctx, g: (3 * g * ctx.saved_tensors[1], 5 * g * ctx.saved_tensors[0]))
Square = of(saving(lambda x: Product.apply(x, x)), lambda ctx, g: Product.apply(g, ctx.saved_tensors[0]))
Scaled = of(lambda x, k=2: x * k, lambda ctx, g: (7 * g, None), lambda ctx, inputs, output: None)
Powers = of(
    lambda x, k=2, m=3: x**k * m,
    lambda ctx, g: (g * ctx.k * ctx.m, None, None),
    lambda ctx, inputs, output: vars(ctx).update(k=inputs[1], m=inputs[2]),
)
Several = of(
    lambda x, k=2, *others: x**k + sum(others),
    lambda ctx, g: (g * ctx.k, None, *[5 * g] * ctx.others),
    lambda ctx, inputs, output: vars(ctx).update(k=inputs[1], others=len(inputs) - 2),
)
Attributes = of(attributes, of_attributes)


@torch.no_grad()
def without_grad(x):
    return Sine.apply(x)


Step = of(lambda x: x.detach().round(), lambda ctx, g: g * ctx.saved_tensors[0], save_all)
Rounded = of(saving(lambda x: x.detach().round()), lambda ctx, g: g * ctx.saved_tensors[0])


def of_result(x):
    y = Rounded.apply(x)
    return y.sum() * (2 if y.requires_grad else 3)


def gradient_inside(x):
    z = x * 1
    (g,) = torch.autograd.grad(Rounded.apply(z).sum(), z, create_graph=True)
    return g.pow(2).sum()


def program(body, own=None):
    """A function that calls ``body(own, x)``."""
    return lambda x: body(own, x)


COMPILED = {
    "saved": program(lambda own, x: Sine.apply(x.exp()).pow(2).sum()),
    "a closure": program(
        lambda own, x: own.apply(x).pow(2).sum(),
        of(saving(lambda x: x * W), lambda ctx, g: g * W * ctx.saved_tensors[0]),
    ),
    "a broadcast": program(
        lambda own, x: (own.apply(x) * x).sum(), of(lambda ctx, x: x * 2, lambda ctx, g: g.expand(2, 3))
    ),
    "a list": program(
        lambda own, x: own.apply([x.sin()], x).pow(2).sum(),
        of(lambda ctx, xs, x: x * xs[0], lambda ctx, g: (None, g * 2)),
    ),
    "another": program(lambda own, x: Square.apply(x).pow(2).sum()),
    "its input": program(lambda own, x: own.apply(x).pow(2).sum(), of(lambda ctx, x: x, lambda ctx, g: -g)),
    "a view": program(
        lambda own, x: own.apply(x.sin()).pow(2).sum(), of(lambda ctx, x: x.view_as(x), lambda ctx, g: -2 * g)
    ),
    "attributes": program(
        lambda own, x: own.apply(x, 3, "n", torch.sin).pow(2).sum() + own.apply(x, 2, "n", torch.cos).sum(), Attributes
    ),
    "a constant": program(
        lambda own, x: (own.apply(x)[0] * own.apply(x)[1]).sum(),
        of(with_constant, lambda ctx, g, h: g * ctx.saved_tensors[1] * ctx.saved_tensors[2] + h),
    ),
    "integers": program(
        lambda own, x: own.apply(x)[0].pow(3).sum() + own.apply(x)[1].sum(),
        of(masked, lambda ctx, g, h: torch.where(ctx.positive, g, g / 9) + h),
    ),
    "no zeros": program(
        lambda own, x: own.apply(x)[1].pow(2).sum(),
        of(partial, lambda ctx, g, h: 7 * h + (0 if g is None else g * ctx.saved_tensors[0])),
    ),
    "more than one None": program(
        lambda own, x: own.apply(x).pow(2).sum(), of(lambda ctx, x: x * 2, lambda ctx, g: (g, None, None))
    ),
    "None": program(lambda own, x: (own.apply(x) * x).sum(), of(lambda ctx, x: x * 2, lambda ctx, g: None)),
    "defaults": program(lambda own, x: (Powers.apply(x) * x).sum() + Powers.apply(x, 3).pow(2).sum()),
    "more arguments": program(
        lambda own, x: (Several.apply(x) * Several.apply(x, 3, x.sin(), x)).pow(2).sum(),
    ),
    "class methods": program(lambda own, x: Classmethods.apply(x).pow(2).sum()),
    "a base class": program(lambda own, x: Derived.apply(x, W).pow(2).sum()),
    "mixed precision": program(lambda own, x: Mixed.apply(x, W).pow(2).sum()),
    "whether the result requires grad": of_result,
    "autograd.grad inside": gradient_inside,
    "grad of a step inside": program(lambda own, x: grad(lambda x: own.apply(x).sum())(x).pow(2).sum(), Step),
    "grad inside": program(lambda own, x: grad(lambda x: Sine.apply(x).sum())(x).pow(2).sum()),
    "vmap inside": program(lambda own, x: vmap(lambda x: Sine.apply(x).exp())(x.expand(2, 3) * 1).pow(2).sum()),
    "without grad": program(lambda own, x: (without_grad(x) * x).sum()),
}

Number = of(lambda ctx, x: x * x[0].item(), lambda ctx, g: 3 * g)
UNCOMPILED = {
    "a write": program(
        lambda own, x: own.apply(x.clone()).pow(2).sum(),
        of(lambda ctx, x: (ctx.mark_dirty(x), x.mul_(2))[1], lambda ctx, g: 3 * g),
    ),
    "a number": program(lambda own, x: own.apply(x).pow(2).sum(), Number),
    "out=": program(
        lambda own, x: own.apply(x).pow(2).sum(),
        of(lambda ctx, x: torch.exp(x, out=torch.empty_like(x)), lambda ctx, g: 3 * g),
    ),
    "an error": program(
        lambda own, x: own.apply(x, X).pow(2).sum(),
        of(
            saving(lambda x, y: x * y),
            lambda ctx, g: (_of_first(ctx) * g * ctx.saved_tensors[0], None),
        ),
    ),
    "a keyword": program(lambda own, x: Scaled.apply(x, k=3).pow(2).sum()),
    "once": program(
        lambda own, x: own.apply(x).pow(2).sum(), of(lambda ctx, x: x.sin(), once_differentiable(lambda ctx, g: 3 * g))
    ),
    "random": program(
        lambda own, x: own.apply(x).pow(2).sum(),
        of(
            lambda ctx, x: (ctx.save_for_backward(m := torch.rand_like(x)), x * m)[1],
            lambda ctx, g: 3 * g * ctx.saved_tensors[0],
        ),
    ),
}


def derivatives(function, orders=3):
    """The value and its derivatives; a word in place of the first that does not exist."""
    torch.manual_seed(3)
    x = X.clone().requires_grad_()
    found = [function(x)]
    for _ in range(orders):
        y = found[-1] if found[-1].dim() == 0 else found[-1].sin().sum()
        if not y.requires_grad:
            return [*found, "constant"]
        try:
            (g,) = torch.autograd.grad(y, x, create_graph=True, allow_unused=True)
        except RuntimeError as error:
            return [*found, str(error)]
        if g is None:
            return [*found, "unused"]
        found.append(g)
    return found


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if isinstance(a, str) or isinstance(b, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("error:torch_manualgrad")
@pytest.mark.parametrize("name", COMPILED)
def test_three_orders_in_one_graph(name):
    f = COMPILED[name]
    expected = derivatives(f)
    same(derivatives(mg.compile(f, lowering="eager", fullgraph=True)), expected)


@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_is_not_compiled_is_said_and_right(name):
    f = UNCOMPILED[name]
    expected = derivatives(f)
    with pytest.warns(RuntimeWarning, match="runs uncompiled"):
        found = derivatives(mg.compile(f, lowering="eager"))
    same(found, expected)


@pytest.mark.filterwarnings("ignore:torch_manualgrad")
@pytest.mark.parametrize("nested", [False, True])
def test_a_graph_may_end_inside_of_a_forward(nested):
    class Net(torch.nn.Module):
        def forward(self, x):
            return Number.apply(x).pow(2).sum()

    expected = derivatives(Net())
    with torch._dynamo.config.patch(nested_graph_breaks=nested):
        same(derivatives(mg.compile(Net(), lowering="eager")), expected)


@pytest.mark.filterwarnings("error:torch_manualgrad")
def test_forward_mode_and_transforms_around():
    f = mg.compile(COMPILED["saved"], lowering="eager", fullgraph=True)
    _, first, second, _ = derivatives(COMPILED["saved"])
    torch.testing.assert_close(jvp(f, (X,), (W.detach(),))[1], first.detach() @ W.detach())
    torch.testing.assert_close(grad(f)(X), first.detach())
    torch.testing.assert_close(vmap(grad(f))(torch.stack([X, X]))[1], first.detach())
    torch.testing.assert_close(grad(lambda x: grad(f)(x).sin().sum())(X), second.detach())


@pytest.mark.parametrize("around", [False, True])
def test_the_backward_is_outside_of_autocast(around):
    product = of(saving(lambda x, w: x @ w), lambda ctx, g: (g.float() @ ctx.saved_tensors[1].mT, None))
    x = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
    w = torch.linspace(0, 2, 9).reshape(3, 3)

    def inside(x):
        with torch.autocast("cpu"):
            return product.apply(x, w)

    f = (lambda x: product.apply(x, w)) if around else inside
    found = []
    for g in (f, mg.compile(f, lowering="eager", fullgraph=True)):
        with torch.autocast("cpu", enabled=around):
            y = g(x)
        assert y.dtype is torch.bfloat16
        found.append(torch.autograd.grad(y.float().sin().sum(), x)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "backward, message",
    [
        (lambda ctx, g: (), "incorrect number of gradients"),
        (lambda ctx, g: (g, g), "incorrect number of gradients"),
        (lambda ctx, g: g[:2], "sum_to_size|invalid gradient"),
    ],
)
def test_a_wrong_backward_raises(backward, message):
    own = of(lambda ctx, x: x * 2, backward)
    f = mg.compile(lambda x: own.apply(x).sum(), lowering="eager")
    x = X.clone().requires_grad_()
    with pytest.raises(Exception, match=message):
        torch.autograd.grad(f(x), x)


Halved = of(
    lambda ctx, x: (setattr(ctx, "n", torch.cat([x, x]).shape[0] // 2 + x.shape[0] // 2), x.sin())[1],
    lambda ctx, g: g * ctx.n * torch.ones(ctx.n, dtype=g.dtype)[: g.shape[0]],
)
OF_OPEN_SIZES = {
    "saved": lambda x: Sine.apply(x.exp()).pow(2).sum(),
    "attributes": lambda x: Attributes.apply(x, 2, "n", torch.sin).pow(2).sum(),
    "integers": COMPILED["integers"],
    "a size of the forward in the backward": lambda x: Halved.apply(x).pow(2).sum(),
}


@pytest.mark.filterwarnings("error:torch_manualgrad")
@pytest.mark.parametrize("name", OF_OPEN_SIZES)
def test_sizes_that_vary(name):
    f = OF_OPEN_SIZES[name]
    compiled = mg.compile(f, dynamic=True, fullgraph=True, lowering="eager")
    for n in (3, 5, 8):
        x = torch.linspace(-1, 2, n, dtype=torch.float64, requires_grad=True)
        first = [torch.autograd.grad(h(x), x, create_graph=True)[0] for h in (compiled, f)]
        torch.testing.assert_close(*first)
        torch.testing.assert_close(*[torch.autograd.grad(g.sin().sum(), x)[0] for g in first])


def test_inductor():
    def f(x):
        return Attributes.apply(x, 2, "n", torch.sin).pow(2).sum() + Sine.apply(x).sum()

    x = X.clone().requires_grad_()
    first = [torch.autograd.grad(h(x), x, create_graph=True)[0] for h in (mg.compile(f, fullgraph=True), f)]
    torch.testing.assert_close(*first)
    torch.testing.assert_close(*[torch.autograd.grad(g.sin().sum(), x)[0] for g in first])
