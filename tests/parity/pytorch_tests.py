"""Runs PyTorch's own tests on the CPU, on stock and with `mg.install()`: ``python pytorch_tests.py FOLDER --source ...``.

PyTorch's wheel does not contain its tests. Two projects keep copies of them that they change for their devices:
intel/torch-xpu-ops and Ascend/pytorch. This script reads these copies from a checkout (``--source intel=FOLDER``,
``--source ascend=FOLDER``), and other files from a checkout of PyTorch (``--source pytorch=FOLDER``). It changes the device to
the CPU, writes them to ``FOLDER`` and runs them. What passes on stock has to pass with the rules installed, except for what
pinned.md lists. Further options go to pytest: ``-k``, ``-x``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from cells import pinned_nested_tests, pinned_tests
from clients import HERE, MODES, ROOT
from torch.testing._internal.optests.generate_tests import FailuresDict


@dataclass(frozen=True)
class Suite:
    """One file of tests.

    Attributes:
        project: whose copy it is.
        imports: files that it imports, next to it.
        pytorch: files that it imports and that only PyTorch itself has, in its folder test.
        commit: a commit at which the project had the whole file. Later ones import PyTorch's.
        compiled: it is a test of Dynamo: it runs on stock and with our backend in the place of those that it names.
    """

    name: str
    project: str
    path: str
    imports: tuple[str, ...] = ()
    pytorch: tuple[str, ...] = ()
    commit: str = "HEAD"
    compiled: bool = False


COMPILED = {"stock": "none", 'backend="manualgrad"': "backend"}
ALL = {**MODES, **COMPILED}

FUNCTORCH = ("functorch/common_utils.py", "functorch/functorch_additional_op_db.py")
SUITES = (
    Suite(
        "test_autograd", "ascend", "test/test_autograd.py", ("autograd/test_complex.py", "autograd/test_functional.py")
    ),
    Suite("test_ops_gradients", "ascend", "test/test_ops_gradients.py"),
    Suite("test_ops_fwd_gradients", "ascend", "test/test_ops_fwd_gradients.py"),
    Suite("test_eager_transforms", "intel", "test/xpu/functorch/test_eager_transforms_xpu.py"),
    Suite("test_transformers", "intel", "test/xpu/test_transformers_xpu.py"),
    Suite("test_nn", "intel", "test/xpu/test_nn_xpu.py"),
    Suite("test_embedding", "ascend", "test/nn/test_embedding.py"),
    Suite("test_multihead_attention", "ascend", "test/nn/test_multihead_attention.py"),
    Suite("test_dropout", "ascend", "test/nn/test_dropout.py"),
    Suite("test_parametrization", "ascend", "test/nn/test_parametrization.py"),
    Suite("test_convolution", "ascend", "test/nn/test_convolution.py"),
    Suite("test_pooling", "ascend", "test/nn/test_pooling.py"),
    Suite("test_modules", "ascend", "test/test_modules.py"),
    Suite("test_sparse", "ascend", "test/test_sparse.py"),
    Suite("test_sparse_csr", "intel", "test/xpu/test_sparse_csr_xpu.py"),
    Suite("test_custom_ops", "intel", "test/xpu/test_custom_ops_xpu.py", commit="dd65936af"),
    Suite("test_nestedtensor", "intel", "test/xpu/test_nestedtensor_xpu.py", commit="a3ac8ad4b"),
    Suite("test_expanded_weights", "intel", "test/xpu/test_expanded_weights_xpu.py", commit="ca443a364"),
    *(
        Suite(name, "ascend", f"test/{name}.py")
        for name in (
            "test_autocast",
            "test_fake_tensor",
            "test_functionalization",
            "test_indexing",
            "test_native_mha",
            "test_ops",
            "test_shape_ops",
            "test_type_promotion",
            "test_utils",
            "test_view_ops",
        )
    ),
    Suite("test_optim", "ascend", "test/optim/test_optim.py"),
    Suite("test_lazy_modules", "ascend", "test/nn/test_lazy_modules.py"),
    Suite("test_module_hooks", "ascend", "test/nn/test_module_hooks.py"),
    *(
        Suite(name, "pytorch", f"test/{name}.py")
        for name in (
            "test_complex",
            "test_foreach",
            "test_overrides",
            "test_proxy_tensor",
            "test_python_dispatch",
            "test_scatter_gather_ops",
            "test_segment_reductions",
            "test_stateless",
            "test_subclass",
        )
    ),
    *(
        Suite(f"dynamo_{name}", "ascend", f"test/dynamo/test_{name}.py", imports, compiled=True)
        for name, imports in {
            "activation_checkpointing": (),
            "aot_autograd": (),
            "autograd_function": (),
            "ctx_manager": (),
            "functions": (),
            "higher_order_ops": (),
            "hooks": (),
            "misc": (),
            "modules": ("test_functions.py",),
            "repros": (),
            "subclasses": (),
            "unspec": (),
        }.items()
    ),
    Suite("test_vmap", "intel", "test/xpu/functorch/test_vmap_xpu.py", pytorch=FUNCTORCH),
)

# What the projects have changed, and what takes its place. A test that only their device runs becomes one that only
# CUDA runs, as it is in PyTorch, so that the CPU skips it.
CHANGES = {
    "ascend": (
        (r"^import (torch_npu|torchair)[.\w]*\n", ""),
        (r"\bHAS_CUDA\b", "False"),
        (r"torchair\.get_npu_backend\(.*?\)", '"aot_eager"'),
        (r"^from torch_npu\.testing\.common_utils import SupportedDevices\n|^from url import get_url\n", ""),
        (r"^ *@SupportedDevices\(.*\n", ""),
        (r"\bskipIfMps\b", "skipIfMPS"),
        (r"torch_npu\.npu\.get_device_name\(0\)", '"cpu"'),
        (r"only_for=(\(?)(['\"])privateuse1\2", r"only_for=\1'cpu'"),
        (r"PRIVATEUSE1", "CUDA"),
        (r"device=(['\"])npu\1", 'device="cpu"'),
        (r"\btorch\.npu\b", "torch.cuda"),
        (r"\.npu\(", ".cuda("),
        (r"(['\"])npu\1", '"cuda"'),
    ),
    "intel": (
        (r"^from common_utils import expectedFailureIf", "from torch_helpers import expectedFailureIf"),
        (r"only_for ?= ?(\(?)(['\"])xpu\2", r"only_for=\1'cpu'"),
        (r"only_for=device_types", 'only_for="cpu"'),
        (r"\.\./\.\./\.\./\.\./test/minioptest_failures_dict\.json", "minioptest_failures_dict.json"),
    ),
    "pytorch": (
        (r"^from (torch\.testing\._internal\.common_methods_invocations import) op_db, skip, xfail, skipOps", r"from \1 op_db\nfrom torch_helpers import skip, skipOps, xfail"),
        (r"^from torch\._custom_op\.functional import register_functional_op\n", ""),
    ),
}  # fmt: skip


# What test_eager_transforms imports from a file that neither project has; and the lists of expected failures of the version
# of PyTorch that a file is from, which the installed one does not have: what fails on stock is not compared.
HELPERS = """
import unittest

def expectedFailureIf(condition):
    return unittest.expectedFailure if condition else lambda test: test

def skip(*operator, **where):
    return None

xfail = skip

def skipOps(*failures):
    return lambda test: test
"""


def write(suite: Suite, sources: dict[str, Path], folder: Path) -> None:
    """Write the files of a suite, changed for the CPU; ``sources`` are checkouts of the projects, bare or not."""
    path = Path(suite.path)
    (folder / "torch_helpers.py").write_text(HELPERS)
    # test_custom_ops reads which tests of operators fail in PyTorch, from a file that neither project has
    FailuresDict(str(folder / "minioptest_failures_dict.json"), {}).save()
    files = [(suite.project, f"{suite.commit}:{path}", f"{suite.name}.py")]
    files += [(suite.project, f"{suite.commit}:{path.parent / name}", name) for name in suite.imports]
    files += [("pytorch", f"HEAD:test/{name}", Path(name).name) for name in suite.pytorch]
    for project, shown, to in files:
        command = ["git", "-C", str(sources[project]), "show", shown]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for pattern, replacement in CHANGES[project]:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        (folder / to).parent.mkdir(exist_ok=True)
        (folder / to).write_text(text)


def run(suite: Suite, folder: Path, mode: str, every: int, offset: int, *options: str) -> tuple[dict[str, str], float]:
    """Test -> passed, failure, error or skipped; and the seconds that all took."""
    found = folder / f"{suite.name}-{ALL[mode] or 'plain'}.xml".replace("*", "all")
    environment = {
        **os.environ,
        **({"MANUALGRAD_COMPILED": "1"} if suite.compiled else {}),
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, HERE))),
        "MANUALGRAD_INSTALLED": ALL[mode],
        "MANUALGRAD_EVERY": str(every),
        "MANUALGRAD_OFFSET": str(offset),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "installed", "-p", "no:cacheprovider", "-o", "addopts="]
    command += [f"--junitxml={found}", "--tb=short", f"--rootdir={folder}", f"{suite.name}.py", *options]
    with found.with_suffix(".log").open("w") as log:
        subprocess.run(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, check=False)
    outcomes, seconds = {}, 0.0
    for case in ElementTree.parse(found).iter("testcase"):
        outcome = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
        outcomes[f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}"] = outcome
        seconds += float(case.get("time", 0))
    return outcomes, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the changed tests and the results are written")
    parser.add_argument("--source", action="append", default=[], metavar="PROJECT=FOLDER", help="a checkout of one")
    parser.add_argument("--only", action="append", choices=[s.name for s in SUITES])
    parser.add_argument("--mode", action="append", choices=list(ALL), help="all by default")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one test in N, the same ones every time")
    parser.add_argument("--offset", type=int, default=0, metavar="K", help="with --every N: 0 to N - 1, other tests")
    given, options = parser.parse_known_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sources = {name: Path(at).resolve() for name, _, at in (text.partition("=") for text in given.source)}
    pinned, nested = pinned_tests(), pinned_nested_tests()
    status = 0
    for suite in SUITES:
        if given.only and suite.name not in given.only:
            continue
        needed = [suite.project, *["pytorch"] * bool(suite.pytorch)]
        if missing := [project for project in needed if project not in sources]:
            print(f"{suite.name}: no checkout of {' and '.join(missing)} is given")
            continue
        write(suite, sources, folder)
        stock: dict[str, str] = {}
        for mode in given.mode or (COMPILED if suite.compiled else MODES):
            outcomes, seconds = run(suite, folder, mode, given.every, given.offset, *options)
            stock = stock or outcomes
            passed = sum(o == "passed" for o in outcomes.values())
            failed = sum(o in ("failure", "error") for o in outcomes.values())
            print(f"{suite.name}, {mode}: {passed} passed, {failed} failed, {seconds:.0f} s", flush=True)
            for test, outcome in stock.items():
                if outcome == "passed" and outcomes.get(test) != "passed":
                    declared = test in pinned or test.partition("::")[2].startswith(nested)
                    status |= not declared
                    print(f"  {test}: {outcomes.get(test, 'missing')}{', declared' * declared}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
