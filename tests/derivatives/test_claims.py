"""What rules claim over PyTorch's own derivatives, proven on the torch that is installed.

"values": PyTorch is wrong, or not finite, where a right value exists; "missing": it raises. A claim that PyTorch has
mended gets the version: ``improves={"values": "2.15"}``. Speed is for the benchmarks to show. The proofs are in claims/,
a module for each family.
"""

from __future__ import annotations

import pytest
import torch
from claims import proofs

import torch_manualgrad as mg

PROOFS = proofs()
CLAIMS = [(rule, claim) for rule in mg.rules.values() for claim in rule.claims if claim != "speed"]
OUTCOMES = {"values": "wrong", "missing": "raises"}


@pytest.mark.parametrize("rule, claim", CLAIMS, ids=lambda x: getattr(x, "name", x))
def test_a_claim_holds_on_the_torches_that_it_is_for(rule, claim):
    ways = PROOFS[rule.name][claim]
    outcomes = {proof(rule) for proof in ways}
    holds = OUTCOMES[claim] in outcomes or "missing" in rule.improves and "raises" in outcomes
    here = f"{rule.name} {claim}, torch {torch.__version__}"
    if claim in rule.improves:
        assert holds, f"claim outdated here: {here}"
    else:
        assert not holds, f"claim holds here, though it is said to end with {rule.claims[claim]}: {here}"
    with mg.override(rule):
        assert {proof(rule) for proof in ways} == {"ok"}
