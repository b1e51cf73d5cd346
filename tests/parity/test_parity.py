"""Where stock gives finite, right values, an override gives them too: every way, every row, both overrides."""

import pytest
from cells import FAILS, measure, pins
from rows import rows
from ways import CHEAP, DEAR, HANDFUL, SLOW, WAYS

import torch_manualgrad as mg


def parameters():
    for turn, way in enumerate(WAYS.values()):
        for place, row in enumerate(rows()):
            slow = row.name not in HANDFUL if way.cost == DEAR else (place + turn) % row.turns != 0
            slow = slow or way.cost == SLOW
            yield pytest.param(way, row, id=f"{way.name}-{row.name}", marks=[pytest.mark.slow] * slow)


def undeclared(cells):
    return [c for c in cells if c.outcome == FAILS and not any(p.covers(c) for p in pins())]


@pytest.mark.parametrize("way, row", parameters())
def test_an_override_keeps_what_is_right_on_stock(way, row):
    cells = measure(way, row, 1)
    bad = undeclared(cells)
    assert not bad, "\n".join(map(str, bad))
    for pin in pins():
        if (pin.way, pin.row) == (way.name, row.name):
            failed = [c for c in cells if c.outcome == FAILS]
            assert any(pin.covers(c) for c in failed), f"declared in pinned.md, and holds now: {pin}"


@pytest.mark.slow
@pytest.mark.parametrize("way", [w for w in WAYS.values() if w.cost == CHEAP], ids=lambda w: w.name)
@pytest.mark.parametrize("row", rows(), ids=lambda r: r.name)
def test_on_every_sample_and_after_an_override(way, row):
    bad = undeclared(measure(way, row, pure=True))
    assert not bad, "\n".join(map(str, bad))


def test_pins_name_ways_and_rows():
    known = {r.name for r in rows()} | mg.rules.absent.keys()
    for pin in pins():
        assert pin.way in WAYS and pin.row in known and pin.reason, pin
