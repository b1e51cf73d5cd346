"""An interrupt while an override is entered or left leaves it active as a whole, or not at all."""

import subprocess
import sys

import pytest

from torch_manualgrad.core import activation

# The library of calls is not loaded: enter and exit are in Python.
WITHOUT_LIBRARY = """
import ctypes
def refused(*_): raise OSError
ctypes.PyDLL = refused
"""

COMMON = """
import gc, random, signal, sys
import torch
import torch_manualgrad as mg

x = torch.ones(2, dtype=torch.float64, requires_grad=True)
rule = mg.rule("aten::sin", vjp={"self": lambda grad, self: 2 * grad * self.cos()}, register=False)


class Interrupt(BaseException):
    pass


def factor():
    return round((torch.autograd.grad(x.sin().sum(), x)[0] / x.cos()).tolist()[0], 6)


def block():
    with mg.override(rule):
        pass


def two_blocks():
    with mg.override(rule), mg.override("dist", "nested", strong_zero=True):
        pass


@mg.override(rule)
def decorated():
    pass


@mg.override(rule)
def generator():
    yield


def forward_mode():
    with mg.forward_ad.enable("aten::trace"):
        pass
"""

SIGNALS = (
    COMMON
    + """
def several_generators():
    list(generator())


ways = [block, two_blocks, decorated, several_generators, *map(eval, sys.argv[2:])]
armed, arrived, left = False, 0, 0


def handler(*_):
    global armed, arrived
    if armed:
        armed = False
        arrived += 1
        raise Interrupt


signal.signal(signal.SIGALRM, handler)
pick = random.Random(0)
for way in ways:
    way()
while arrived < int(sys.argv[1]):
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, pick.uniform(1e-6, 4e-4))
        way = pick.choice(ways)
        while armed:
            way()
    except Interrupt:
        pass
    armed = False
    if mg.active() or arrived % 50 == 0 and factor() != 1:
        left += 1
        if left == 20:
            break
with mg.override(rule):
    assert factor() == 2 or left
print(arrived, left)
"""
)

TRACER = """
import linecache
from pathlib import Path

here = str(Path(mg.__file__).parent)
count = at = 0
seen = set()


# whether Python is about to call `__exit__`: it runs no signal handler there, but at the first line of `__exit__`
def leaves_block(frame, entered):
    if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
        return False
    before = frame.f_lineno in entered
    entered ^= {frame.f_lineno}
    return before


def tracer_of_frame():
    entered = set()

    def tracer_here(frame, event, argument):
        global count, where
        if event == "call" or event == "line" and not leaves_block(frame, entered):
            count += 1
            if count == at:
                where = (frame.f_code.co_filename, frame.f_lineno)
                seen.add(where)
                sys.settrace(None)
                raise Interrupt
        return tracer_here

    return tracer_here


def tracer(frame, event, argument):
    if not frame.f_code.co_filename.startswith(here) or "library.py" in frame.f_code.co_filename:
        return None
    return tracer_of_frame()(frame, event, argument)


def interrupted(f):
    global count
    count = 0
    sys.settrace(tracer)
    try:
        f()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False

"""

LINES = (
    COMMON
    + TRACER
    + """
def check(name):
    gc.collect()
    with mg.override("dist"):  # which repairs what is left
        pass
    assert mg.active() == [], (name, where, mg.active())
    assert factor() == 1, (name, where)
    with mg.override(rule):
        assert factor() == 2, (name, where)
    assert factor() == 1, (name, where)


every = int(sys.argv[1])
for f in (block, two_blocks, decorated) if every < 5 else (block,):
    f()
gc.collect()
gc.freeze()  # what follows collects often
for f in (block, two_blocks, decorated) if every < 5 else (block,):
    for fresh in (False, True) if f is block else (False,):
        at = 1
        while True:
            if fresh:
                mg.unregister()
            if not interrupted(f):
                break
            check(f.__name__)
            at += every
print(len(seen))
"""
)


SWAPS = (
    COMMON
    + TRACER
    + """
op = mg.custom_op("interrupts::twice(Tensor x) -> Tensor")(lambda x: 2 * x)
op.impl_save_for_backward(lambda inputs, output: None)
op.impl_backward(lambda ctx, saved, grad: {"x": 2 * grad})


def factor_of_op():
    return torch.autograd.grad(op(x).sum(), x)[0].tolist()[0]


def swap():
    with op.swap(backward=lambda ctx, saved, grad: {"x": 3 * grad}):
        pass


swap()
interrupted(swap)  # at no line
most = 2 * count
at = 1
while interrupted(swap):
    assert factor_of_op() == 2, where
    at += 1
    assert at < most, "each swap that is left makes the next one longer"
assert factor_of_op() == 2
print(len(seen))
"""
)


def run(script, *arguments, timeout):
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return [int(n) for n in done.stdout.split()]


@pytest.mark.skipif(not activation.in_library, reason="in Python a signal may arrive before the first line of __exit__")
@pytest.mark.parametrize("signals", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_signal_leaves_a_rule_active(signals):
    arrived, left = run(SIGNALS, str(signals), timeout=600)
    assert arrived == signals and left == 0, f"{left} of {arrived} signals have left rules active"


@pytest.mark.parametrize("library", [True, False], ids=["with the library", "without"])
@pytest.mark.parametrize("every", [5, pytest.param(3, marks=pytest.mark.slow)])
def test_an_exception_at_any_line_is_repaired_by_the_next_block(library, every):
    (lines,) = run(("" if library else WITHOUT_LIBRARY) + LINES, str(every), timeout=1800)
    assert lines > 20


def test_an_exception_at_any_line_of_a_swap_is_repaired_when_it_dies():
    (lines,) = run(SWAPS, timeout=600)
    assert lines > 20
