"""Under torch.compile and torch.export: numbers, and that no graph outlives the derivatives it was made for."""

import os
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ops import UNIT, define, unit
from helpers.sine import DOUBLE, TRIPLE, factor, keep_x, loss_of, sine, times
from helpers.tensors import random, same
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core import compile_cache, packages

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


# -- numbers ---------------------------------------------------------------------------------------------------------

TRANSFORMS = {
    "none": lambda f: f,
    "grad": grad,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "vmap grad": lambda f: lambda x: vmap(grad(f))(torch.stack([x, 2 * x])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", UNIT)
def test_transforms_inside_a_compiled_function(op, transform):
    run, x = TRANSFORMS[transform], random(3)
    same(torch.compile(run(loss_of(UNIT[op])), fullgraph=True, backend="aot_eager")(x), run(loss_of(unit))(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_reverse_mode_and_dual_numbers(backend):
    op = UNIT["jvp derived"]

    @torch.compile(fullgraph=True, backend=backend)
    def tangent(x, t):
        with fwAD.dual_level():
            return fwAD.unpack_dual(op(fwAD.make_dual(x, t))[0]).tangent

    x, t = random(3), random(3, seed=1)
    same(tangent(x, t), jvp(lambda x: unit(x)[0], (x,), (t,))[1])
    x.requires_grad_()
    compiled = torch.compile(loss_of(op), fullgraph=True, backend=backend)
    same(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss_of(unit)(x), x))


def test_dynamic_shapes():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of(UNIT["jvp written"]), fullgraph=True, dynamic=True, backend=counter)
    for rows in (4, 5, 9):
        x = random(rows, 3).requires_grad_()
        same(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss_of(unit)(x), x))
    assert counter.frame_count == 1


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x):
            return loss_of(UNIT["jvp written"])(x)

    exported = torch.export.export(Model(), (random(3),))
    assert any("mgtest" in str(n.target) for n in exported.graph.nodes)
    same(exported.module()(random(3, seed=1)), loss_of(unit)(random(3, seed=1)))


def test_rules_inside_a_compiled_function():
    def f(x):
        return torch.linalg.vector_norm(x.sin(), 3.0) * torch.dist(x, 2 * x, 3.0)

    x = random(4)
    for run in (TRANSFORMS["none"], grad, TRANSFORMS["jvp"], hessian):
        stock = run(f)(x)
        with mg.override():
            same(torch.compile(run(f), fullgraph=True, backend="aot_eager")(x), stock)


# -- what is active --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_function_follows_the_rules_and_finds_its_graphs_again(backend):
    counter = CompileCounterWithBackend(backend)
    f = torch.compile(torch.sin, fullgraph=True, backend=counter)
    seen = [factor(f)]
    for _ in range(2):
        with mg.override(DOUBLE):
            seen.append(factor(f))
            with mg.override(TRIPLE):
                seen.append(factor(f))
            seen.append(factor(f))
        seen.append(factor(f))
    assert seen == [1, 2, 3, 2, 1, 2, 3, 2, 1]
    assert counter.frame_count == 3  # stock, double, triple; none again


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_function_follows_swaps(backend):
    op, other = sine(save_for_backward=keep_x, backward=times(1)), times(2)
    counter = CompileCounterWithBackend(backend)
    f = torch.compile(op, fullgraph=True, backend=counter)
    seen = [factor(f)]
    for _ in range(2):
        with op.swap(backward=other):
            seen.append(factor(f))
        seen.append(factor(f))
    assert seen == [1, 2, 1, 2, 1] and counter.frame_count == 2
    op.impl_backward(times(3))
    assert factor(f) == 3 and counter.frame_count == 3


def test_a_compiled_backward_keeps_its_rule():
    f = torch.compile(torch.sin, fullgraph=True, backend="aot_eager")
    x = random(3).requires_grad_()
    with mg.override(DOUBLE):
        under = f(x)
    same(torch.autograd.grad(under.sum(), x)[0], 2 * x.detach().cos())
    assert factor(f) == 1


def broken(x, w):
    """Its graph breaks, and what follows is called eagerly with Dynamo still on, the backward too."""
    y = (x @ w).tanh()
    torch._dynamo.graph_break()
    z = torch.nn.functional.layer_norm(unit_scaled(y.clone().mul_(2)), [4])
    z.square().sum().backward()
    return w.grad.norm() + x.sum()


def unit_scaled(x):
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def test_dynamo_compiles_no_kernel_of_ours_after_a_graph_break():
    frames = []
    for names in (None, (), ("*",)):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("eager")
        x, w = random(3, 4), random(4, 4).requires_grad_()
        with nullcontext() if names is None else mg.override(*names):
            torch.compile(broken, backend=counter)(x, w)
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * 3


def test_a_rule_with_a_forward_has_a_graph_of_its_own():
    rule = mg.rule("aten::sin", vjp={"self": lambda grad: grad}, forward=lambda x: 100 * x, register=False)
    f, x = torch.compile(torch.sin, fullgraph=True, backend="aot_eager"), random(3)
    for forward, expected in ((False, x.sin()), (True, 100 * x), (False, x.sin())):
        with mg.override(rule, forward=forward):
            same(f(x.clone().requires_grad_()).detach(), expected)
            same(f(x), expected)


@pytest.mark.parametrize("loaded", [True, False], ids=["after", "before rules of other packages are loaded"])
def test_override_inside_a_compiled_function_is_refused(loaded, monkeypatch):
    def inside(x):
        with mg.override(DOUBLE):
            return torch.sin(x)

    if not loaded:
        monkeypatch.setattr(packages, "_loaded", False)
    with pytest.raises(Exception, match=r"override\(\) cannot be entered inside a compiled function"):
        torch.compile(inside, fullgraph=True, backend="eager")(random(3))


@pytest.fixture
def tag():
    config = torch.compiler.config
    before = config.cache_key_tag
    yield config
    config.cache_key_tag = before


def test_the_cache_key_tag_of_the_user_stays(tag):
    tag.cache_key_tag = "mine"
    with mg.override(DOUBLE):
        first = tag.cache_key_tag
        assert first.startswith("mine|") and len(first) > 6
        with mg.override(TRIPLE):
            assert tag.cache_key_tag.startswith("mine|") and tag.cache_key_tag != first
        assert tag.cache_key_tag == first
    outside = tag.cache_key_tag
    assert outside.startswith("mine|") and outside != first
    with mg.override(DOUBLE):
        assert tag.cache_key_tag == first
        tag.cache_key_tag = "other"
    assert tag.cache_key_tag.startswith("other|") and tag.cache_key_tag.count("|") == 1


def definitions(count, monkeypatch):
    """The calls of `digest`, and the bytes given to it, while ops are defined of which another kernel is active."""
    given = []

    def counting(data, own=compile_cache.digest):
        given.append(len(data))
        return own(data)

    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "digest", counting)
        for _ in range(count):
            define("(Tensor x) -> Tensor", torch.sin).impl("default")(torch.clone)
    return len(given), sum(given)


def test_the_cost_of_a_definition_does_not_depend_on_earlier_ones(monkeypatch, tag):
    definitions(1, monkeypatch)
    few, many = definitions(20, monkeypatch), definitions(40, monkeypatch)
    assert all(n > 0 and m <= 2.1 * n for n, m in zip(few, many)), (few, many)


def test_the_tag_changes_with_every_formula_and_does_not_depend_on_their_order(tag):
    seen = [tag.cache_key_tag]
    for key, code in (("a", "1"), ("b", "2"), ("a", "2"), ("b", "1"), ("a", "1"), ("b", "2")):
        compile_cache.remember(f"mgtest {key}", code)
        seen.append(tag.cache_key_tag)
    assert len(set(seen[:5])) == 5 and seen[6] == seen[2]


SCALE = 2


def scaled(x):
    return SCALE * x


def test_functions_that_differ_have_different_fingerprints(monkeypatch):
    """Those on one line of one file, or typed at a prompt, differ only in their code objects."""

    def typed(text):
        return eval(compile(text, "<stdin>", "eval"), {"K": 2, "scaled": scaled, "sin": torch.sin})  # noqa: S307

    texts = ("2 * x", "3 * x", "x.sin()", "x.cos()", "K * x", "scaled(x)", "sin(x)", "(lambda y: y + 1)(x)",
             "(lambda y: y + 2)(x)", "[y + 1 for y in x]", "[y + 2 for y in x]")  # fmt: skip
    functions = [typed(f"lambda {name}: {text}") for text in texts for name in ("x", "y")]
    found = [compile_cache.fingerprint(f) for f in functions]
    assert len(set(found)) == len(found)
    assert found == [compile_cache.fingerprint(f) for f in functions]
    before = compile_cache.fingerprint(scaled), compile_cache.fingerprint(lambda x: scaled(x))
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert compile_cache.fingerprint(scaled) != before[0]
    assert compile_cache.fingerprint(lambda x: scaled(x)) != before[1]


@pytest.mark.slow
def test_a_backward_on_one_line_with_another_is_compiled():
    torch.compiler.reset()
    wave = mg.custom_op("mgtest::one_line(Tensor x) -> Tensor")(lambda x: x * 2)
    wave.impl_save_for_backward(lambda inputs, output: None)
    compiled = torch.compile(wave, fullgraph=True)
    backwards = [lambda ctx, saved, g, k=k: {"x": k * g} for k in (2, 3)]
    backwards += (lambda ctx, saved, g: {"x": 4 * g}), (lambda ctx, saved, g: {"x": 5 * g})  # fmt: skip
    x, found = torch.ones(3, requires_grad=True), []
    for backward in backwards:
        wave.impl_backward(backward)
        found.append(torch.autograd.grad(compiled(x).sum(), x)[0][0].item())
    assert found == [2, 3, 4, 5]


# -- caches on disk --------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import torch_manualgrad as mg

rule = mg.rule("aten::sin", vjp={"self": lambda grad, self: FACTOR * grad * self.cos()}, register=False)


@mg.custom_op("mgdisk::wave(Tensor x) -> Tensor")
def wave(x):
    return x * 2


wave.impl_save_for_backward(lambda inputs, output: None)
wave.impl_backward(lambda ctx, saved, g: {"x": OPFACTOR * g})


def run():
    x = torch.linspace(0.1, 1, 5).requires_grad_()
    y = torch.compile(lambda x: wave(torch.sin(x)), fullgraph=True)(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    return round((g / x.detach().cos()).mean().item(), 4)


print("factor", run() if "stock" in sys.argv else mg.override(rule)(run)())
counters = torch._dynamo.utils.counters["aot_autograd"]
print("hit", counters["autograd_cache_hit"], "miss", counters["autograd_cache_miss"])
"""


def in_a_new_process(folder, factor, op_factor, *arguments):
    script = folder / "script.py"
    text = textwrap.dedent(SCRIPT).replace("OPFACTOR", str(op_factor)).replace("FACTOR", str(factor))
    script.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    done = subprocess.run(
        [sys.executable, *(("-c", text) if "typed" in arguments else (str(script),)), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return float(words[words.index("factor") + 1]), int(words[words.index("hit") + 1])


@pytest.mark.slow
def test_no_stale_graph_from_disk(tmp_path):
    """Each process has the derivatives of its own source, whatever the processes before it left in the cache."""
    runs = [
        ((2, 2, "stock"), 2),
        ((2, 2), 4),  # an active rule
        ((3, 2), 6),  # the same rule, rewritten
        ((3, 5), 15),  # the backward of the op, rewritten
        ((2, 2, "stock"), 2),
        ((2, 3, "stock", "typed"), 3),  # without a file
        ((2, 4, "stock", "typed"), 4),
    ]
    found = [in_a_new_process(tmp_path, *arguments) for arguments, _ in runs]
    assert [f for f, _ in found] == [expected for _, expected in runs]
    assert [hits for _, hits in found[:4]] == [0] * 4
