"""The tests of csrc/calls find what is planted in it: the library is built again with each fault, and they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from torch_manualgrad.core.override import compiled_calls

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "calls"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not compiled_calls.loaded() or shutil.which("g++") is None, reason="no library for this torch to build again"
    ),
]

# what is written -> what is planted in its place
FAULTS = {
    "none": ("", ""),
    "a residual is a constant": (
        "tensors.push_back(alive(unpacked(i)));",
        "tensors.push_back(alive(unpacked(i)).detach());",
    ),
    "the gradient is twice what it is": (
        "if (mask[input]) found[input] = std::move(stack[i]).toTensor();",
        "if (mask[input]) found[input] = stack[i].toTensor() + stack[i].toTensor();",
    ),
    "it never reports": ("if (vjp.reports && stack", "if (false && stack"),
    "it is taken for any constant": ("if (constants[constant] != value) return false;", "(void)constant, (void)value;"),
    "everything is saved": ("table.selective && !used", "false && !used"),
    "the second backward is not refused": (
        "TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);\n      t",
        "t",
    ),
    "a mode is not seen": (
        "included_ == c10::default_included_set; }",
        "included_ == c10::default_included_set || true; }",
    ),
    "a tangent is not seen": ("return x._fw_grad(/*level=*/0).defined();", "return false;"),
    "no gradient is checked": ("if (!finite(found[i])) return std::nullopt;", ""),
    "the last elements are not checked": ("for (; i < n; ++i) sums[0] += x[i];", ""),
    "nan is made zero": (
        "if (!finite(found[i])) return std::nullopt;",
        "if (!finite(found[i])) found[i] = at::nan_to_num(found[i], 0, 0, 0);",
    ),
    "gradients of other inputs": (
        "found.inputs[at++] = static_cast<int64_t>(i);",
        "found.inputs[at++] = static_cast<int64_t>(arguments.size() - 1 - i);",
    ),
    "cotangents of other outputs": ("found[i] = grads[outputs[i]];", "found[i] = grads[0];"),
    "PyTorch's gradients are differentiated again": (
        "if (stock && serves(grads)) {",
        "if (stock && (c10::GradMode::is_enabled() || serves(grads))) {",
    ),
    "hooks are given tensors twice": ("twice ? &stock : nullptr", "&stock"),
    "PyTorch's node keeps its tensors": ("if (stock) stock.node->release_variables();", ""),
    "a custom op that is tracked loses its derivative": (
        "tracked = tracked || (c10::GradMode::is_enabled() && value.toTensor().requires_grad());",
        "",
    ),
    "a custom op is served whatever it is": (
        "if (!(at_level ? plain_at_level(x) : plain(x)) || is_number(value)) return false;",
        "",
    ),
    "a custom op's error is passed over": (
        "const bool here = acts.load(std::memory_order_acquire)",
        "const bool here = true",
    ),
    "nodes are let go on the stack": ("if (waiting != nullptr) {", "if (false) {"),
    "recordings: strides are not in the key": ("for (const int64_t n : x.strides()) numbers.push_back(n);", ""),
    "recordings: grad mode is not in the key": ("key.numbers.push_back(c10::GradMode::is_enabled());", ""),
    "recordings: equal arguments are not in the key": ("<< 32 | same << 33", "<< 32"),
    "recordings: a value that is read is passed over": ('return refuse("a value is read", function);', "return;"),
    "recordings: memory without values is passed over": ("if (empty_.erase(known) > 0 && !written)", "if (false)"),
    "recordings: a write to an argument is passed over": (
        "if (written && (transformed_ || (x.has_storage() && given_",
        "if (false && (transformed_ || (x.has_storage() && given_",
    ),
    "recordings: nothing is proven": ("if (made && !proven(*made", "if (false && !proven(*made"),
    "recordings: grad mode is not played": ("c10::GradMode::set_enabled(step.grad_mode);", ""),
    "recordings: they are never forgotten": ("{ generation.fetch_add(1); }", "{}"),
    "recordings: any rule has them": ("if (table.records == Table::kNothing) return vjp(false);", ""),
    "recordings: what is not finite is returned": ("if (only_finite && !all_finite(results))", "if (false)"),
    "recordings: hooks on saved tensors are called for the proof": ("(hooked || entry.refused", "(entry.refused"),
    "recordings: the overrides are not in the key": (
        "for (const auto& layer : active.layers()) key.numbers.push_back(layer->number);",
        "",
    ),
    "recordings: an interrupt is lost": ("} catch (const c10::Error&) {  // and not", "} catch (...) {  // and not"),
    "recordings: constants of a kernel are not in the key": (
        "constants.push_back(value.isTensor() ? IValue(true) : value);",
        "constants.push_back(IValue(true));",
    ),
    "lists: an element has no edge": (
        "edges.push_back(present ? torch::autograd::impl::gradient_edge(x.toTensor()) : torch::autograd::Edge());",
        "edges.push_back(torch::autograd::Edge());",
    ),
    "lists: a tangent in one is not seen": (
        "is_plain = is_plain && x.isTensor() && plain(x.toTensor()) &&",
        "is_plain = is_plain && x.isTensor() &&",
    ),
    "in place: what is overwritten is kept": (
        "if (table.saved[i] == 0 && (!table.selective",
        "if (false && (!table.selective",
    ),
    "in place: an operand on the same memory is not seen": ("|| x.is_alias_of(target)", ""),
    "in place: versions are not counted": (
        "keys & c10::after_autograd_keyset, stack",
        "keys & c10::after_ADInplaceOrView_keyset, stack",
    ),
    "decisions: tensors are not in the key": (
        "is_tensor ? key.add(variable_list{value.toTensor()})",
        "is_tensor ? true",
    ),
    "recordings: modes are not seen": ("if (key.transformed && (only_finite", "if (false && (only_finite"),
    "levels: a gradient is lost": ("tracked = tracked || (plain && x.toTensor().requires_grad());", ""),
    "levels: a mode is not seen": (
        "return included.remove(DispatchKey::FuncTorchVmapMode) == (c10::default_included_set | kTransformKeys);",
        "return included.has(DispatchKey::FuncTorchDynamicLayerFrontMode);",
    ),
    "levels: a tangent is not seen": ("         !has_tangent(x);", "         true;"),
    "levels: strong zeros are plain": ("table.strong_zero || !only_transforms()", "!only_transforms()"),
    "levels: what has ended stays wrapped": (
        "tensors.push_back(alive(unpacked(i)));",
        "tensors.push_back(unpacked(i));",
    ),
}


def plant(folder: Path, written: str, planted: str) -> None:
    """Copy csrc/calls to ``folder`` with one text in the place of another, which is there once."""
    sources = {path.name: path.read_text() for path in SOURCES.iterdir()}
    assert not written or sum(text.count(written) for text in sources.values()) == 1, f"{written!r} is not there once"
    for name, text in sources.items():
        text = text.replace(written, planted) if written else text
        (folder / name).write_text(
            "#include <ATen/ATen.h>  // for what is planted\n" + text if name == "calls.cpp" else text
        )


def build(folder: Path) -> None:
    """The package in ``folder``, with the library of calls made of the sources there."""
    shutil.copytree(
        ROOT / "torch_manualgrad", folder / "torch_manualgrad", ignore=shutil.ignore_patterns("__pycache__")
    )
    (library,) = (folder / "torch_manualgrad" / "lib").glob("libmanualgrad_calls_*.so")
    library.unlink()
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    search = [flag for path in cpp_extension.library_paths() for flag in ("-L", path)]
    flags = ["-O1", "-DNDEBUG", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-shared", "-w"]
    command = ["g++", *flags, *includes, *map(str, sorted(folder.glob("*.cpp"))), "-o", str(library), *search]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    written, planted = FAULTS[fault]
    plant(tmp_path, written, planted)
    build(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    parts = (
        "calls_strong",
        "calls",
        "calls_at_levels",
        "calls_tables",
        "calls_in_library",
        "custom_op_calls",
        "recordings",
    )
    tests = [str(Path(__file__).with_name(f"test_{part}.py")) for part in parts]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not every_rule", *tests],
        capture_output=True, text=True, check=False, env=environment, cwd=ROOT / "tests",
    )  # fmt: skip
    last = run.stdout.splitlines()[-1] if run.stdout else run.stderr
    assert (run.returncode == 0) == (fault == "none"), f"torch {torch.__version__}: {last}"
