"""What overrides that are over leave behind, and what a fork and `uninstall` leave; and that entering again costs little."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sine import DOUBLE, TRIPLE, factor, sine_times
from helpers.tensors import random

import torch_manualgrad as mg

# -- memory ----------------------------------------------------------------------------------------------------------

LOOPS = """
import ctypes, gc, sys
import torch
import torch_manualgrad as mg

x = torch.ones(3, requires_grad=True)


def rule():
    return mg.rule("aten::sin", vjp={"self": lambda grad, self: 2 * grad * self.cos()}, register=False)


def rule_in_a_loop():
    with mg.override(rule()):
        torch.autograd.grad(x.sin().sum(), x)
        x.clone().sin_()


def strong():
    with mg.override(rule(), strong_zero=True):
        torch.autograd.grad(x.sin().sum(), x)


def unregistered():
    with mg.override("dist", "sin", "sort"):
        pass
    mg.unregister()


def of_a_thread():
    with mg.override(rule(), scope="thread"):
        pass


def installed():
    mg.install(rule()).remove()


class Allocated(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Allocated


def allocated():
    found = mallinfo2()
    return found.uordblks + found.hblkhd


for _ in range(1600):  # until the allocator has what it reuses
    rule_in_a_loop()
for f in (rule_in_a_loop, strong, unregistered, installed, *([of_a_thread] if sys.argv[1] == "1" else [])):
    for _ in range(300):  # fills the caches, which hold up to 128
        f()
    gc.collect()
    objects, memory = len(gc.get_objects()), allocated()
    for _ in range(400):
        f()
    gc.collect()
    print(f.__name__, (len(gc.get_objects()) - objects) / 400, (allocated() - memory) / 400)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 what is allocated"
)
def test_rules_in_a_loop_leave_nothing():
    """By the bytes that are allocated: the pages in memory also depend on what else the machine does."""
    from torch_manualgrad.core.override import compiled_calls

    environment = {**os.environ, "PYTHONMALLOC": "malloc"}  # so that glibc counts what Python allocates, too
    arguments = [sys.executable, "-c", LOOPS, str(int(compiled_calls.loaded()))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        name, objects, memory = line.split()
        assert float(objects) < 0.5, line
        assert float(memory) < 2000, line  # before: 11,000 to 30,000 for each


# -- forks -----------------------------------------------------------------------------------------------------------

FORKS = """
import os, signal, sys, threading, time
import torch
import torch_manualgrad as mg

torch.set_num_threads(1)
rule = mg.rule("aten::sin", vjp={"self": lambda grad, self: 2 * grad * self.cos()}, register=False)
x = torch.ones(2, requires_grad=True)
scope = {"scope": "thread"} if sys.argv[2] == "thread" else {}
stop = threading.Event()


def work():
    while not stop.is_set():
        with mg.override(rule, **scope):
            pass
        with mg.override("dist", "nested", **scope):
            pass


def child():
    for _ in range(3):
        with mg.override(rule):
            factor = torch.autograd.grad(x.sin().sum(), x)[0] / x.cos()
            if not torch.allclose(factor, torch.full_like(factor, 2.0)):
                return 1
    mg.uninstall()
    return 0


with mg.override(rule, "dist", "nested"):
    pass
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
wrong = hangs = 0
for _ in range(int(sys.argv[1])):
    time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(child())
    status = os.waitpid(pid, 0)[1]
    hangs += os.WIFSIGNALED(status)
    wrong += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
stop.set()
for thread in threads:
    thread.join()
print(hangs, wrong)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("scope", ["process", "thread"])
@pytest.mark.parametrize("forks", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_a_fork_while_threads_enter_and_leave(forks, scope):
    from torch_manualgrad.core import activation

    if scope == "thread" and not activation.in_library:
        pytest.skip("scopes need the library of calls")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(forks), scope], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["0", "0"], f"(hangs, wrong) {done.stdout}"


# -- uninstall and unregister ------------------------------------------------------------------------------------------


def test_uninstall_removes_installs_without_a_handle():
    mg.install(DOUBLE)
    mg.install("dist")
    mg.forward_ad.enable("aten::trace")
    with mg.override(TRIPLE):
        mg.uninstall()
        assert factor() == 3 and [a.acting for a in mg.active()] == [TRIPLE]
    assert factor() == 1 and mg.active() == []
    mg.uninstall()
    handle = mg.install(DOUBLE)
    mg.uninstall()
    handle.remove()
    assert handle.rules == () and factor() == 1


def test_unregister_leaves_active_rules_active():
    handle = mg.install(DOUBLE)
    mg.unregister()
    assert factor() == 2 and [a.acting for a in mg.active()] == [DOUBLE]
    handle.remove()
    assert mg.active() == []
    mg.unregister()
    assert torch.sin(random(3).requires_grad_()).grad_fn.name() == "SinBackward0"
    assert "deactivates nothing" in mg.unregister.__doc__ and "uninstall" in mg.unregister.__doc__


def test_leaving_an_override_twice():
    block = mg.override(DOUBLE)
    with pytest.raises(RuntimeError, match="left more often than it was entered"):
        block.__exit__(None, None, None)
    block.__enter__()
    block.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="left more often than it was entered"):
        block.__exit__(None, None, None)
    assert factor() == 1
    with block:
        assert factor() == 2


@pytest.mark.parametrize("value", ["yes", 1, None])
@pytest.mark.parametrize("name", ["forward", "strong_zero"])
def test_flags_are_bools(name, value):
    for make in (mg.override, mg.install):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
            make(sine_times(2), **{name: value})


def test_a_decorator_without_parentheses():
    with pytest.raises(TypeError, match=r"a decorator needs its parentheses, @override\(\), .*<function .*step"):

        @mg.override
        def step():
            pass

    with pytest.raises(TypeError, match="needs its parentheses"):
        mg.override(random(3).exp)
    with mg.override(torch.sin):
        pass


# -- entering again: its calls of Python functions must not grow with the number of rules -----------------------------


def _python_calls(function: Callable[[], Any]) -> int:
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _enter(*names: str) -> None:
    with mg.override(*names):
        pass


@pytest.mark.parametrize("names", [(), ("*",)], ids=["override()", "*"])
def test_entering_again_does_not_visit_the_rules(names: tuple[str, ...]) -> None:
    _enter(*names)
    _enter("aten::tanh")
    one, many = _python_calls(lambda: _enter("aten::tanh")), _python_calls(lambda: _enter(*names))
    # the replacements that are switched on and off are few
    assert many < one + 60, (one, many)
