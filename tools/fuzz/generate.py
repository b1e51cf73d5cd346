"""Makes a random program out of entries of the pool, running each line as it is added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.internals import pytree
from torch_manualgrad.testing.comparison.problem import seed_generators
from torch_manualgrad.testing.inputs import tree
from torch_manualgrad.testing.numerics.arithmetic import magnitude

from . import pool
from .program import Line, Program

#: No tensor of a program has more elements, and none has numbers far from one: differences of them would be rounded.
LARGEST, FAR = 128, 20.0
#: The probability of a line that does not fit the values so far.
TRIES = 12
#: How far from those of a sample a rule's arguments are, relative, where larger distances fit less often; 1: anywhere.
REACHES = (1, 0.3, 0.3, 0.05, 0.05, 0.01)
SHAPES = ([], [1], [3], [4], [2, 3], [3, 3], [3, 2], [1, 4], [2, 2], [2, 3, 2], [2, 1, 3], [2, 2, 2, 2])

#: Views that PyTorch does not differentiate once they are written to, or whose elements share memory.
UNWRITABLE = ("expand", "unfold", "chunk", "split", "unbind", "tensor_split")
#: The weights of the kinds of lines.
SHARES = {"rule": 45, "view": 15, "function": 18, "join": 12, "write": 10}
#: Words of errors about writes that PyTorch refuses to differentiate in every mode.
REFUSED_WRITES = ("modified by an inplace operation", "modified inplace", "is being used in an in-place operation")


class Unfit(Exception):
    """A line that cannot be here."""


class Maker:
    """A program that grows."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.inputs: dict[str, Tensor] = {}
        self.constants: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.lines: list[Line] = []
        self.values: dict[str, Tensor] = {}
        #: what no later line picks: sparse tensors, and those of single precision
        self.others: dict[str, Tensor] = {}
        #: what was written to
        self.written: set[str] = set()
        self.count = 0

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def input(self) -> None:
        shape, name = self.rng.choice(SHAPES), self.name("x")
        dtype = torch.complex128 if self.rng.random() < 0.2 else torch.float64
        self.inputs[name] = self.values[name] = torch.randn(shape, dtype=dtype, generator=self.generator)

    def constant(self, value: Any, origin: str = "") -> str:
        name = self.name("c")
        self.constants[name] = value
        if origin and isinstance(value, Tensor) and value.layout is not torch.strided:
            self.origins[name] = origin
        return name

    def pick(self, fits: Any = None) -> str:
        """The name of a value; the later ones are likelier."""
        names = [n for n, x in self.values.items() if fits is None or fits(x)]
        if not names:
            raise Unfit
        return names[max(self.rng.randrange(len(names)), self.rng.randrange(len(names)))]

    # lines -----------------------------------------------------------------------------------------------------------

    def add(self, template: str, uses: Sequence[str], operator: str = "") -> list[str]:
        """Run a line and keep it.

        Returns:
            The names of the results that can be differentiated.

        Raises:
            Unfit: it raises, or its results are of no use.
        """
        known = {**self.values, **self.others, **self.constants}
        arguments = {u: known[u] for u in uses}
        single = Program(arguments, {}, (Line(("r",), template, tuple(uses)),), ("r",))
        try:
            seed_generators(0)
            with torch.no_grad():
                (result,) = single.function(*arguments.values())
        except Exception as error:
            raise Unfit(str(error)) from error
        flat = tree.tensors(result)
        if not flat or sum(x.numel() for x in flat) > LARGEST or any(not x.numel() for x in flat):
            raise Unfit("size")
        if all(x.layout is not torch.strided for x in flat):
            return self.add(f"{template}.to_dense()", uses, operator)
        if "_ex" in operator and flat[-1].dtype is torch.int32 and bool(flat[-1].any()):
            raise Unfit("a factorization that failed")
        direct = isinstance(result, Tensor)
        if not direct and not (type(result) is tuple and all(isinstance(x, Tensor) for x in result)):
            template = f"tensors({template})"
        targets, found = [], []
        for x in flat:
            if not tree.is_differentiable(x):
                targets.append("_")
                continue
            if x.layout is not torch.strided:
                raise Unfit("sparse")
            if not bool(x.isfinite().all()) or x.dtype not in (torch.float64, torch.complex128, torch.float32):
                raise Unfit("numbers")
            targets.append(self.name("v"))
            found.append((targets[-1], x))
        if not found:
            raise Unfit("nothing to differentiate")
        names = tuple(targets) if direct or len(targets) > 1 else (targets[0], "*_")
        self.lines.append(Line(names, template, tuple(uses), operator))
        for name, x in found:
            (self.others if x.dtype is torch.float32 else self.values)[name] = x
        return [self.tame(name) for name, _ in found]

    def tame(self, name: str) -> str:
        """The value, or a small multiple of it where its numbers are large; in double precision."""
        if name in self.others:
            (name,) = self.add("{0}.double()", [name])
        largest = float(self.values[name].abs().max())
        if largest > FAR:
            (name,) = self.add(f"{{0}} * {10 ** -math.ceil(math.log10(largest)):g}", [name])
        return name

    def fitted(self, name: str, like: Tensor) -> str:
        """An expression of {} with the shape and dtype of a tensor."""
        x, rng = self.values[name], self.rng
        text, n = "{}", like.numel()
        if not x.numel():
            raise Unfit
        if x.shape != like.shape:
            if x.numel() == n:
                text += f".reshape({list(like.shape)})"
            elif x.numel() > n:
                start = rng.randrange(x.numel() - n + 1)
                text += f".reshape(-1)[{start}:{start + n}].reshape({list(like.shape)})"
            elif x.numel() == 1 and rng.random() < 0.5:
                text += f".reshape({[1] * like.dim()}).expand({list(like.shape)})"
            else:
                text += f".reshape(-1)[[{', '.join(str(i % x.numel()) for i in range(n))}]].reshape({list(like.shape)})"
        if x.is_complex() and not like.is_complex():
            text += rng.choice([".real", ".imag"])
        if like.is_complex() and not x.is_complex():
            text = f"({text} * (1 + 0.5j))"
        return text

    def argument(self, like: Tensor, origin: str, reach: float) -> str:
        """The name of a value for an argument: one of the values so far, or near to the sample's, a function of these."""
        name = self.pick()
        if like.layout is not torch.strided:  # of the same pattern, as products with zeros
            (found,) = self.add_plain(
                f"({{1}} * (1 + {min(reach, 0.3)} * torch.sin({self.fitted(name, like)}))).to_sparse(layout={like.layout})".replace(
                    "{}", "{0}"
                ),
                [name, self.constant(like.to_dense())],
            )
            return found
        x = self.values[name]
        if reach == 1 and x.shape == like.shape and x.dtype == like.dtype:
            return name
        text = self.fitted(name, like).replace("{}", "{0}")
        bounded = f"{text} / (1 + ({text} * {text}.conj()).real)" if like.is_complex() else f"torch.sin({text})"
        size = magnitude(like)
        middle = self.constant(like, origin)
        (found,) = self.add_plain(f"{{1}} + {reach * size:.2g} * {bounded}", [name, middle])
        if like.dtype is torch.float32:
            (found,) = self.add_plain("{0}.float()", [found])
        return found

    def add_plain(self, template: str, uses: Sequence[str]) -> list[str]:
        """A line whose result is kept as it is."""
        known = {**self.values, **self.others, **self.constants}
        single = Program({u: known[u] for u in uses}, {}, (Line(("r",), template, tuple(uses)),), ("r",))
        with torch.no_grad():
            (x,) = single.function(*single.inputs.values())
        if not x.numel():
            raise Unfit("size")
        name = self.name("v")
        self.lines.append(Line((name,), template, tuple(uses)))
        usual = x.layout is torch.strided and x.dtype in (torch.float64, torch.complex128)
        (self.values if usual else self.others)[name] = x
        return [name]

    # entries ---------------------------------------------------------------------------------------------------------

    def attempt(self, entry: str) -> bool:
        """Add lines for an entry of the pool; whether it went."""
        kind, _, name = entry.partition(": ")
        steps = {"view": self.view, "function": self.function, "join": self.join, "write": self.write}
        for i in range(TRIES):
            kept = (list(self.lines), dict(self.values), dict(self.constants))
            try:
                if name:
                    steps[kind](name, entry)
                else:
                    self.rule(entry, REACHES[i // 2])
                return True
            except Unfit:
                self.lines, self.values, self.constants = kept
        return False

    def rule(self, entry: str, reach: float) -> None:
        rng = self.rng
        samples = pool.calls(entry)
        if not samples:
            raise Unfit
        call = rng.choice(samples)
        reach = min(reach, 0.3) if entry in pool.NEAR_SAMPLES else reach
        moved = [i for i in call.moving if rng.random() < 0.75] or [rng.choice(call.moving)]
        texts, uses = [], []

        def use(name: str) -> str:
            uses.append(name)
            return f"{{{len(uses) - 1}}}"

        for i, x in enumerate(call.leaves):
            if i in moved:
                texts.append(use(self.argument(x, call.origins[i], reach)))
            elif isinstance(x, (int, float, bool, str, type(None), torch.dtype, torch.layout)):
                texts.append(repr(x))
            else:
                texts.append(use(self.constant(x, call.origins[i])))
        args, kwargs = pytree.tree_unflatten([Text(t) for t in texts], call.spec)
        written = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
        if call.in_place and 0 in moved and rng.random() < 0.3:
            return self.in_place(call, written, uses, entry)
        self.add(f"{call.function}({', '.join(written)})", uses, entry)

    def in_place(self, call: pool.Call, written: list[str], uses: list[str], entry: str) -> None:
        """Write the result into a copy of the first argument, or into a part of a larger tensor."""
        rng = self.rng
        whole = rng.random() < 0.5
        base = self.name("v")
        self.lines.append(Line((base,), "{0}.clone()" if whole else "torch.stack([{0}, {0}.sin()])", (uses[0],)))
        x = self.values.get(uses[0])
        if x is None:
            raise Unfit
        self.values[base] = x.clone() if whole else torch.stack([x, x.sin()])
        target = "{0}" if whole else "{0}[0]"
        rest = written[1:]
        # another argument may be the same memory
        alias = rng.random() < 0.25 and len(rest) > 0 and rest[0].startswith("{")
        if alias:
            rest[0] = target
        arguments = ", ".join([target, *rest])
        before = self.values[base].clone()
        names = [base, *uses[1:]]
        self.written.add(base)
        results = self.add(f"{call.in_place}({arguments})", names, entry)
        if any(self.values[n].shape != x.shape for n in results):  # PyTorch's addbmm_ makes a view larger
            raise Unfit
        if not bool(self.values[base].isfinite().all()) or self.values[base].shape != before.shape:
            raise Unfit

    def view(self, name: str, entry: str) -> None:
        self.templated(pool.VIEWS[name], [self.pick()], entry)

    def function(self, name: str, entry: str) -> None:
        self.templated(pool.FUNCTIONS[name], [self.pick()], entry)

    def join(self, name: str, entry: str) -> None:
        first = self.pick()
        self.templated(pool.JOINS[name], [first, self.partner(first)], entry)

    def templated(self, template: pool.Template, uses: list[str], entry: str) -> None:
        text = template(self.rng, self.values[uses[0]])
        if text is None:
            raise Unfit
        self.add(text, uses, entry)

    def partner(self, first: str) -> str:
        """A value of the same shape and dtype."""
        x = self.values[first]
        other = self.pick()
        if self.values[other].shape == x.shape and self.values[other].dtype == x.dtype:
            return other
        text = self.fitted(other, x)
        return self.add_plain(text.replace("{}", "{0}"), [other])[0]

    def write(self, name: str, entry: str) -> None:
        """Write to a result, to a copy, or to a view of one, and go on with what was written to."""
        rng = self.rng
        base = self.pick()
        second = self.partner(base)
        if base in self.inputs or rng.random() < 0.6:
            fresh = rng.choice(["{0}.clone()", "{0} * 1.0", "{0} + 0.1"])
            (base,) = self.add_plain(fresh, [base])
        target, x = base, self.values[base]
        if rng.random() < 0.5:
            view = rng.choice(list(pool.VIEWS))
            text = pool.VIEWS[view](rng, x)
            if text is None or view in UNWRITABLE:
                raise Unfit
            (target,) = self.add_plain(text, [base])
            if self.values[target].untyped_storage().data_ptr() != self.values[base].untyped_storage().data_ptr():
                raise Unfit
            second = self.partner(target)
        text = pool.WRITES[name](rng, self.values[target])
        if text is None:
            raise Unfit
        known = self.values
        line = Line((), text, (target, second), entry)
        single = Program({u: known[u] for u in line.uses}, {}, (line,), (target,))
        try:
            with torch.no_grad():
                single.function(*single.inputs.values())
        except Exception as error:
            raise Unfit(str(error)) from error
        for n in (base, target):
            if not bool(known[n].isfinite().all()) or not bool((known[n].abs() <= FAR).all()):
                raise Unfit
        self.lines.append(line)
        self.written |= {base, target}

    def finished(self) -> Program:
        """All results that nothing uses are returned, and what was written to."""
        used = {u for line in self.lines for u in line.uses} - self.written
        results = [t for line in self.lines for t in line.targets if t in self.values]
        outputs = [t for t in results if t not in used] or results[-1:]
        program = Program(dict(self.inputs), self.constants, tuple(self.lines), tuple(outputs), self.origins)
        return program.pruned()


class Text(str):
    """A piece of a program among the arguments of a call."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def generate(
    seed: int, number: int, entries: Sequence[str] | None = None, wanted: Sequence[str] | None = None
) -> Program:
    """The program of this number: the same for the same seed.

    Args:
        seed: of the run.
        number: of the program. Each has an entry of its own, one after the other, so that programs reach all of them.
        entries: of the pool; all of them by default.
        wanted: those that are first in turn; all by default.
    """
    entries = pool.names() if entries is None else entries
    wanted = list(entries if wanted is None else wanted)
    Random(seed).shuffle(wanted)
    kinds: dict[str, list[str]] = {}
    for entry in entries:
        kinds.setdefault(entry.partition(": ")[0] if ": " in entry else "rule", []).append(entry)
    for i in range(TRIES):
        program = _made(Random(f"{seed}:{number}:{i}"), wanted[number % len(wanted)], kinds)
        if not _is_refused(program):
            break
    return program


def _made(rng: Random, entry: str, kinds: dict[str, list[str]]) -> Program:
    maker = Maker(rng)
    for _ in range(rng.randint(1, 3)):
        maker.input()
    length = rng.randint(3, 10)
    first = rng.randrange(length)
    done = 0
    for i in range(3 * length):
        if done >= length:
            break
        if i == first:
            done += maker.attempt(entry)
        else:
            (kind,) = rng.choices(list(kinds), [SHARES[k] for k in kinds])
            done += maker.attempt(rng.choice(kinds[kind]))
    return maker.finished()


def _is_refused(program: Program) -> bool:
    """Whether PyTorch refuses what the program writes."""
    try:
        inputs = [x.clone().requires_grad_() for x in program.inputs.values()]
        outputs = [y for y in program.function(*inputs) if y.requires_grad]
        torch.autograd.grad([y.abs().sum() for y in outputs], inputs, allow_unused=True)
        if any(line.writes for line in program.lines):
            _differentiate_all(program)
    except RuntimeError as error:
        return any(words in str(error) for words in REFUSED_WRITES)
    return not outputs


def _differentiate_all(program: Program) -> None:
    """Differentiate it by all that depends on the inputs and has no graph in PyTorch, too: an override may give it one."""
    leaves = [x.clone().requires_grad_() for x in program.inputs.values()]
    known: dict[str, Any] = {**program.constants, **dict(zip(program.inputs, leaves))}
    depends = set(program.inputs)
    probe = replace(program, lines=(), outputs=())
    for line in program.lines:
        names = line.results or line.uses[:1]
        part = replace(probe, inputs={u: known[u] for u in line.uses}, lines=(line,), outputs=names)
        known.update(zip(names, part.function(*part.inputs.values())))
        if depends.isdisjoint(line.uses):
            continue
        depends.update(names)
        for name in names:
            x = known[name]
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and not x.requires_grad:
                leaves.append(x.detach().requires_grad_())
                known[name] = leaves[-1].clone()
    outputs = [known[name].abs().sum() for name in program.outputs if known[name].requires_grad]
    torch.autograd.grad(outputs, leaves, allow_unused=True)
