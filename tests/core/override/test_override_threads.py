"""Rules come and go while other threads compute: nothing crashes, raises, or gets another operator's result."""

import subprocess
import sys

import pytest

WORK = """
import _thread, itertools, sys, threading, time, warnings
import torch
import torch_manualgrad as mg

warnings.simplefilter("ignore")
torch.set_num_threads(1)
SECONDS = float(sys.argv[1])


def leaves(sample):
    floating = lambda t: isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
    args = [a.detach().clone().requires_grad_() if floating(a) else a for a in sample.args]
    return args, dict(sample.kwargs), [a for a in args if floating(a)]


def outcome(op, sample):
    args, kwargs, inputs = leaves(sample)
    out = op(*args, **kwargs)
    out = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if o.requires_grad]
    with torch.no_grad():
        op(*args, **kwargs)
    if out:
        grads = torch.autograd.grad(out, inputs, [torch.ones_like(o) for o in out], allow_unused=True)
        return [g.shape for g in grads if g is not None]


cases = [(r.probe, s) for r in mg.rules.values() for s in list(r.samples(torch.float64, "cpu"))[:2]]


def stock(op, sample):
    try:
        found = [outcome(op, sample)]
    except RuntimeError:  # PyTorch has no such derivative, and the rules come and go
        return []
    with mg.override("*"):  # which may have a gradient where PyTorch says that there is none
        return [(op, sample, [*found, outcome(op, sample)])]


cases = [found for op, s in cases for found in stock(op, s)]
jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
until, failures, counts = time.monotonic() + SECONDS, [], []


def work(seed, done):
    try:
        for k in itertools.count(seed):
            if time.monotonic() > until:
                counts.append(k - seed)
                return
            op, sample, expected = cases[7 * k % len(cases)]
            found = outcome(op, sample)
            assert found in expected, (op, found, expected)
            torch.relu(jagged.clone().requires_grad_()).values().sum()
    except BaseException as error:
        failures.append((cases[7 * k % len(cases)][0], error))
    finally:
        done.release()


locks = []
for seed in range(3):  # two of these threads are none that `threading` counts
    locks.append(_thread.allocate_lock())
    locks[-1].acquire()
    start = _thread.start_new_thread if seed else lambda f, a: threading.Thread(target=f, args=a).start()
    start(work, (1000 * seed, locks[-1]))
blocks = itertools.cycle([mg.override(), mg.override("*"), mg.override("_linalg_det", "nested"), mg.override("*", forward=True)])
entered = 0
while time.monotonic() < until:
    with next(blocks):
        time.sleep(0.0003 * (entered % 3))
    entered += 1
for lock in locks:
    lock.acquire()
assert not failures, failures[0]
print(entered, min(counts))
"""


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_rules_come_and_go_while_threads_compute_with_every_one(seconds):
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(seconds)], capture_output=True, text=True, timeout=60 + 3 * seconds
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr[-3000:]}"
    entered, calls = map(int, done.stdout.split())
    assert entered > 20 * seconds and calls > 20 * seconds
