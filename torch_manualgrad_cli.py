"""The command line, ``manualgrad`` or ``python -m torch_manualgrad``: its commands and options only.

This module is outside of the package, because importing the package imports torch, and ``--help`` does not need torch.
`torch_manualgrad.command_line` does the work of each command. Exit status: 0 if all is well, 1 if a check failed, 2 if
a name does not exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


class _Group(click.Group):
    """A group whose help wraps the descriptions of its commands. Click cuts them off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = 1000  # longer than any description
        lines = [(name, command.get_short_help_str(whole)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torch_manualgrad", message="%(version)s")
def cli() -> None:
    """PyTorch's hand-written derivatives: list, show, explain and check them."""


def _command(*imports: Command) -> Callable[[Command], Command]:
    """Define a command that returns an `Answer`, with ``--json``, and with ``--import`` if ``_importing`` is given."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def run(as_json: bool, **options: Any) -> None:
            from torch_manualgrad.command_line.targets import import_module

            for name in options.pop("modules", ()):
                import_module(name)
            answer = function(**options)
            answer.print(as_json=as_json)
            click.get_current_context().exit(answer.status)

        with_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
        decorated = with_json(run)
        for extra in imports:
            decorated = extra(decorated)
        made: Command = cli.command()(decorated)
        return made

    return decorate


_importing = click.option(
    "--import",
    "modules",
    metavar="MODULE",
    multiple=True,
    help="A module, or FILE.py, that registers rules or formulas. May be given several times.",
)


@_command(_importing)
@click.argument("name", required=False)
@click.option(
    "--all", "everything", is_flag=True, help="Each operator without a rule, instead of their number by kind."
)
def list(name: str | None, everything: bool) -> Any:
    """List rules, operators without one, and formulas, sorted by name.

    With NAME only those whose names contain it, and the rules of the function of that name.
    """
    from torch_manualgrad.command_line import registry

    return registry.list_all(name, everything=everything)


@_command(_importing)
@click.argument("name")
def show(name: str) -> Any:
    """Show the parts of a rule or a formula, and its source text.

    NAME is an operator or a function, such as aten::dist or linalg.svd, or a formula, such as norm_backward.
    """
    from torch_manualgrad.command_line import registry

    return registry.show(name)


@_command(_importing)
@click.argument("name", metavar="OP")
@click.option("--samples", metavar="MODULE:NAME", help="A list of samples, or a function that returns one.")
@click.option("--dtype", default="float64", show_default=True, help="The dtype of a rule's own samples.")
def explain(name: str, samples: str | None, dtype: str) -> Any:
    """Explain what happens when OP is differentiated here.

    Prints the rule that serves it, whether a call runs in PyTorch, C++ or Python, the bytes that are saved for the
    backward next to PyTorch's, and the kernels that run on the rule's own samples.
    """
    from torch_manualgrad.command_line import explaining

    return explaining.explain(name, samples, dtype)


@_command(_importing)
@click.argument("target")
@click.option("--samples", metavar="MODULE:NAME", help="A list of samples, or a function that returns one.")
@click.option("--dtype", default="float64", show_default=True, help="The dtype of a rule's own samples.")
@click.option("--device", default="cpu", show_default=True, help="The device of a rule's own samples.")
@click.option("--modes", help="Some of rev,fwd,rev-rev,fwd-rev,fwd-fwd,rev-fwd.")
@click.option("--checks", help="Some of the checks other than modes, such as duality,vmap,compiled.")
@click.option("--fast", is_flag=True, help="Only reverse, forward and rev-rev mode, and the cheap checks.")
@click.option("--junit", metavar="FILE", help="Write the results to a JUnit file too.")
def check(target: str, samples: str | None, dtype: str, device: str, junit: str | None, **chosen: Any) -> Any:
    """Check the derivatives of TARGET in every mode and through every transform.

    TARGET is MODULE:OP or FILE.py:OP, an operator, a function or a rule, or what `show` takes, such as aten::dist.
    """
    from torch_manualgrad.command_line import checking

    return checking.check(target, samples, dtype=dtype, device=device, junit=junit, **chosen)


@_command()
@click.argument("target", metavar="MODULE:OP")
@click.option("--reference", metavar="MODULE:NAME", required=True, help="The same function in plain torch code.")
@click.option(
    "--samples", metavar="MODULE:NAME", help="A list of samples, of which the first is used.  [default: MODULE:samples]"
)
@click.option("--compile/--no-compile", default=True, help="Whether to include what compiles or exports.")
def composition(target: str, reference: str, samples: str | None, compile: bool) -> Any:
    """Run an operator through PyTorch's transforms and engines, and compare it with plain torch code."""
    from torch_manualgrad.command_line import checking

    return checking.composition(target, reference, samples, compile=compile)


@_command(_importing)
@click.option("--kind", help="Only entries of one kind: rule, elementwise, linear, view, gap, ...")
def coverage(kind: str | None) -> Any:
    """List each entry of PyTorch's table of derivatives, and what replaces it here."""
    from torch_manualgrad.command_line import coverage

    return coverage.coverage(kind)


@_command()
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option("--limit", default=6, show_default=True, help="The number of samples of each variant.")
@click.option("--workers", type=int, help="The number of processes.  [default: all cores]")
def conformance(names: tuple[str, ...], limit: int, workers: int | None) -> Any:
    """Compare PyTorch's and our derivatives over PyTorch's operator database, in six modes.

    OP is a name of the database, such as linalg.det; without any, all are measured (an hour).
    """
    from torch_manualgrad.command_line import coverage

    return coverage.conformance(names, limit, workers)


@_command()
@click.option(
    "--compiled",
    is_flag=True,
    help="List the graphs of the compiler backend instead, and the calls that stay uncompiled.",
)
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def audit(script: str, arguments: tuple[str, ...], compiled: bool) -> Any:
    """Run a Python file or module, and list every operator that it differentiates.

    Prints for each operator the modes, the source line, whether PyTorch's derivative is known to be wrong there, the
    override to use, and its cost. With --compiled, it prints each graph that backend="manualgrad" compiles, its
    derivatives, the bytes that they save, and the calls that run uncompiled, with the reason. ARGUMENTS are for the
    script; put -- before those that begin with a dash.
    """
    from torch_manualgrad.command_line import auditing

    return auditing.audit(script, arguments, compiled=compiled)


@_command()
def env() -> Any:
    """Print versions, and which kernels are loaded."""
    from torch_manualgrad.command_line import environment

    return environment.environment()


def main() -> None:
    """The console script."""
    cli(prog_name="manualgrad")
