"""The guard of tests/conftest.py: it names each kind of global state that a test leaves changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.isolation import leaving_nothing_behind
from torch.autograd import forward_ad

import torch_manualgrad as mg
from torch_manualgrad.core.rule import samples
from torch_manualgrad.core.rule.definition import rules


def _removed_rule() -> Callable[[], Any]:
    rule = rules.remove("aten::sin")
    return lambda: rules.add("aten::sin", rule)


def _replaced_rule() -> Callable[[], Any]:
    rule = rules["aten::sin"]
    rules._entries["aten::sin"] = rules["aten::cos"]
    return lambda: rules._entries.update({"aten::sin": rule})


def _added_rule() -> Callable[[], Any]:
    rules.add("aten::left", rules["aten::sin"])
    return lambda: rules.remove("aten::left")


def _samples() -> Callable[[], Any]:
    samples.samples_for("aten::left")(lambda dtype, device: [])
    return lambda: samples._samplers.pop("aten::left")


def _probe() -> Callable[[], Any]:
    samples.probe_for("aten::left")(lambda x: x)
    return lambda: samples._probes.pop("aten::left")


def _override() -> Callable[[], Any]:
    return mg.install("aten::sin").remove


def _default_dtype() -> Callable[[], Any]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def _grad_mode() -> Callable[[], Any]:
    guard = torch.no_grad()
    guard.__enter__()
    return lambda: guard.__exit__(None, None, None)


def _threads() -> Callable[[], Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    return lambda: torch.set_num_threads(threads)


def _deterministic() -> Callable[[], Any]:
    torch._C._set_deterministic_algorithms(True, warn_only=False)  # as torch's, without inductor
    return lambda: torch._C._set_deterministic_algorithms(False, warn_only=False)


def _level() -> Callable[[], Any]:
    forward_ad.enter_dual_level()
    return forward_ad.exit_dual_level


def _kernel() -> Callable[[], Any]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("nonzero", lambda *args: args[0], "AutogradHPU")
    return library._destroy


FAULTS = {
    "mg.rules: aten::sin is gone": _removed_rule,
    "mg.rules: aten::sin is another entry": _replaced_rule,
    "mg.rules: aten::left is left registered": _added_rule,
    "samples: aten::left is left registered": _samples,
    "probes: aten::left is left registered": _probe,
    "still active: <aten::sin for the process": _override,
    "default dtype: torch.float64 instead of torch.float32": _default_dtype,
    "grad mode: False instead of True": _grad_mode,
    "number of threads:": _threads,
    "deterministic algorithms: True instead of False": _deterministic,
    "forward AD level: 0 instead of -1": _level,
    "kernel left in the dispatcher: aten/nonzero/AutogradHPU": _kernel,
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_change_of_global_state_is_named(message: str) -> None:
    with pytest.raises(pytest.fail.Exception) as error, leaving_nothing_behind():
        undo = FAULTS[message]()
    undo()
    assert str(error.value).startswith(f"global state is left changed:\n{message}")
    assert str(error.value).count("\n") == 1


def test_overrides_and_rules_of_other_packages_may_stay_registered() -> None:
    name = "mgtest::left"
    with leaving_nothing_behind():
        rules.add(name, rules["aten::sin"])
        with mg.override("aten::hypot"):
            pass
    rules.remove(name)
