"""torch.export and AOTInductor packages of programs with operators of this package in them: saved, loaded, run."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import wave
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.experimental import _export_forward_backward
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx

import torch_manualgrad as mg

HERE = Path(__file__).resolve().parent


def inputs(batch: int = 2, n: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(batch, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {  # with an operator that its graph has
    "custom op": (lambda x: wave(x, x.sin()), "mgengines.wave"),
    "formula": (
        lambda x: mg.ops.norm_backward(x.sum(), x, 3.0, x.norm(3.0), keepdim=False),
        "manualgrad.norm_backward",
    ),
    "rsqrtm": (lambda x: mg.linalg.rsqrtm(definite(x), assume="hermitian"), "manualgrad.hermitian_function"),
    "logm": (lambda x: mg.linalg.logm(definite(x)), "manualgrad.general_function"),
    "expm": (mg.linalg.expm, "manualgrad.exponential_function"),
    "svd": (lambda x: mg.linalg.svd(x)[1], "manualgrad.svd"),
    "eigh": (lambda x: mg.linalg.eigh(definite(x))[0], "manualgrad.eigh"),
    "polar": (lambda x: mg.linalg.polar(x)[0], "manualgrad.polar_factor"),
}


class Program(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.scale * x)


def operators(program: Any) -> str:
    return " ".join(str(node.target) for node in program.graph.nodes)


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def trained(program: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = program(x)
    return y.detach(), torch.autograd.grad(y.sin().sum(), program.scale)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_exported_saved_and_loaded(name):
    function, operator = PROGRAMS[name]
    program = Program(function)
    exported = torch.export.export(program, (inputs(),), dynamic_shapes=({0: Dim("batch", min=1)},))
    assert operator in operators(exported)
    expected = trained(program, inputs(5, seed=1))
    close(trained(exported.module(), inputs(5, seed=1)), expected)
    loaded = saved_and_loaded(exported)
    close(trained(loaded.module(), inputs(5, seed=1)), expected)
    decomposed = loaded.run_decompositions()
    assert operator in operators(decomposed)
    close(decomposed.module()(inputs(5, seed=1)), expected[0])


@pytest.mark.parametrize("name", ["eigh", "svd", "rsqrtm", "logm"])
def test_the_order_of_matrices_may_be_dynamic(name):
    program, n = Program(PROGRAMS[name][0]), Dim("n", min=2)
    exported = torch.export.export(program, (inputs(),), dynamic_shapes=({1: n, 2: n},))
    close(exported.module()(inputs(n=40)), program(inputs(n=40)))


DERIVATIVES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gradient of a norm": (grad(lambda x: torch.linalg.vector_norm(x, dim=-1).sin().sum()), "manualgrad.norm_backward"),
    "tangent of distances": (
        lambda x: jvp(lambda x: torch.cdist(x, x.cos()), (x,), (x.sin(),))[1], "manualgrad.cdist_jvp"
    ),
    "gradient of eigh": (
        grad(lambda x: torch.linalg.eigh(definite(x))[0].exp().sum()), "manualgrad.linalg_eigh_backward"
    ),
    "gradient of a custom op": (grad(lambda x: wave(x, x.sin()).sum()), "mgengines.wave"),
}  # fmt: skip


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_that_was_traced_is_exported_with_its_formula(name):
    """`torch.export` alone takes no module whose forward differentiates: it is traced first, under the override."""
    function, operator = DERIVATIVES[name]
    with mg.override():
        traced = make_fx(function)(inputs())
        expected = function(inputs(seed=1))
    exported = torch.export.export(traced, (inputs(),))
    assert operator in operators(exported)
    close(saved_and_loaded(exported).module()(inputs(seed=1)), expected)


class Loss(Program):
    def forward(self, x: Tensor) -> Tensor:
        return (1 - self.function(self.scale * x) ** 3.0).mean()


FORMS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": nullcontext,
    "override()": mg.override,
    'override("*")': lambda: mg.override("*"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["custom op", "rsqrtm", "norms"])
def test_a_joint_graph_is_exported(name, form):
    """Its numbers, such as the 3.0 here, are no constants of the graph, which an exported program cannot have."""
    norms = lambda x: torch.linalg.vector_norm(x, dim=-1)  # noqa: E731
    model = Loss(norms if name == "norms" else PROGRAMS[name][0])
    exported = torch.export.export(model, (inputs(),))
    with FORMS[form]():
        joint = _export_forward_backward(exported)
        loss = model(inputs(seed=1))
        (expected,) = torch.autograd.grad(loss, model.scale)
    assert ("manualgrad.norm_backward" in operators(joint)) == (name == "norms" and form != "stock")
    close(joint.graph_module(model.scale.detach(), inputs(seed=1)), (loss.detach(), expected))


def test_numbers_are_no_constants_of_a_traced_graph():
    functions = {
        "power": lambda x: x**3.0, "quotient": lambda x: 2 / x, "difference": lambda x: (1 - x) * 0.5,
        "choice": lambda x: torch.where(x > 0, x, 0.5), "of a bool": lambda x: x * True,
    }  # fmt: skip
    with mg.override("*"):
        for name, function in functions.items():
            for transformed in (grad(lambda x: function(x).sum()), lambda x: jvp(function, (x,), (x.sin(),))[1]):
                traced = make_fx(transformed)(inputs())
                assert "get_attr" not in {node.op for node in traced.graph.nodes}, name
                close(traced(inputs(seed=1)), transformed(inputs(seed=1)))


# -- AOTInductor ------------------------------------------------------------------------------------------------------


class Together(nn.Module):
    """A custom op, a function of a matrix, and the formula of a norm's gradient: one package, as each takes long."""

    def __init__(self) -> None:
        super().__init__()
        with mg.override():
            self.gradient = make_fx(DERIVATIVES["gradient of a norm"][0])(inputs())

    def forward(self, x: Tensor) -> Tensor:
        return self.gradient(wave(x, x.sin())) + PROGRAMS["rsqrtm"][0](x)


def packaged(module: nn.Module, folder: Path) -> Path:
    with torch._inductor.config.patch({"cpp_cache_precompile_headers": False}):  # for one package they only take time
        exported = torch.export.export(module, (inputs(),))
        torch.export.save(exported, folder / "program.pt2")
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "package.pt2"))
    torch.save((inputs(seed=1), module(inputs(seed=1)).detach()), folder / "expected.pt")
    return Path(path)


IN_A_NEW_PROCESS = """
import sys
import torch
import torch._inductor.codecache  # which loading a package needs, and torch 2.10 does not import

folder = sys.argv[1]
load = [lambda: torch._inductor.aoti_load_package(f"{folder}/package.pt2"),
        lambda: torch.export.load(f"{folder}/program.pt2").module()]
x, expected = torch.load(f"{folder}/expected.pt")
for one in load:
    try:
        one()(x)
    except RuntimeError as error:
        print("refused:", str(error).splitlines()[0])
import engine_models  # which has the custom op, and imports torch_manualgrad
for one in load:
    torch.testing.assert_close(one()(x), expected, rtol=1e-10, atol=1e-12)
print("the same")
"""


@pytest.mark.slow
def test_a_package_runs_in_a_new_process_that_imports_the_operators(tmp_path, monkeypatch):
    packaged(Together(), tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[1]}:{HERE}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_NEW_PROCESS, str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    package, program, last = done.stdout.splitlines()
    assert "Could not find schema for" in package and program.startswith("refused:") and last == "the same"
    assert "Please import the custom op to register it before deserializing" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_package_of_each_program(name, tmp_path):
    program = Program(PROGRAMS[name][0])
    package = torch._inductor.aoti_load_package(packaged(program, tmp_path))
    close(package(inputs(seed=1)), program(inputs(seed=1)).detach())


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_package_of_each_derivative(name, tmp_path):
    function, _ = DERIVATIVES[name]
    with mg.override():
        traced = make_fx(function)(inputs())
    package = torch._inductor.aoti_load_package(packaged(traced, tmp_path))
    close(package(inputs(seed=1)), traced(inputs(seed=1)))
