"""Operators on distributed tensors: equal to one process, compiled or not, and without a collective that is not needed."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import once, run_program
from helpers.sharding_cases import CASES, MANY, PASSES

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux" or torch.__version__ < "2.13",
    reason="gloo on Linux; before 2.13 PyTorch lacks strategies for half of the operators that formulas are made of",
)

# For each number of ranks, the cases that run with our strategies, and those that run with PyTorch's own. Four ranks find
# more than two where they communicate, or add their parts. PyTorch's own strategy for attention is found in 15 s.
ADDED = [name for name, case in CASES.items() if any(case.needs) or case.partial]
ALONE = [name for name in CASES if name not in ADDED]
FAST = {MANY: [list(CASES), [n for n in CASES if n != "attention"]], 2: [list(CASES), []], 4: [ADDED, []]}
SLOW = {MANY: [["attention"], ["attention"]], 4: [ALONE, []]}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """What a rank of so many found; the ranks of all numbers run beside each other, once."""

    @functools.cache
    def results(part, size, rank):
        worlds = FAST if part == "fast" else SLOW
        program = functools.partial(run_program, Path(__file__).parent / "sharding_worker.py", json.dumps(worlds))
        folder = once(tmp_path_factory, f"sharding_{part}", program)
        return json.loads((folder / f"{size}.{rank}").read_text())

    def of(size, name, rank=0, stock=False):
        found = results("fast" if name in FAST[size][stock] else "slow", size, rank)
        assert name in found, f"not reached: {[v for v in found.values() if 'error' in v]}"
        assert "error" not in found[name], found[name]["error"]
        return found[name]

    return of


@pytest.mark.parametrize(
    ("size", "name"), [*[(2, n) for n in CASES], *[(4, n) for n in ADDED], *[slow(4, n) for n in ALONE]]
)
def test_ranks_agree_with_one_process(found, name, size):
    for rank in range(size):
        errors = found(size, name, rank)["errors"]
        assert [*errors] == [*PASSES, "plain backward"]
        assert all(e < 1e-9 for what in errors for e in errors[what]), errors


@pytest.mark.parametrize("name", CASES)
def test_parts_stay_where_they_are(found, name):
    case, placements = CASES[name], found(2, name)["placements"]
    (output,) = placements["forward"]
    if case.partial:
        assert output.startswith("_NormP" if "norm" in name else "P(")
    else:
        assert output == ("R" if case.gathered else "S(0)")
    dims = [dim for make in case.inputs for x, dim in [make(2)] if x.is_floating_point()]
    for dim, of_first, of_second in zip(dims, placements["backward"], placements["second"] or [None] * len(dims)):
        assert of_first == ("P(sum)" if dim is None else f"S({dim})")
        assert of_second in (None, "R", "P(sum)") if dim is None else of_second in (None, f"S({dim})")
    assert (placements["tangent"] == ["R"]) is case.gathered


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_ranks_communicate_only_what_the_mathematics_needs(found, name):
    counts = found(MANY, name)["counts"]
    assert tuple(counts[what] for what in PASSES) == tuple(CASES[name].needs)
    assert counts["plain backward"] <= counts["backward"]


@pytest.mark.parametrize("name", [slow(n) if n == "attention" else n for n in CASES])
def test_no_collective_is_added_to_those_of_pytorch(found, name):
    result = found(MANY, name, stock=True)
    stock, counts, allowed = result["stock"], result["counts"], CASES[name].more
    more = {what: (n, counts[what]) for what, n in stock.items() if counts[what] > n + allowed.get(what, 0)}
    assert not more


# -- torch.compile: right, in one graph, with our operators in it -----------------------------------------------------

# While it traces, PyTorch takes these apart before any rule is asked, and compares the labels with a tensor of one rank.
REFUSED = ("multi_margin_loss", "multilabel_margin_loss")
COMPILED = [name for i, name in enumerate(CASES) if i % 4 == 0 or name in REFUSED]  # in the fast tests


@pytest.fixture(scope="session")
def found_compiled(tmp_path_factory):
    """The results of a rank. Both ranks run at the same time: once for the fast cases, once for the others."""

    @functools.cache
    def results(backend, is_fast, rank):
        names = json.dumps([name for name in CASES if (name in COMPILED) is is_fast])
        program = functools.partial(run_program, Path(__file__).parent / "compiled_worker.py", backend, names)
        folder = once(tmp_path_factory, f"compiled_{backend}_{is_fast}", program)
        return json.loads((folder / f"{rank}").read_text())

    return lambda backend, name, rank: results(backend, name in COMPILED, rank)[name]


@pytest.mark.parametrize(
    ("backend", "name"),
    [(b, n) if b == "aot_eager" and n in COMPILED else slow(b, n) for b in ("aot_eager", "inductor") for n in CASES],
)
def test_a_compiled_function_agrees_with_one_process(found_compiled, name, backend):
    for rank in range(2):
        errors = found_compiled(backend, name, rank)
        if name in REFUSED:
            assert "mixed torch.Tensor and DTensor" in errors
        else:
            assert not isinstance(errors, str), errors
            assert all(e < 1e-9 for e in errors), errors
