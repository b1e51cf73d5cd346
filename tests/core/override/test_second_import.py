"""A module of the package that is imported a second time says so."""

import subprocess
import sys

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
