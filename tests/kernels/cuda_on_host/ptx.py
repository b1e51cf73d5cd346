"""Interprets nvcc's PTX: a block of threads at a time, each instruction for all threads that are at it, with numpy.

It reads and writes the memory of its process, but what it writes it keeps in a dict, and reads back from there. It knows the
instructions of kernels of a single block or of blocks that do not wait for each other; any other raises. Address spaces are
apart: `ld.shared` of a global address is an error.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
#: As in setup.py, without the linker's part.
FLAGS = ["-ptx", "-arch=compute_75", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-fmad=false", "-DUSE_CUDA"]
FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]

# Where the arguments of a kernel lie, in their space. Global memory is that of the process, and never here.
PARAMETERS = 1 << 62
WARP = 32
# Of a thread that waits until other threads come to the same instruction.
MEETINGS = ("bar", "barrier", "shfl")

Bits = np.ndarray


class Fault(Exception):
    """A kernel does something illegal, or the interpreter does not know an instruction."""


# -- text -------------------------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    guard: str | None
    unless: bool
    name: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


@dataclass
class Function:
    """An entry, or a function that one calls."""

    name: str
    parameters: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # where arrays start; "": the size of all
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def compiled(source: Path, target: Path, includes: Sequence[str], nvcc: str) -> Path:
    command = [nvcc, *FLAGS, *includes, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    return target


def demangled(names: Sequence[str]) -> list[str]:
    """Without anonymous namespaces, which compilers name differently."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [
        line.replace("(anonymous namespace)::", "").replace("unsigned char", "bool")
        for line in done.stdout.splitlines()
    ]


_HEAD = re.compile(
    r"^(?:\.visible )?\.(entry|func)\s+(?:\([^)]*\)\s*)?(\w+)\s*\((.*?)\)\s*(?:\.\w+[^{;]*)?([{;])", re.S | re.M
)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.([a-z]\d+) (\w+)(?:\[(\d+)\])?")
_DECLARED = re.compile(r"\.reg \.(\w+)\s+(%?\w+)(?:<(\d+)>)?;")
_SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];")


def functions(text: str) -> dict[str, Function]:
    """By their names in the text."""
    text = re.sub(r"//[^\n]*", "", text)
    found: dict[str, Function] = {}
    for head in _HEAD.finditer(text):
        kind, name, parameters, opened = head.groups()
        if opened == ";":
            continue
        end = _end(text, head.end())
        found[name] = _function(name, text[head.start() : head.end()], text[head.end() : end])
        for array in re.findall(r"\.extern \.shared \.align 16 \.b8 (\w+)\[\]", text):  # what a launch asks for
            found[name].shared[array] = found[name].shared[""]
    return found


def _end(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise Fault("a function without an end")


def _function(name: str, head: str, body: str) -> Function:
    made = Function(name)
    for kind, parameter, count in _PARAMETER.findall(head):
        made.parameters.append(parameter)
        made.sizes.append(int(count) if count else int(kind[1:]) // 8)
    at = 0
    for align, array, size in _SHARED.findall(body):
        at = -(-at // int(align)) * int(align)
        made.shared[array] = at
        at += int(size)
    made.shared[""] = -(-at // 16) * 16
    for kind, register, count in _DECLARED.findall(body):
        for one in range(int(count)) if count else [None]:
            made.registers[register if one is None else f"{register}{one}"] = kind
    # scopes, whose names do not meet: not the braces around registers
    body = re.sub(r"\{(?=\s*[.a-z@])|(?<=;)[\s}]*\}", "\n", body)
    body = re.sub(r"(?m)^\s*\.(reg|param|shared|local|pragma|loc)\b[^;]*;", "", body)
    for piece in re.split(r";|(?<=:)\s*\n", body):
        piece = " ".join(piece.split())
        while label := re.match(r"(\$\w+):\s*", piece):
            made.labels[label[1]] = len(made.code)
            piece = piece[label.end() :]
        if piece:
            made.code.append(_instruction(piece))
    return made


def _instruction(text: str) -> Instruction:
    guard, unless, rest = None, False, text
    if found := re.match(r"@(!?)(%\w+)\s+", text):
        guard, unless, rest = found[2], bool(found[1]), text[found.end() :]
    name, _, operands = rest.partition(" ")
    split = re.findall(r"\{[^}]*\}|\([^)]*\)|\[[^\]]*\]|[^,\s]+", operands)
    kind, *parts = name.split(".")
    return Instruction(guard, unless, kind, tuple(parts), tuple(split), text)


# -- arithmetic -------------------------------------------------------------------------------------------------------

_KINDS = {"u": "uint", "s": "int", "f": "float", "b": "uint"}


def dtype(kind: str) -> Any:
    return np.dtype(bool) if kind == "pred" else np.dtype(f"{_KINDS[kind[0]]}{kind[1:]}")


def _divided(a: Bits, b: Bits) -> Bits:
    """Integers, towards zero."""
    if (b == 0).any():
        raise Fault("a division by zero")
    if a.dtype.kind == "u":
        return a // b
    found = np.abs(a.astype(object)) // np.abs(b.astype(object))
    return np.where((a < 0) != (b < 0), -found, found).astype(a.dtype)


def _fused(a: Bits, b: Bits, c: Bits) -> Bits:
    """With one rounding."""
    if a.dtype != np.float64:
        raise Fault("fma of other numbers than f64")
    found = a * b + c  # right if it is not finite, and for the sign of an exact zero
    for i in np.flatnonzero(np.isfinite(a * b) & np.isfinite(c)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        found[i] = float(exact) if exact else found[i]
    return found


def shifted(x: Bits, by: Bits, left: bool) -> Bits:
    width = x.dtype.itemsize * 8
    by = by.astype(np.uint64)
    kept = np.minimum(by, width - 1).astype(x.dtype)
    found = x << kept if left else x >> kept
    if left or x.dtype.kind == "u":
        found = np.where(by >= width, x.dtype.type(0), found)
    return found


_BINARY: dict[str, Callable[[Bits, Bits], Bits]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": lambda a, b: np.fmin(a, b),
    "max": lambda a, b: np.fmax(a, b),
}
_COMPARED: dict[str, Callable[[Bits, Bits], Bits]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def compared(how: str, a: Bits, b: Bits) -> Bits:
    if a.dtype.kind != "f":
        return _COMPARED[how](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if how in ("num", "nan"):
        return unordered == (how == "nan")
    if how in _COMPARED:  # false of nan, ne too
        return _COMPARED[how](a, b) & ~unordered
    return _COMPARED[how.removesuffix("u")](a, b) | unordered


def computed(name: str, parts: Sequence[str], a: Sequence[Bits]) -> Bits:
    """Of operands of the instruction's type."""
    if (
        name in ("add", "sub", "mul", "div", "sqrt", "rcp")
        and a[0].dtype.kind == "f"
        and parts[0] not in ("rn", "approx")
    ):
        raise Fault(f"{name}.{'.'.join(parts)} does not say how to round, or not to the nearest")
    if name in _BINARY:
        return _BINARY[name](*a)
    kind = a[0].dtype
    match name:
        case "mul" if kind.kind == "f" or parts[0] == "lo":
            return a[0] * a[1]
        case "mul" if parts[0] == "wide":
            wider = np.dtype(f"{kind.name.rstrip('0123456789')}{kind.itemsize * 16}")
            return a[0].astype(wider) * a[1].astype(wider)
        case "mul" if parts[0] == "hi":
            return (a[0].astype(object) * a[1].astype(object) >> kind.itemsize * 8).astype(kind)
        case "mad" if parts[0] == "lo":
            return a[0] * a[1] + a[2]
        case "fma" if parts[0] == "rn":
            return _fused(*a)
        case "div":
            return a[0] / a[1] if kind.kind == "f" else _divided(*a)
        case "rem":
            return a[0] - _divided(*a) * a[1]
        case "sqrt":
            return np.sqrt(a[0])
        case "rcp" if parts[0] == "rn":
            return 1 / a[0]
        case "rcp":  # to 20 bits, as the processor's
            return ((1 / a[0]).view(np.uint64) >> np.uint64(32) << np.uint64(32)).view(np.float64)
        case "neg":
            return -a[0]
        case "abs":
            return np.abs(a[0])
        case "not":
            return ~a[0]
        case "selp":
            return np.where(a[2], a[0], a[1])
        case "bfi":
            return _inserted(*a)
    raise Fault(f"an unknown instruction: {name}.{'.'.join(parts)}")


def _inserted(bits: Bits, into: Bits, at: Bits, count: Bits) -> Bits:
    mask = (np.left_shift(1, count.astype(object)) - 1) << at.astype(object)
    return ((into.astype(object) & ~mask) | ((bits.astype(object) << at.astype(object)) & mask)).astype(into.dtype)


def converted(parts: Sequence[str], x: Bits) -> Bits:
    """``cvt``: its last two parts are the types, the first how to round."""
    to = dtype(parts[-2])
    if x.dtype.kind == "f" and to.kind == "f" and parts[0] == "rzi":
        return np.trunc(x).astype(to)
    if x.dtype.kind == "f" and to.kind != "f" or len(parts) > 2 and parts[0] != "rn":
        raise Fault(f"an unknown conversion: cvt.{'.'.join(parts)}")
    return x.astype(to)


# -- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """That of the process, as a kernel sees it after its own writes."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}  # byte by byte
        self.numbers: dict[int, np.dtype] = {}  # where a number was written, and of what type

    def load(self, address: int, size: int) -> bytes:
        if not 1 << 16 <= address < 1 << 48:
            raise Fault(f"no address of global memory: {address:#x}")
        found = bytearray(ctypes.string_at(address, size))
        for i in range(size):
            if address + i in self.written:
                found[i] = self.written[address + i]
        return bytes(found)

    def store(self, address: int, value: bytes, kind: np.dtype) -> None:
        self.load(address, len(value))  # or raises
        self.numbers[address] = kind
        for i, byte in enumerate(value):
            self.written[address + i] = byte


# -- threads ----------------------------------------------------------------------------------------------------------


class Block:
    """The threads of one block in a function."""

    def __init__(self, module: dict[str, Function], function: Function, special: dict[str, Any], memory: Memory,
                 arguments: bytes, places: dict[str, int], shared: bytearray) -> None:  # fmt: skip
        self.module, self.function, self.special, self.memory = module, function, special, memory
        self.arguments, self.places, self.shared = arguments, places, shared
        self.threads = len(special["%tid.x"])
        self.registers = {
            name: np.zeros(self.threads, bool if kind == "pred" else f"u{int(kind[1:]) // 8}")
            for name, kind in function.registers.items()
        }
        self.passed: dict[str, Bits] = {}  # to and from a function that is called
        self.at = np.zeros(self.threads, np.int64)
        self.waits = np.zeros(self.threads, bool)
        self.left = np.zeros(self.threads, bool)

    def run(self, among: Bits | None = None) -> None:
        """All threads, or those with these numbers. Those that are furthest behind run: so the others wait where paths meet."""
        if among is not None:
            self.left[:] = True
            self.left[among] = False
        code = self.function.code
        while not self.left.all():
            able = ~(self.left | self.waits)
            if not able.any():
                self._meet()
                continue
            place = int(self.at[able].min())
            if place == len(code):
                self.left |= able & (self.at == place)
                continue
            self._step(code[place], np.flatnonzero(able & (self.at == place)))

    def _step(self, one: Instruction, threads: Bits) -> None:
        self.at[threads] += 1
        if one.guard is not None:
            threads = threads[self.registers[one.guard][threads] != one.unless]
            if not len(threads):
                return
        if one.name in MEETINGS:
            self.at[threads] -= 1
            self.waits[threads] = True
        elif one.name == "bra":
            self.at[threads] = self.function.labels[one.operands[0]]
        elif one.name in ("ret", "exit"):
            self.left[threads] = True
        else:
            try:
                self._execute(one, threads)
            except Fault as fault:
                raise Fault(f"{fault}, in: {one.text}") from None

    def _meet(self) -> None:
        """Threads that wait for each other go on: those of a warp first."""
        waiting = np.flatnonzero(self.waits)
        instructions = [self.function.code[int(place)] for place in self.at[waiting]]
        of_warps = [i for i, one in enumerate(instructions) if one.name == "shfl" or one.parts[:1] == ("warp",)]
        one = instructions[of_warps[0] if of_warps else 0]
        if of_warps:
            first = waiting[of_warps[0]]
            lanes = waiting[(waiting // WARP == first // WARP) & (self.at[waiting] == self.at[first])]
            masks = self._value(one.operands[-1], "b32", lanes)
            lanes = lanes[masks == masks[0]]
            if int(masks[0]) != sum(1 << int(lane) % WARP for lane in lanes):
                raise Fault(f"not all lanes of the mask come to one instruction: {one.text}")
            if one.name == "shfl":
                self._shuffle(one, lanes)
            self.waits[lanes] = False
            self.at[lanes] += 1
            return
        if len(set(self.at[waiting])) > 1 or self.left.any():
            raise Fault(f"not all threads come to one barrier: {one.text}")
        if one.parts[:1] == ("red",):
            if one.parts != ("red", "or", "pred") or one.operands[1] != "0":
                raise Fault(f"an unknown barrier: {one.text}")
            self.registers[one.operands[0]][:] = self.registers[one.operands[2]].any()
        elif one.operands != ("0",):
            raise Fault(f"an unknown barrier: {one.text}")
        self.waits[:] = False
        self.at[waiting] += 1

    def _shuffle(self, one: Instruction, lanes: Bits) -> None:
        into, value, step, clamp, _ = one.operands
        if one.parts != ("sync", "bfly", "b32") or set(self._value(clamp, "b32", lanes)) != {31}:
            raise Fault(f"an unknown shuffle: {one.text}")
        into, _, valid = into.partition("|")
        whole = np.zeros(self.threads, np.uint32)
        whole[lanes] = self._value(value, "b32", lanes)
        self.registers[into][lanes] = whole[lanes ^ self._value(step, "b32", lanes).astype(np.int64)]
        if valid:
            self.registers[valid][lanes] = True

    # -- operands

    def _value(self, operand: str, kind: str, threads: Bits) -> Bits:
        wanted = dtype(kind)
        if operand.startswith("{"):  # the halves of a number, the lower one first
            low, high = (self._value(x, f"u{wanted.itemsize * 4}", threads) for x in re.findall(r"[%\w]+", operand))
            wide = np.dtype(f"u{wanted.itemsize}")
            return (low.astype(wide) | high.astype(wide) << wide.type(wanted.itemsize * 4)).view(wanted)
        if operand in self.registers:
            found = self.registers[operand][threads]
        elif operand in self.special:
            found = np.asarray(self.special[operand], np.uint32)[threads] if operand == "%tid.x" else np.full(
                len(threads), self.special[operand], np.uint32
            )  # fmt: skip
        elif found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", operand):
            bits = np.full(len(threads), int(found[1], 16), f"u{len(found[1]) // 2}")
            return bits.view(f"f{bits.itemsize}").astype(wanted) if wanted.kind == "f" else bits.view(wanted)
        elif re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+", operand):
            number = int(operand, 0) & ((1 << wanted.itemsize * 8) - 1)
            return np.full(len(threads), number, f"u{wanted.itemsize}").view(wanted)
        else:
            found = np.full(len(threads), self._symbol(operand), np.uint64)
        if kind == "pred" or found.dtype.itemsize == wanted.itemsize:
            return found.view(wanted)
        return found.astype(f"u{wanted.itemsize}").view(wanted)

    def _symbol(self, name: str) -> int:
        if name in self.places:
            return PARAMETERS + self.places[name]
        if name in self.function.shared:
            return self.function.shared[name]
        raise Fault(f"an unknown name: {name}")

    def _put(self, operand: str, value: Bits, threads: Bits) -> None:
        if operand.startswith("{"):
            bits = value.view(f"u{value.itemsize}")
            half = bits.itemsize * 4
            for place, name in enumerate(re.findall(r"[%\w]+", operand)):
                part = bits >> bits.dtype.type(place * half)
                self.registers[name][threads] = part.astype(f"u{half // 8}")
            return
        register = self.registers[operand]
        if register.dtype != bool and value.dtype.kind in "ui" and value.itemsize != register.itemsize:
            value = value.astype(f"{value.dtype.kind}{register.itemsize}")
        register[threads] = value.view(register.dtype)

    def _addresses(self, operand: str, threads: Bits) -> list[int]:
        base, offset = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\d+))?\]", operand).groups()  # type: ignore[union-attr]
        kind = "u64"
        if base in self.registers and self.registers[base].itemsize == 4:
            kind = "u32"
        return [int(x) + int(offset or 0) for x in self._value(base, kind, threads)]

    # -- instructions

    def _execute(self, one: Instruction, threads: Bits) -> None:
        kind = one.parts[-1] if one.parts else ""
        match one.name:
            case "ld":
                self._load(one, kind, threads)
            case "st":
                self._store(one, kind, threads)
            case "atom":
                self._add(one, kind, threads)
            case "call":
                self._call(one, threads)
            case "mov":
                into, operand = one.operands
                wide = kind if kind == "pred" else f"b{kind[1:]}"
                self._put(into, self._value(operand, wide, threads), threads)
            case "cvta":
                if one.parts[:2] != ("to", "global"):
                    raise Fault(f"an unknown address: {one.text}")
                self._put(one.operands[0], self._value(one.operands[1], kind, threads), threads)
            case "cvt":
                self._put(one.operands[0], converted(one.parts, self._value(one.operands[1], kind, threads)), threads)
            case "setp":
                a, b = (self._value(x, kind, threads) for x in one.operands[1:])
                self._put(one.operands[0], compared(one.parts[0], a, b), threads)
            case "shl" | "shr":
                x, by = self._value(one.operands[1], kind, threads), self._value(one.operands[2], "u32", threads)
                self._put(one.operands[0], shifted(x, by, one.name == "shl"), threads)
            case _:
                kinds = [kind] * 4
                if one.name == "selp":
                    kinds[2] = "pred"
                if one.name == "bfi":
                    kinds[2:] = ["u32", "u32"]
                given = [self._value(x, k, threads) for x, k in zip(one.operands[1:], kinds)]
                self._put(one.operands[0], computed(one.name, one.parts, given), threads)

    def _space(self, one: Instruction) -> str:
        space = one.parts[0]
        if space not in ("global", "shared", "param"):
            raise Fault(f"an unknown space: {one.text}")
        return space

    def _load(self, one: Instruction, kind: str, threads: Bits) -> None:
        space, wanted = self._space(one), dtype(kind)
        into, place = one.operands
        if space == "param" and (name := place[1:-1].partition("+")[0]) in self.passed:
            self._put(into, self.passed[name][threads].view(wanted), threads)
            return
        names, addresses = self._several(one, into), self._addresses(place, threads)
        if any(address % (len(names) * wanted.itemsize) for address in addresses):
            raise Fault("an address that is not aligned")
        for i, register in enumerate(names):
            found = [self._read(space, address + i * wanted.itemsize, wanted.itemsize) for address in addresses]
            self._put(register, np.frombuffer(b"".join(found), wanted).copy(), threads)

    def _several(self, one: Instruction, operand: str) -> list[str]:
        """The registers of a vector."""
        if "v2" in one.parts or "v4" in one.parts:
            return re.findall(r"[%\w]+", operand)
        return [operand]

    def _read(self, space: str, address: int, size: int) -> bytes:
        if space == "global":
            return self.memory.load(address, size)
        start, all_ = (address, self.shared) if space == "shared" else (address - PARAMETERS, self.arguments)
        if not 0 <= start <= len(all_) - size:
            raise Fault(f"{size} bytes at {start} of {len(all_)} of {space} memory")
        return bytes(all_[start : start + size])

    def _store(self, one: Instruction, kind: str, threads: Bits) -> None:
        space, wanted = self._space(one), dtype(kind)
        place, operand = one.operands
        if space == "param":
            name, bits = place[1:-1].partition("+")[0], f"u{wanted.itemsize}"
            passed = self.passed.setdefault(name, np.zeros(self.threads, bits))
            passed[threads] = self._value(operand, kind, threads).view(bits)
            return
        names, addresses = self._several(one, operand), self._addresses(place, threads)
        if any(address % (len(names) * wanted.itemsize) for address in addresses):
            raise Fault("an address that is not aligned")
        for i, register in enumerate(names):
            for address, value in zip(addresses, self._value(register, kind, threads)):
                self._write(space, address + i * wanted.itemsize, value)

    def _write(self, space: str, address: int, value: Any) -> None:
        size = value.itemsize
        if space == "global":
            self.memory.store(address, value.tobytes(), value.dtype)
            return
        if not 0 <= address <= len(self.shared) - size:
            raise Fault(f"{size} bytes at {address} of {len(self.shared)} of shared memory")
        self.shared[address : address + size] = value.tobytes()

    def _add(self, one: Instruction, kind: str, threads: Bits) -> None:
        if one.parts[:2] != ("global", "add") or kind != "u64":
            raise Fault("an unknown atomic operation")
        into, place, operand = one.operands
        before = []
        for address, value in zip(self._addresses(place, threads), self._value(operand, kind, threads)):
            old = int.from_bytes(self.memory.load(address, 8), "little")
            before.append(old)
            self.memory.store(address, ((old + int(value)) % (1 << 64)).to_bytes(8, "little"), dtype(kind))
        self._put(into, np.array(before, np.uint64), threads)

    def _call(self, one: Instruction, threads: Bits) -> None:
        (result, name, arguments) = one.operands
        called = self.module[name]
        inner = Block(self.module, called, self.special, self.memory, b"", {}, bytearray())
        *given, out = [*re.findall(r"\w+", arguments), *re.findall(r"\w+", result)]
        # the first parameter in the head of a function is its result
        of_result, *own = called.parameters
        inner.passed = {parameter: self.passed[x] for parameter, x in zip(own, given)}
        inner.run(threads)
        self.passed[out] = inner.passed[of_result]


def launch(module: dict[str, Function], name: str, grid: int, block: int, dynamic: int, arguments: Sequence[bytes],
           memory: Memory) -> None:  # fmt: skip
    """All blocks of a kernel, in turn.

    Raises:
        Fault: it does what no kernel may do, takes other arguments, or has an instruction that is not known.
    """
    entry = module[name]
    if entry.sizes != [len(x) for x in arguments]:
        raise Fault(f"{name} takes arguments of {entry.sizes} bytes, and has {[len(x) for x in arguments]}")
    whole, places = bytearray(), {}
    for parameter, value in zip(entry.parameters, arguments):
        size = 8 if len(value) > 8 else len(value)
        whole += bytes(-len(whole) % size)
        places[parameter] = len(whole)
        whole += value
    tid = np.arange(block, dtype=np.uint32)
    with np.errstate(all="ignore"):
        for number in range(grid):
            special = {"%tid.x": tid, "%ntid.x": block, "%ctaid.x": number, "%nctaid.x": grid}
            shared = bytearray(b"\xff" * (entry.shared[""] + dynamic))
            Block(module, entry, special, memory, bytes(whole), places, shared).run()
