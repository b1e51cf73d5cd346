"""The catalogue: a page for each family of operators, written from the registries.

Every formula has its statement typeset, its conditions, its sources and its Python; every rule what it binds, what it
claims over PyTorch, and what it cannot do.
"""

from __future__ import annotations

import ast
import html
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from docstrings import markdown, sections, title
from expressions import expression
from stock import stock
from typeset import typeset

import torch_manualgrad as mg
from torch_manualgrad.core.rule.catalogue import KINDS

__all__ = ["FAMILIES", "pages"]

PACKAGE = Path(mg.__file__).parent
# folder of the package -> title of the page
FAMILIES = {
    "derivatives/linalg": "Linear algebra",
    "derivatives/reduction": "Reductions, norms and distances",
    "derivatives/elementwise": "Functions of each element",
    "derivatives/convolution": "Convolution, pooling and sampling",
    "derivatives/nn": "Normalization, attention and dropout",
    "derivatives/recurrent": "Recurrent layers",
    "derivatives/loss": "Losses",
    "derivatives/indexing": "Indexing",
    "derivatives/shape": "Shapes",
    "derivatives/sparse": "Sparse tensors",
    "derivatives/fft.py": "Fourier transforms",
    "linalg": "Functions of matrices",
    "nested": "Nested tensors",
    "primal": "Replacement primals",
}


class Definition(NamedTuple):
    """The statement that makes a rule."""

    file: Path
    call: ast.Call
    source: str


def name_of(folder: str) -> str:
    """The name of a family's page."""
    return {"linalg": "matrix_functions"}.get(folder, folder.rpartition("/")[2].removesuffix(".py"))


def rule_files() -> list[Path]:
    return sorted({*PACKAGE.glob("derivatives/**/*.py")} - {*PACKAGE.glob("derivatives/samples/**/*.py")})


def definitions() -> dict[str, Definition]:
    """The statements of the package that make rules, by the name of the operator."""
    found = {}
    for file in rule_files():
        text = file.read_text()
        for statement in ast.parse(text).body:
            for call in [node for node in ast.walk(statement) if isinstance(node, ast.Call)]:
                first = call.args[0] if call.args else None
                if isinstance(first, ast.Constant) and str(first.value).startswith("aten::"):
                    source = ast.get_source_segment(text, statement) or ""
                    found[str(first.value).removesuffix(".default")] = Definition(file, call, source)
    return found


def file_of(function: Any) -> Path | None:
    """The file of a function, of a formula or of a wrapper of one. None for operators and constants."""
    for attribute in ("derivative", "formula", "reference"):
        function = getattr(function, attribute, function)
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return None if code is None else Path(code.co_filename)


class Family(NamedTuple):
    """The contents of one page, by source file."""

    formulas: dict[Path, list[Any]]
    rules: dict[Path, list[Any]]


def families() -> dict[str, Family]:
    found = {folder: Family(defaultdict(list), defaultdict(list)) for folder in FAMILIES}

    def folder_of(file: Path) -> str:
        inside = file.relative_to(PACKAGE).as_posix()
        return next(folder for folder in FAMILIES if inside == folder or inside.startswith(folder + "/"))

    # others than the package's own may be registered
    for formula in mg.ops.values():
        file = file_of(formula)
        if file.is_relative_to(PACKAGE):
            found[folder_of(file)].formulas[file].append(formula)
    for rule in mg.rules.values():
        file = Path(sys.modules[rule.module].__file__ or "")
        if file.is_relative_to(PACKAGE):
            found[folder_of(file)].rules[file].append(rule)
    return found


# -- Markdown ---------------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Code as HTML, which fits into the cell of a table."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def anchor(name: str) -> str:
    return name.replace("::", "-").replace(".", "-").lower()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def collapsed(title: str, body: str) -> str:
    indented = "\n".join(f"    {line}".rstrip() for line in body.splitlines())
    return f'??? abstract "{title}"\n\n{indented}'


def python(source: str) -> str:
    return f"```python\n{inspect.cleandoc(source)}\n```"


class Writer:
    """Writes the pages; knows where each formula has its place."""

    def __init__(self) -> None:
        self.families = families()
        self.definitions = definitions()
        self.place = {
            formula.__name__: f"{name_of(folder)}.md#{anchor(formula.__name__)}"
            for folder, family in self.families.items()
            for formulas in family.formulas.values()
            for formula in formulas
        }
        self.users: dict[str, list[str]] = defaultdict(list)
        self.rule_place = {}
        for folder, family in self.families.items():
            for rule in [r for rules in family.rules.values() for r in rules]:
                self.rule_place[rule.name] = f"{name_of(folder)}.md#{anchor(rule.name)}"
                for formula in rule.formulas:
                    self.users[formula.__name__].append(rule.name)

    # -- pages

    def pages(self) -> Iterator[tuple[str, str]]:
        yield "catalogue/index.md", self.index()
        for folder in FAMILIES:
            yield f"catalogue/{name_of(folder)}.md", self.page(folder)
        yield "catalogue/without_a_rule.md", self.without_a_rule()

    def index(self) -> str:
        rows = []
        for folder, family_title in FAMILIES.items():
            family = self.families[folder]
            operators = sum(map(len, family.rules.values()))
            formulas = sum(map(len, family.formulas.values()))
            rows.append([f"[{family_title}]({name_of(folder)}.md)", str(operators or ""), str(formulas or "")])
        return INDEX.format(
            table=table(["family", "operators with a rule", "formulas"], rows),
            rules=len(mg.rules),
            formulas=len(mg.ops),
            entries=len(mg.catalogue),
        )

    def page(self, folder: str) -> str:
        family = self.families[folder]
        parts = [
            f"# {FAMILIES[folder]}",
            f"How to read this page: [the catalogue](index.md). Written from `torch_manualgrad/{folder}`.",
        ]
        for file in dict.fromkeys([*family.rules, *family.formulas]):
            parts += self.module(file, family.formulas.get(file, []), family.rules.get(file, []))
        return "\n\n".join(parts) + "\n"

    def module(self, file: Path, formulas: Sequence[Any], rules: Sequence[Any]) -> Iterator[str]:
        docstring = ast.get_docstring(ast.parse(file.read_text())) or file.stem
        about = sections(docstring)
        rest = about[""].partition("\n")[2]
        yield f"## {title(docstring)} {{ #{anchor(file.stem)} }}"
        if rest.strip():
            yield markdown(rest)
        yield from self.remarks(about)
        if rules:
            header = ["operator", "derivative", "PyTorch's own", "over PyTorch", "raises"]
            rows = [self.row(rule) for rule in rules]
            used = [k for k in range(len(header)) if k < 2 or any(row[k] for row in rows)]
            yield table([header[k] for k in used], [[row[k] for k in used] for row in rows])
            sources = dict.fromkeys(self.definitions[r.name].source for r in rules if r.name in self.definitions)
            if sources:
                yield collapsed("The rules, as they are written", python("\n".join(sources)))
        for formula in formulas:
            yield from self.formula(formula)

    def formula(self, formula: Any) -> Iterator[str]:
        reference = inspect.unwrap(formula.reference)
        about = sections(formula.__doc__ or "")
        yield f"### `{formula.__name__}` {{ #{anchor(formula.__name__)} }}"
        yield markdown(about[""])
        yield from self.remarks(about)
        facts = []
        compiled = [device for device in formula.kernels if device != "default"]
        if compiled:
            facts.append(f"Kernels: {', '.join(compiled)}.")
        if users := self.users[formula.__name__]:
            facts.append("Used by " + ", ".join(f"[`{u}`]({self.rule_place[u]})" for u in users) + ".")
        if facts:
            yield " ".join(facts)
        body = [code(str(formula.signature.schema))]
        body += [_arguments(about["Args"])] if "Args" in about else []
        body += ["**Returns** " + markdown(about["Returns"])] if "Returns" in about else []
        yield collapsed("Arguments and source", "\n\n".join([*body, python(_without_docstring(reference))]))

    def remarks(self, about: dict[str, str]) -> Iterator[str]:
        if "Note" in about:
            yield markdown(about["Note"])
        if "References" in about:
            yield "*" + "References:* " + markdown(about["References"])

    def row(self, rule: Any) -> list[str]:
        claims = [claim if until is None else f"{claim}, until torch {until}" for claim, until in rule.claims.items()]
        gaps = [f"{mode}: {typeset(reason)}" for mode, reason in rule.gaps.items()]
        name = f'<span id="{anchor(rule.name)}"></span>{code(rule.name.removeprefix("aten::"))}'
        return [name, self.derivative(rule), stock(rule), ", ".join(claims), "; ".join(gaps)]

    def derivative(self, rule: Any) -> str:
        """The rule's bindings as they are written, or its formulas where the source has no literal name."""
        is_expression = rule.kind == "elementwise"
        lines = [self.bound(what, node, is_expression) for what, node in self.bindings(rule)]
        return "<br>".join(lines or [self.link(f.__name__) for f in rule.formulas] or ["as written below"])

    def bindings(self, rule: Any) -> Iterator[tuple[str, ast.expr]]:
        if rule.name not in self.definitions:
            return
        call = self.definitions[rule.name].call
        given = [("", node) for node in call.args[1:2]]
        given += [(k.arg or "", k.value) for k in call.keywords if k.arg in ("vjp", "jvp", "derivative")]
        for what, node in given:
            if isinstance(node, ast.Dict):
                keys = list(getattr(rule, what or "vjp"))  # in the order of the dictionary
                for k, (key, value) in enumerate(zip(node.keys, node.values)):
                    names = ", ".join(keys[k]) if len(keys) == len(node.keys) else ast.unparse(key or value).strip("'")
                    yield f"{what} of {code(names)}: ".lstrip(), value
            else:
                yield f"{what}: " if what else "", node

    def bound(self, what: str, node: ast.expr, is_expression: bool) -> str:
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute) and function.attr == "bind" and isinstance(node, ast.Call):
            arguments = ", ".join(ast.unparse(k) for k in node.keywords)
            return f"{what}{self.link(ast.unparse(function.value))} {code(f'({arguments})')}"
        if isinstance(node, ast.Name):
            return what + self.link(node.id)
        body = node.body if isinstance(node, ast.Lambda) else node
        if is_expression and (formula := expression(body)):
            return f"{what}\\({formula}\\)"
        if isinstance(body, ast.Call) and isinstance(body.func, ast.Name) and body.func.id in self.place:
            arguments = ast.unparse(body).removeprefix(body.func.id)
            return f"{what}{self.link(body.func.id)} {code(arguments)}"
        return what + code(ast.unparse(body))

    def link(self, name: str) -> str:
        return f"[{code(name)}]({self.place[name]})" if name in self.place else code(name)

    def without_a_rule(self) -> str:
        parts = ["# Operators without a rule", WITHOUT]
        for kind, what in KINDS.items():
            groups = defaultdict(list)
            for entry in mg.catalogue.values():
                if entry.kind == kind:
                    groups[entry.reason or what].append(code(entry.name.removeprefix("aten::")))
            rows = [[typeset(reason), ", ".join(names)] for reason, names in groups.items()]
            parts += [f"## {kind.capitalize()}: {what}", table(["why", "operators"], rows)]
        return "\n\n".join(parts) + "\n"


def _arguments(text: str) -> str:
    rows: list[list[str]] = []
    for line in text.splitlines():
        name, colon, what = line.partition(": ")
        if colon and not line.startswith(" "):
            rows.append([name, what])
        elif rows:
            rows[-1][1] += " " + line.strip()
    return table(["argument", "is"], [[code(name), typeset(what)] for name, what in rows])


def _without_docstring(function: Any) -> str:
    lines = inspect.getsource(function).splitlines()
    tree = ast.parse(inspect.cleandoc("\n".join(lines)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del lines[body[0].lineno - 1 : body[0].end_lineno]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """The Markdown of each page, by its place in docs/."""
    return dict(Writer().pages())


INDEX = """# The catalogue

{rules} operators of PyTorch have a rule here, made of {formulas} formulas. {entries} more have none, and
[a reason](without_a_rule.md). These pages are written from the registries when the site is built: what stands here is what runs.

{table}

## How to read it

**Mathematics.** \\(\\mathrm{{d}}A\\) is the tangent of \\(A\\), and \\(g_{{A}}\\), or \\(g\\) where there is one only, its cotangent. \\(A^{{H}}\\) is
the adjoint, \\(\\overline{{a}}\\) the conjugate, \\(\\langle x, y \\rangle\\) the sum of products, \\(\\hat{{x}}\\) the normalized \\(x\\). A product of matrices is a matrix
product; other products are of entries. The cotangent of a complex number is PyTorch's: the gradient with respect to its
conjugate, so that a step against it makes a real loss smaller.

**Operators.** A table has one line for each operator:

- *derivative*: the formula that is bound to each input (vjp) or output (jvp). One function without a name before it, of an operator that acts
  on each element, is its derivative: vjp, jvp and every higher order follow from it. In a formula \\(x\\) is the input
  `self`, \\(y\\) the input `other`, \\(r\\) the result, \\(g\\) the cotangent. Without a jvp one is derived from the vjp.
- *PyTorch's own*: the modes in which PyTorch's derivative is wrong or raises at the samples of the rule, and in brackets the
  versions of torch in which this was measured (`tools/stock.py`; "not measured" where it did not run before the site was built). "Right at samples, not everywhere": it is wrong, nan or
  raises at special inputs, as at zeros, ties or degenerate values, which `tests/derivatives/claims` has. Empty: no
  difference is known. [Coverage](../coverage.md) has the same for the functions that you call.
- *over PyTorch*: what the rule claims. "values": PyTorch is wrong or nan somewhere. "missing": PyTorch raises in some
  mode. "speed": PyTorch is slower. A claim with a version ends with that torch. A rule without a claim is not in a plain
  `override()`. `tests/derivatives/test_claims.py` proves each claim of "values" and "missing".
- *raises*: modes that cannot work, and why. All others of the six modes (reverse, forward, and each over each) are right,
  and tested against finite differences.

**Formulas** are operators themselves: `mg.ops.svd_backward` and `torch.ops.manualgrad.svd_backward`, differentiable in every
mode. `manualgrad show svd_backward` prints one.
"""
WITHOUT = """Each operator of PyTorch has a rule, or is one of these: nothing is left out by accident. To close a gap, write
the rule: [replace a derivative](../replacing.md)."""

if __name__ == "__main__":
    for place, text in pages().items():
        print(f"{place}: {len(text)} characters", file=sys.stderr)
