"""What ``import torch_manualgrad`` loads, what it leaves until it is used, and that a second import is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torch_manualgrad as mg
from torch_manualgrad.core.rule.derivative import derivative_of

ON_USE = ("testing", "forward_ad", "distributed", "command_line", "derivatives.samples")

ALL = """
import sys, torch
import torch.utils.flop_counter  # which imports triton since torch 2.15, if it is installed
before = set(sys.modules)
import torch_manualgrad as mg
from torch_manualgrad.core.rule.derivative import derivative_of
new = set(sys.modules) - before
own = [name for name in new if name.partition(".")[0] == "torch_manualgrad"]
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", ALL + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packages_that_define_no_operator_are_imported_on_use():
    run(
        f"loaded = [name for name in own if name.startswith(tuple('torch_manualgrad.' + part for part in {ON_USE}))]\n"
        "assert not loaded, loaded\n"
        "assert len(own) <= 258, len(own)\n"
        "assert len(new) - len(own) <= 10, new - set(own)\n"
        "assert mg.testing.check and mg.forward_ad.laplacian and mg.distributed.register\n"
        "assert mg.audit is mg.testing.audit\n"
    )


def test_every_operator_exists_after_the_import():
    """A program that torch.export saved, or a graph in a cache on disk, may name any of them first."""
    run(
        "from torch_manualgrad.core.registry import defined_ops\n"
        "count = len(defined_ops)\n"
        "import importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(mg.__path__, 'torch_manualgrad.'):\n"
        "    if '__main__' not in module.name and not module.name.startswith('torch_manualgrad.lib'):\n"
        "        importlib.import_module(module.name)\n"
        "late = [name for name in list(defined_ops)[count:] if name.startswith('manualgrad::')]\n"
        "assert not late, late\n"
    )


def test_every_name_is_there():
    assert {*mg.__all__} <= {*dir(mg)}
    for name in mg.__all__:
        getattr(mg, name)
    with pytest.raises(AttributeError, match="has no attribute 'tesing'"):
        mg.tesing


def test_the_derivative_of_every_rule_can_be_made():
    """The import leaves them until they are used, and with them the check that each formula's arguments are known."""
    for rule in mg.rules.values():
        derivative_of(rule)
        derivative_of(rule, strong_zero=True)


# -- a second import --------------------------------------------------------------------------------------------------

SCRIPT = """
import importlib, sys
import torch_manualgrad as mg


def refused(module, load):
    try:
        load()
    except ImportError as error:
        assert f"{module} is imported a second time in this process" in str(error), error
        assert "restart Python" in str(error)
    else:
        raise AssertionError(module)


for name in ("derivatives.reduction.norm", "core.override.override", "core.override.kernels", "core.override.compiled_calls", "core.activation"):
    module = f"torch_manualgrad.{name}"
    importlib.import_module(module)
    refused(module, lambda: importlib.reload(sys.modules[module]))
refused("torch_manualgrad", lambda: importlib.reload(mg))


def again():
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("torch_manualgrad")}
    try:
        import torch_manualgrad
    finally:
        sys.modules.update(kept)


refused("torch_manualgrad", again)
with mg.override("dist"):
    assert len(mg.active()) == 1
"""


def test_a_second_import_is_refused():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
