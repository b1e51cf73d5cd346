"""nvcc's code for kernels does what the host's compiler makes of their source: to the bit, but for powers.

It is interpreted (cuda_on_host/ptx.py) with the arguments and the memory of each launch on the host.
"""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from cuda_on_host import ptx
from cuda_on_host.build import COMPILER, HERE, ROOT, build
from helpers.interpreters import run_python

NVCC = shutil.which("nvcc")
pytestmark = [
    pytest.mark.skipif(NVCC is None or shutil.which(COMPILER) is None, reason="nvcc and g++ are needed"),
    pytest.mark.skipif(
        platform.system() != "Linux" or not (ROOT / "csrc").exists(), reason="not a source tree on Linux"
    ),
]

# unit -> its source, and how many kernels the witness runs at least
UNITS = {
    "strong_times": ("elementwise", 7),
    "triangular": ("linalg", 10),
    "cholesky": ("linalg", 20),
    "distance": ("reduction", 12),
    "norm": ("reduction", 48),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ptx")


def text(unit: str, folder: Path) -> Path:
    from torch.utils import cpp_extension

    target = folder / f"{unit}.ptx"
    if not target.exists():
        includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
        ptx.compiled(ROOT / "csrc" / UNITS[unit][0] / f"{unit}.cu", target, includes, NVCC)
    return target


def outcomes(unit: str, *texts: Path) -> list[str]:
    arguments = [str(build(only=[unit])), *map(str, texts)]
    done = run_python(HERE / "witness.py", *arguments, folder=HERE, imported=("torch",))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("unit", UNITS)
def test_nvccs_code_computes_the_same(unit, folder):
    (found,) = outcomes(unit, text(unit, folder))
    compared = re.fullmatch(r"(\d+) kernels, \d+ numbers", found)
    assert compared and int(compared[1]) >= UNITS[unit][1], found


# what is replaced in the code of a kernel of floats, and by what; the outcome
FAULTS = {
    "another place of an argument": (r"\[(%rd\d+)\+200\]", r"[\1+208]", "the device writes|no address"),
    "an argument less": (r"(?m)^\s+\.param \.u64 \w+_param_2,\n", "", "takes arguments of"),
    "the other branch": (r"@(%p\d+) bra", r"@!\1 bra", "the device writes"),
    "a comparison with another result for nan": (r"setp\.neu\.f32", "setp.ne.f32", "the device writes"),
    "selected the wrong way round": (r"selp\.f32( \t?\S+), (\S+), (\S+),", r"selp.f32\1, \3, \2,", "the device writes"),
    "another rounding": (r"mul\.rn\.f32", "mul.rz.f32", "how to round"),
    "another address space": (r"ld\.global\.f32", "ld.shared.f32", "of shared memory"),
    "an address that is not aligned": (r"st\.global\.f32( \t?)\[(%rd\d+)\]", r"st.global.f32\1[\2+2]", "not aligned"),
    "an unknown instruction": (r"mul\.rn\.f32", "mad.rn.f32", "mad.rn"),
}


def test_faults_in_the_code_are_found(folder):
    whole, edited = text("strong_times", folder).read_text(), []
    start = re.search(r"\.entry \w+strong_times_kernelIfE", whole).start()
    for number, (old, new, _) in enumerate(FAULTS.values()):
        after, count = re.subn(old, new, whole[start:], count=1)
        assert count == 1, old
        (folder / f"{number}").mkdir()
        edited.append(folder / f"{number}" / "strong_times.ptx")
        edited[-1].write_text(whole[:start] + after)
    found = dict(zip(FAULTS, outcomes("strong_times", *edited), strict=True))
    wrong = {name: found[name] for name, (*_, shown) in FAULTS.items() if not re.search(shown, found[name])}
    assert not wrong, "\n".join(f"{k}: {v[-120:]}" for k, v in wrong.items())


@pytest.mark.parametrize("kind", ["f64", "f32"])
def test_comparisons_with_nan(kind):
    a, b = np.array([1.0, np.nan, 2.0], ptx.dtype(kind)), np.array([1.0, 1.0, np.nan], ptx.dtype(kind))
    for how in ("eq", "ne", "lt", "le", "gt", "ge"):
        assert not ptx.compared(how, a, b)[1:].any()
        assert ptx.compared(how + "u", a, b)[1:].all()
    assert list(ptx.compared("nan", a, b)) == [False, True, True]


def test_arithmetic_that_numpy_does_differently():
    def number(kind, *values):
        return np.array(values, ptx.dtype(kind))

    assert list(ptx.computed("div", (), [number("s32", -7, 7), number("s32", 2, -2)])) == [-3, -3]
    assert list(ptx.computed("rem", (), [number("s64", -7, 7), number("s64", 2, -2)])) == [-1, 1]
    assert list(ptx.computed("mul", ("hi",), [number("s32", -1), number("s32", 2)])) == [-1]
    assert list(ptx.shifted(number("u32", 1, 1), number("u32", 31, 32), left=True)) == [1 << 31, 0]
    assert list(ptx.shifted(number("s32", -8), number("u32", 40), left=False)) == [-1]
    assert list(ptx.computed("max", (), [number("f32", np.nan), number("f32", 2)])) == [2]
    tiny = 2.0**-60  # in a product and a sum of two roundings, it is lost
    assert list(ptx.computed("fma", ("rn",), [number("f64", 1 + 2.0**-30)] * 2 + [number("f64", -1 - 2.0**-29)])) == [
        tiny
    ]
    with pytest.raises(ptx.Fault, match="zero"):
        ptx.computed("div", (), [number("u32", 1), number("u32", 0)])
