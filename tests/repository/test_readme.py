"""The Python examples of the documents run, top to bottom, each document in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers.interpreters import run_python

import torch_manualgrad as mg
from torch_manualgrad_cli import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *[f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))],
]
GENERATED = ("notebooks/", "catalogue/")  # pages that are written when the site is built, which checks links to them

if not (ROOT / "README.md").exists():
    pytest.skip("not a source tree", allow_module_level=True)


def examples(document: str) -> str:
    """The Python blocks of a document; every other line is empty, so that line numbers are those of the document."""
    lines, inside = [], False
    for line in (ROOT / document).read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


WITH_EXAMPLES = ["README.md", "CONTRIBUTING.md", "docs/tour.md"]  # tests/repository/test_docs.py runs those of docs/


@pytest.mark.parametrize("document", WITH_EXAMPLES)
def test_examples_run(document, tmp_path):
    path = tmp_path / f"{Path(document).stem}.py"
    path.write_text(examples(document))
    if document == "README.md":  # in an interpreter that has imported nothing
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(mg.__file__).parents[1]), *sys.path])}
        run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment, cwd=tmp_path)
    else:
        run = run_python(path, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    for shown in re.findall(r"^```text\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL):
        assert shown in run.stdout, run.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", prose):
        assert target.startswith(GENERATED) or (path.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_folders_and_files_exist(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"`((?:torch_manualgrad|tests|csrc|examples)/[\w/.]+)`", text):
        if target != "torch_manualgrad/derivatives/activation.py":  # the worked example
            assert (ROOT / target).exists(), target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"^(?:`)?make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_commands_that_are_shown_exist():
    named = {c for d in DOCUMENTS for c in re.findall(r"^`*manualgrad (\w+)|`manualgrad (\w+)", (ROOT / d).read_text())}
    assert {"show", "list", "explain"} <= {a or b for a, b in named} <= {*cli.commands}
    assert "def norm_backward" in CliRunner().invoke(cli, ["show", "norm_backward"]).output


def test_the_facts_in_why():
    x, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    plain = torch.func.jacrev(lambda x: (x[:, None] - y).square().sum(-1).sqrt())(x)

    def gradient(value, p):
        x = torch.full((4,), value, requires_grad=True)
        return torch.autograd.grad(torch.linalg.vector_norm(x, p), x)[0]

    assert not torch.allclose(torch.func.jacrev(torch.cdist)(x, y), plain)
    assert gradient(1e-25, 2).eq(0).all() and gradient(1e15, 4).isnan().all()
    with mg.override():
        torch.testing.assert_close(torch.func.jacrev(torch.cdist)(x, y), plain)
        torch.testing.assert_close(gradient(1e-25, 2), torch.full((4,), 0.5))
        torch.testing.assert_close(gradient(1e15, 4), torch.full((4,), 4**-0.75))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1000


def test_the_composition_table_says_what_why_says():
    table = (ROOT / "docs" / "composition.md").read_text()
    header, right = (re.search(rf"^\| {first} .*", table, re.MULTILINE)[0] for first in ("through", r"\*\*right\*\*"))
    counts = dict(zip(*([cell.strip(" *") for cell in row.split("|")[2:-1]] for row in (header, right))))
    rows = int(counts["custom op, ours"])
    stock = int(counts["custom op, torch.library"])
    text = " ".join((ROOT / "docs" / "why.md").read_text().split())
    assert f"Of {rows} ways to differentiate, batch or compile a custom op, {stock} give the right number" in text
    failures = re.findall(r"^\*\*(.+)\*\*(.*)$", table.partition("## Failures")[2], re.MULTILINE)
    ours = {title: said for title, said in failures if title.endswith(", ours")}
    assert {*ours.values()} == {": nothing."}
    kinds = ["custom op", "mutable", "out", "optional result", "lists"]
    assert {*ours} == {f"{kind}, ours" for kind in [*kinds, "vector_norm", "cdist"]}
    assert re.findall(r"^\| \*\*right\*\* .*", table, re.MULTILINE)[1].count(f"**{rows}**") == len(kinds) - 1
