"""The pages of docs/: their examples and notebooks run, the site has each of them, and mathematics is recognised."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.interpreters import run_python

import torch_manualgrad as mg

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.py"))
# the languages of blocks: Python, which runs here; files and outputs; lines of a shell, which have none
LANGUAGES = {"python", "toml", "yaml", "text", ""}
# rows of tables, where a page has more than 60: what a reader looks up by its name or number
MOST_ROWS = {
    "against_jax.md": 100,
    "composition.md": 90,
    "cuda.md": 70,
    "issues.md": 200,
    "nested_operators.md": 120,
    "suites.md": 80,
    "troubleshooting.md": 80,
}
# pages whose blocks are files: tests/core/test_packages.py has the first, test_the_workflow_runs the second; and the
# tour, which test_readme.py runs, and compares what it prints with the page
ELSEWHERE = ["packages.md", "check_in_ci.md", "tour.md"]
COMPILES = ["compiled_operators.md"]

if not DOCS.exists():
    pytest.skip("not a source tree", allow_module_level=True)


def name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def examples(page: Path) -> str:
    """The Python blocks of a page; every other line is empty, so that line numbers are those of the page."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def run(*command: str | Path, folder: Path, **environment: str) -> None:
    """Run Python with these arguments and variables."""
    done = run_python(*command, folder=folder, environment={"MPLBACKEND": "agg", **environment})
    assert done.returncode == 0, done.stdout + done.stderr


WITH_EXAMPLES = [p for p in PAGES if examples(p).strip() and name(p) not in ELSEWHERE]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name)
def test_examples_run(page, tmp_path):
    environment = {}
    if name(page) in COMPILES:
        if not (shutil.which("c++") and shutil.which("ninja")):
            pytest.skip("no C++ compiler, or no ninja")
        environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
    path = tmp_path / f"{page.stem}.py"
    path.write_text(examples(page))
    run(path, folder=tmp_path, **environment)


def test_the_workflow_runs(tmp_path):
    """The files of docs/check_in_ci.md, and the steps of its workflow that check."""
    text = (DOCS / "check_in_ci.md").read_text()
    blocks = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    files = dict(blocks)
    assert [*files] == ["ops.py", "test_ops.py", ".github/workflows/derivatives.yml"]
    for file in ("ops.py", "test_ops.py"):
        (tmp_path / file).write_text(files[file])
    steps = re.findall(r"- run: (pytest|manualgrad)(.*)", files[".github/workflows/derivatives.yml"])
    assert len(steps) == 3
    modules = {"pytest": ["pytest", "-p", "torch_manualgrad_pytest"], "manualgrad": ["torch_manualgrad"]}
    for command, arguments in steps:
        run("-m", *modules[command], *arguments.split(), folder=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page):
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert {*fences[::2]} <= LANGUAGES and {*fences[1::2]} <= {""}


def test_the_messages_of_troubleshooting_exist():
    """Between `...`, each is text of a string in the sources; PyTorch's own have a section without this test."""
    strings = []
    for file in [*(ROOT / "torch_manualgrad").rglob("*.py"), ROOT / "setup.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    text = "\n".join(strings)
    sections = (DOCS / "troubleshooting.md").read_text().split("\n## ")
    chosen = [s for s in sections if s.startswith(("Custom", "Overrides", "Checks", "Building"))]
    messages = [m for s in chosen for m in re.findall(r"^\| `([^`]+)` \|", s, re.MULTILINE)]
    assert len(messages) > 25
    missing = [m for m in messages for part in m.split("...") if part.strip(" ;:.,()s") not in text]
    assert not missing


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_run(notebook, tmp_path):
    for module in ("matplotlib", "sklearn"):
        pytest.importorskip(module)
    run(notebook, folder=tmp_path)


def test_each_page_is_in_the_navigation():
    listed = {*re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())}
    assert {name(p) for p in PAGES} | {name(p.with_suffix(".md")) for p in NOTEBOOKS} <= listed


# -- what tools/site makes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site():
    """The modules of tools/site, and the plots of benchmarks/, by name."""
    pytest.importorskip("latex2mathml")
    pytest.importorskip("matplotlib")
    folders = [str(ROOT / "tools" / "site"), str(ROOT / "benchmarks")]
    sys.path[:0] = folders
    try:
        names = ("catalogue", "docstrings", "expressions", "plots", "presentation", "start", "stock", "typeset")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        for folder in folders:
            sys.path.remove(folder)


@pytest.mark.parametrize(
    "text, typeset",
    [
        ("$gB = L^-H W$, and more", r"\(g_{B} = L^{-H} \, W\), and more"),
        ("Cotangent of $A$, given that of its inverse $X$", r"Cotangent of \(A\), given that of its inverse \(X\)"),
        ("$sum g x^$, where", r"\(\sum  g \, \hat{x}\), where"),
        ("the $p$-norm of ``self``", r"the \(p\)-norm of `self`"),
        ("$y_(m-1) = sqrt(x1)$", r"\(y_{ m - 1 } = \sqrt{ x_1 }\)"),
        ("$y <g, 1>$ where $x <= 0$", r"\(y \, \langle  g , 1 \rangle\) where \(x \le  0\)"),
        ("$(<x^2> + eps)^(-1/2)$", r"\({( \langle  x^{2} \rangle + \varepsilon  )}^{ - 1 / 2 }\)"),
        ("$<h x^>$", r"\(\langle  h \, \hat{x} \rangle\)"),
        ("$E~_ij = +-inf$", r"\({\tilde{E}}_{\text{ij}} = \pm  \infty\)"),
        ("$dgq + gtau$", r"\(\mathrm{d}g_{q} + g_{\tau}\)"),
        ("$l = log_softmax(x)$", r"\(l = \operatorname{log softmax} ( x )\)"),
        ("$a$ $b$", r"\(a\) \(b\)"),
        ("x = 2 of 3 is prose, as is \\(", r"x = 2 of 3 is prose, as is \\("),
        ("$S$ (*, k), (N, C) and (C,) of (a number)", r"\(S\) `(*, k)`, `(N, C)` and `(C,)` of (a number)"),
        ("grad_output of torch.linalg.svd, ``x[$]``", "`grad_output` of `torch.linalg.svd`, `x[$]`"),
        ("(polar, sqrtm, ...) <0.5>", r"(polar, sqrtm, ...) &lt;0.5\>"),
    ],
)
def test_typeset(site, text, typeset):
    assert site.typeset.typeset(text) == typeset


def test_a_mark_without_an_end_raises(site):
    with pytest.raises(ValueError, match="does not end: half of"):
        site.typeset.typeset("half of $x")


@pytest.mark.parametrize(
    "text, typeset",
    [
        ("    a = b,  c = d.   e", r"\(a = b\),&emsp;\(c = d\).&emsp;&emsp;\(e\)"),
        ("    jvp: $a = b$,   and c", r"jvp: \(a = b\),&emsp;&emsp;and c"),
    ],
)
def test_a_display_is_mathematics_unless_some_of_it_is_marked(site, text, typeset):
    assert site.docstrings.markdown(text) == f'<div class="display" markdown="span">{typeset}</div>'


def docstrings(site):
    """(where, docstring) of the folders that the catalogue shows."""
    for folder in site.catalogue.FAMILIES:
        place = site.catalogue.PACKAGE / folder
        for path in sorted(place.rglob("*.py")) or [place]:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                    where = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}"
                    yield where, ast.get_docstring(node)


# a letter by itself, a power, a quotient of differentials, an equation, a sum of letters
LIKELY_MATHEMATICS = re.compile(
    r"(?<![\w'\"./])[b-zB-HJ-Z](?![\w'\".+])|\w\^|\bd\w*/d\w|\b[A-Za-z]\w? [-+=*/] \w|(?<![\w\"])-inf\b"
)
LIKELY_PROSE = re.compile(r"\b(and|as|for|given|in|its|of|the|where|with)\b")


def test_mathematics_in_docstrings_is_marked(site):
    """Of prose, what is hardly ever anything else; of displayed formulas without a mark, that they have no prose."""

    def rest(match):  # without code, shapes and what is marked
        return match[0] if match["special"] else ""

    wrong = []
    for where, docstring in docstrings(site):
        for section, text in site.docstrings.sections(docstring).items():
            if section in ("References", "Example", "Examples"):
                continue
            if section in ("Args", "Attributes", "Raises"):  # without names and indentation
                text = re.sub(r"^\w[\w, ]*: *|^ +", "", text, flags=re.MULTILINE)
            for block in site.docstrings.blocks(text):
                lines = "\n".join(block)
                is_whole = site.docstrings.is_display(block) and site.typeset.MARK not in lines
                likely = LIKELY_PROSE if is_whole else LIKELY_MATHEMATICS
                found = likely.finditer(lines if is_whole else site.typeset.PROSE.sub(rest, lines))
                wrong += [f"{where}: {match[0]}" for match in found]
                site.docstrings.markdown(lines)  # raises where a mark has no end
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "python, latex",
    [
        ("(1 - self * self).rsqrt()", r"\frac{1}{\sqrt{1 - {x}^{2}}}"),
        ("-value * (self - other) / 2", r"\frac{-\text{value} \, (x - y)}{2}"),
        ("2 / sqrt(pi) * (-self * self).exp()", r"\frac{2}{\sqrt{\pi}} \, e^{-{x}^{2}}"),
        ("self - (other - grad)", "x - (y - g)"),
        ("torch.polygamma(1, self)", r"\psi^{(1)}(x)"),
        ("1j * result", r"i \, r"),
        ("_helper(self)", None),
        ("True", None),
    ],
)
def test_expression(site, python, latex):
    found = site.expressions.expression(ast.parse(python, mode="eval").body)
    assert found == latex
    if latex:
        assert "<math" in site.presentation.mathml(latex)


@pytest.mark.parametrize(
    "latex, has, has_not",
    [
        (r"g \, \log x", '<mi>log</mi><mspace width="0.167em" /><mi>x</mi>', "<mo>log"),
        (r"\operatorname{tanh} ( x )", "<mi>tanh</mi><mo", "mspace"),
        (r"\overline{x y}", "\N{OVERLINE}", "\N{HORIZONTAL BAR}"),
        ("a = -b", '<mo form="prefix">\N{MINUS SIGN}', "mspace"),
        ("a - b", "<mo>\N{MINUS SIGN}", "form"),
        (r"\operatorname{tanh}^{2} x", "<msup><mi>tanh</mi>", "<mo>tanh"),
    ],
)
def test_mathml(site, latex, has, has_not):
    found = site.presentation.mathml(latex)
    assert has in found and has_not not in found


def test_the_catalogue_has_everything_and_its_mathematics_can_be_typeset(site):
    catalogue = site.catalogue
    pages = catalogue.pages()
    text = "\n".join(pages.values())
    anchors = {*re.findall(r'\{ #([\w-]+) \}|<span id="([\w-]+)">', text)}
    present = {a or b for a, b in anchors}
    for rule in mg.rules:
        if rule.startswith("aten::"):  # other tests may have registered rules and formulas of their own
            assert catalogue.anchor(rule) in present, rule
    for name, formula in mg.ops.items():
        if catalogue.file_of(formula).is_relative_to(catalogue.PACKAGE):
            assert catalogue.anchor(name) in present, name
    for entry in mg.catalogue:
        assert entry.removeprefix("aten::") in pages["catalogue/without_a_rule.md"]
    formulas = {*re.findall(r"\\\((.+?)\\\)", text)}
    assert len(formulas) > 1000
    for formula in formulas:
        assert "<math" in site.presentation.mathml(formula)


def test_the_results_of_stock_are_sentences(site, monkeypatch, tmp_path):
    rule = mg.rules["aten::cumprod"]
    assert site.stock.stock(mg.rules["aten::sin"]) == ""
    monkeypatch.setattr(site.stock, "TABLE", tmp_path / "stock.csv")
    monkeypatch.setattr(site.stock, "MEASURED", site.stock._table())
    assert site.stock.stock(rule) == "not measured"
    (tmp_path / "stock.csv").write_text(
        'operator,2.10,2.13,2.15\naten::cumprod,"wrong: fwd-fwd; raises: fwd","wrong: fwd-fwd",-\n'
    )
    monkeypatch.setattr(site.stock, "MEASURED", site.stock._table())
    assert site.stock.stock(rule) == "wrong: fwd-fwd<br>raises: fwd (2.10)<br>wrong: fwd-fwd (2.13)"


def test_documents_keep_summaries_of_what_is_measured():
    """The whole tables are in build/measure, which the site includes."""
    for page in (ROOT / "docs").glob("*.md"):
        rows = sum(line.startswith("|") for line in page.read_text().splitlines())
        assert rows <= MOST_ROWS.get(page.name, 60), page


def test_the_picture_of_the_first_page(site):
    name = "cumprod"
    function, arguments = site.start.ROWS[name]
    with mg.override():
        assert {*site.start.outcomes(function, arguments)} == {"right"}
    assert "nan" in site.start.outcomes(function, arguments)


def test_plots_say_where_and_when_they_were_measured(site):
    for name, plot in site.plots.PLOTS.items():
        about, canvas = plot()
        assert re.search(r"\. .+, \d+ cores, torch \d+\.\d+.*, \w+, \d{4}-\d\d-\d\d\.", about), about
        text = site.plots.svg(canvas, name)
        assert "#000000" not in text and "currentColor" in text
        assert len(re.findall("<text", text)) > 5


def test_a_benchmark_table_without_date_or_spread_is_drawn(site, tmp_path, monkeypatch):
    monkeypatch.setattr(site.plots, "RESULTS", tmp_path)
    (tmp_path / "overhead.csv").write_text(
        "# Cost; of a call; cpu X, cores 2, torch 2.13.0, system Linux\nwhat,1 threads ours ratio\na,1.5\nb,\n"
    )
    about, rows = site.plots.results("overhead")
    assert about == "Cost; of a call. X, 2 cores, torch 2.13.0, Linux, date not kept."
    assert [site.plots.ratio(row, "1 threads ours") for row in rows] == [(1.5, 1.5, 1.5), None]
    site.plots.overhead()


def test_each_rule_and_formula_has_a_place_in_the_catalogue(tmp_path):
    """The pages that `make docs` writes from the registries; test_docs_site.py reads them, if the site was built."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools' / 'site')!r})\n"
        "import catalogue, torch_manualgrad as mg\n"
        "text = ''.join(catalogue.pages().values())\n"
        "lost = [name for name in mg.rules if name.removeprefix('aten::') not in text]\n"
        "assert not lost, lost\n"
    )
    run(program, folder=tmp_path)
