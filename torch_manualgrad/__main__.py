"""The command line: ``python -m torch_manualgrad list | show | check | coverage | env | composition``.

Exit status: 0 if all is well, 1 if a check failed, 2 if something named does not exist.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_manualgrad as mg

from .core import calls, kernels
from .core.binding import Binding, parameters
from .core.catalogue import KINDS
from .core.names import missing, rules_named
from .core.rule import Rule
from .testing import derivatives_yaml
from .testing.report import table

PROGRAM = "python -m torch_manualgrad"
# What `coverage` says of an entry beside the kinds of the catalogue.
RULE_KINDS = ("rule", "elementwise", "linear")
NOTHING = "nothing"


class Unknown(Exception):
    """Something that was named on the command line does not exist, or is not what is needed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        for name in getattr(options, "modules", ()):
            _module(name)
        return int(options.run(options) or 0)
    except Unknown as error:
        print(f"{PROGRAM} {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=mg.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    importing = argparse.ArgumentParser(add_help=False)
    importing.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module, or FILE.py, that registers rules or formulas; more than once for several",
    )

    one = commands.add_parser("list", help="every rule and every formula", parents=[importing])
    one.set_defaults(run=_list)

    one = commands.add_parser(
        "show", help="a rule or a formula: what it is made of, and its source text", parents=[importing]
    )
    one.add_argument(
        "name", help="an operator or function such as aten::dist, linalg.svd; a formula such as norm_backward"
    )
    one.set_defaults(run=_show)

    one = commands.add_parser(
        "check", help="the derivatives of an operator, in every mode and through every transform", parents=[importing]
    )
    one.add_argument(
        "target",
        metavar="TARGET",
        help="MODULE:OP or FILE.py:OP, an operator, a function or a rule; or what `show` takes, such as aten::dist",
    )
    one.add_argument("--samples", metavar="MODULE:NAME", help="a list of samples, or a function that returns one")
    one.add_argument("--dtype", default="float64", help="of a rule's own samples (default: float64)")
    one.add_argument("--device", default="cpu", help="of a rule's own samples (default: cpu)")
    one.add_argument("--modes", help=f"some of {','.join(mg.testing.MODES)}")
    one.add_argument("--checks", help=f"some of {','.join(mg.testing.ALL_CHECKS)}")
    one.set_defaults(run=_check)

    one = commands.add_parser("coverage", help="what there is for each entry of PyTorch's table of derivatives")
    one.add_argument("--kind", help=f"only entries of one kind: {', '.join([*RULE_KINDS, *KINDS, 'absent', NOTHING])}")
    one.set_defaults(run=_coverage)

    one = commands.add_parser("env", help="versions, and which kernels are loaded")
    one.set_defaults(run=_env)

    one = commands.add_parser("composition", help="an operator through everything in PyTorch, beside plain torch code")
    one.add_argument("target", metavar="MODULE:OP")
    one.add_argument("--reference", metavar="MODULE:NAME", required=True, help="the same function in plain torch code")
    one.add_argument("--samples", metavar="MODULE:NAME", help="samples; the first is used (default: MODULE:samples)")
    one.add_argument("--no-compile", action="store_true", help="leave out what compiles or exports")
    one.set_defaults(run=_composition)
    return parser


# -- list, show -------------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> None:
    lines = [["rule", "kind", "improves", "formulas"]]
    for name, rule in mg.rules.items():
        lines.append([name, rule.kind, ", ".join(rule.improves), ", ".join(f.__name__ for f in rule.formulas)])
    print(table(lines))
    print()
    for reason in mg.rules.absent.values():
        print(f"absent: {reason}\n")
    lines = [["without a rule", "kind", "why"]]
    for entry in mg.catalogue.values():
        lines.append([entry.name, entry.kind, entry.reason or KINDS[entry.kind]])
    print(table(lines))
    print()
    lines = [["formula", "kernels", "what"]]
    for name, formula in mg.ops.items():
        what = (inspect.getdoc(formula.reference) or "").partition("\n")[0]
        lines.append([name, ", ".join(_kernels(formula)), what])
    print(table(lines))


def _show(options: argparse.Namespace) -> None:
    name = options.name
    if name.removeprefix("manualgrad::") in mg.ops:
        _show_formula(mg.ops[name.removeprefix("manualgrad::")])
        return
    full = f"aten::{name.removeprefix('aten::')}".removesuffix(".default")
    if full in mg.catalogue:
        entry = mg.catalogue[full]
        print(f"{entry.kind}  {entry.name}: {entry.reason or KINDS[entry.kind]}")
        return
    found = rules_named(name)
    if not found:
        raise Unknown(f"{missing(name)}; {mg.ops.missing(name)} (`{PROGRAM} list` prints all names)")
    for position, rule in enumerate(found):
        if position:
            print()
        _show_rule(rule)


def _kernels(formula: mg.Formula) -> list[str]:
    compiled = [device for device in formula.kernels if device != "default"]
    return compiled + ["python"] * formula.in_python


def _show_formula(formula: mg.Formula) -> None:
    users = [rule.name for rule in mg.rules.values() if formula in rule.formulas]
    print(f"formula  {formula.__name__}")
    print(f"schema   {formula.signature.schema}")
    print(f"kernels  {', '.join(_kernels(formula)) or 'none: transparent to autograd, vmap and the compiler'}")
    print(f"used by  {', '.join(users) or 'no rule directly'}")
    print(f"written  {_place(formula.reference)}")
    print(f"\n{inspect.getsource(formula.reference).rstrip()}")


def _show_rule(rule: Rule) -> None:
    print(f"rule       {rule.name}")
    print(f"schema     {rule.aten._schema}")
    for what, bound in (("vjp", rule.vjp), ("jvp", rule.jvp)):
        for names, function in bound.items():
            print(f"{what:<11}of {', '.join(names)}: {_binding(function)}")
    if not rule.jvp:
        print("jvp        derived from the vjp by transposition")
    print(f"formulas   {', '.join(f.__name__ for f in rule.formulas) or 'none'}")
    print(f"residuals  {', '.join(rule.residuals) or 'none'}")
    print(f"improves   {', '.join(rule.improves) or 'nothing: override() leaves it off unless it is named'}")
    for ended in _ended(rule):
        print(f"ended      {ended}")
    print(f"source     {rule.source or 'not given'}")
    print(f"forward    {'its own, under override(forward=True)' if rule.forward else 'that of PyTorch'}")
    if rule.not_differentiable:
        print(f"constant   {', '.join(rule.not_differentiable)}")
    for gap, reason in rule.gaps.items():
        print(f"gap        {gap}: {reason}")


def _ended(rule: Rule) -> list[str]:
    """The claims that hold no longer on this torch."""
    return [f"{claim}, since torch {until}" for claim, until in rule.claims.items() if claim not in rule.improves]


def _binding(function: Any) -> str:
    formula = getattr(function, "derivative", function)  # which an elementwise rule wraps
    if isinstance(formula, mg.Formula):
        return formula.__name__
    if isinstance(formula, Binding):
        return repr(formula)
    return f"({', '.join(parameters(function))}) at {_place(function)}"


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(getattr(function, "derivative", function)).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


# -- check ------------------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    chosen: dict[str, Any] = {
        key: value.split(",") for key in ("modes", "checks") if (value := getattr(options, key)) is not None
    }
    for key, known in (("modes", mg.testing.MODES), ("checks", mg.testing.ALL_CHECKS)):
        for name in chosen.get(key, ()):
            if name not in known:
                raise Unknown(f"there is no {key[:-1]} {name!r}; expected some of {','.join(known)}")
    report = mg.testing.Report()
    if "::" in options.target or ":" not in options.target:
        rules = rules_named(options.target)
        if not rules:
            raise Unknown(f"{missing(options.target)}; an operator that has none is given as MODULE:OP")
    else:
        module, op = _load(options.target)
        rules = [op] if isinstance(op, Rule) else []
    for rule in rules:
        samples = _samples(options.samples) if options.samples else _own_samples(rule, options)
        with mg.override(rule):
            report += mg.testing.check(
                rule.probe, samples, name=rule.name, gaps=rule.gaps, raise_on_failure=False, **chosen
            )
    if not rules:
        if not callable(op):
            raise Unknown(f"{options.target} is a {type(op).__name__}, not an operator, a function or a rule")
        if options.samples is None and not hasattr(module, "samples"):
            raise Unknown(f"{module.__name__} has no `samples`; name some with --samples MODULE:NAME")
        samples = _samples(options.samples) if options.samples else _as_list(module.samples, "samples")
        report = mg.testing.check(op, samples, raise_on_failure=False, **chosen)
    print(report)
    print(f"\n{len(report.results)} comparisons, {len(report.failures)} failed")
    return 0 if report else 1


def _own_samples(rule: Rule, options: argparse.Namespace) -> list[Any]:
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Unknown(f"there is no dtype {options.dtype!r}; expected float64, complex128, float32, ...")
    if rule.samples is None:
        raise Unknown(f"{rule.name} has no samples of its own; name some with --samples MODULE:NAME")
    try:
        device = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        raise Unknown(f"device {options.device!r} cannot be used: {str(error).splitlines()[0]}") from None
    samples = list(rule.samples(dtype, device))
    if not samples:
        raise Unknown(f"{rule.name} has no samples of dtype {options.dtype}")
    return samples


def _samples(name: str) -> list[Any]:
    return _as_list(_load(name)[1], name)


def _as_list(found: Any, name: str) -> list[Any]:
    samples = found() if callable(found) else found
    if not isinstance(samples, Iterable) or isinstance(samples, torch.Tensor):
        raise Unknown(
            f"{name} is a {type(samples).__name__}; expected an iterable of samples, or a function that returns one"
        )
    listed = list(samples)
    for sample in listed:
        if not isinstance(sample, (mg.Sample, tuple)):
            raise Unknown(f"{name} has a {type(sample).__name__} among its samples; each is a Sample or a tuple")
    if not listed:
        raise Unknown(f"{name} is empty")
    return listed


def _load(name: str) -> tuple[Any, Any]:
    """(module, object) for ``package.module:attribute`` or ``folder/file.py:attribute``."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise Unknown(f"{name!r} names nothing; expected MODULE:NAME, FILE.py:NAME or the name of a rule")
    module = _module(source)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise Unknown(f"{getattr(found, '__name__', found)} has no {part!r}")
        found = getattr(found, part)
    return module, found


def _module(source: str) -> Any:
    """``package.module`` or ``folder/file.py``, imported."""
    # as `python -m` and `python FILE` do: what lies beside the caller, or beside the file, can be imported
    path = Path(source)
    folder, module_name = (path.resolve().parent, path.stem) if source.endswith(".py") else (Path.cwd(), source)
    if source.endswith(".py") and not path.exists():
        raise Unknown(f"there is no file {source}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise Unknown(f"there is no module {module_name!r}") from None
        raise
    return module


# -- coverage ---------------------------------------------------------------------------------------------------------


def _coverage(options: argparse.Namespace) -> int:
    if not derivatives_yaml.PATH.exists():
        raise Unknown(f"this torch comes without its table of derivatives, {derivatives_yaml.PATH}")
    entries = derivatives_yaml.entries()
    kinds = [entry.kind or NOTHING for entry in entries]
    known = [*RULE_KINDS, *KINDS, "absent", NOTHING]
    if options.kind is not None and options.kind not in known:
        raise Unknown(f"there is no kind {options.kind!r}; expected one of {', '.join(known)}")
    lines = [["operator", "kind", "why"]]
    for entry, kind in zip(entries, kinds):
        if options.kind is None or kind == options.kind:
            lines.append([entry.name, kind, _why(entry)])
    print(table(lines))
    print(f"\n{len(entries)} entries of PyTorch's table of derivatives, torch {torch.__version__}:")
    print(", ".join(f"{kind} {kinds.count(kind)}" for kind in known if kind in kinds))
    return 1 if NOTHING in kinds else 0


def _why(entry: derivatives_yaml.Entry) -> str:
    for name in (entry.name, entry.functional):
        if name in mg.rules:
            return ", ".join(f.__name__ for f in mg.rules[name].formulas)
        if name in mg.catalogue:
            return mg.catalogue[name].reason or KINDS[mg.catalogue[name].kind]
        if name in mg.rules.absent:
            return mg.rules.absent[name]
    return ""


# -- env --------------------------------------------------------------------------------------------------------------


def _env(options: argparse.Namespace) -> None:
    cuda = torch.version.cuda or "none"
    if torch.version.cuda:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        cuda += f", devices: {', '.join(names) or 'none'}"
    for what, value in (
        ("torch_manualgrad", f"{mg.__version__} ({Path(__file__).parent})"),
        ("torch", torch.__version__),
        ("CUDA of torch", cuda),
        ("Python", platform.python_version()),
        ("platform", platform.platform()),
        ("CPU", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("rules, formulas", f"{len(mg.rules)}, {len(mg.ops)}"),
    ):
        print(f"{what:<18}{value}")
    for library in kernels.status():
        state = f"loaded from {library.path}" if library.loaded else f"not loaded: {library.reason}"
        print(f"{f'{library.device} kernels':<18}{state}")
    print(f"{'calls':<18}{'in C++' if calls.loaded() else 'in Python: csrc/calls was not built for this torch'}")
    for reason in mg.rules.absent.values():
        print(f"{'absent':<18}{reason}")
    for rule in mg.rules.values():
        for ended in _ended(rule):
            print(f"{'claim ended':<18}{rule.name}: {ended}")


# -- composition ------------------------------------------------------------------------------------------------------


def _composition(options: argparse.Namespace) -> int:
    _, fn = _load(options.target)
    _, reference = _load(options.reference)
    module = options.target.rpartition(":")[0]
    sample = _samples(options.samples or f"{module}:samples")[0]
    found = mg.testing.composition(fn, reference, sample, compile=not options.no_compile)
    print(found)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
