"""Compare the resources of each CUDA kernel with limits.

Reads the CUDA library that was built: registers, bytes of stack, and from the disassembly the loads and stores of local memory
(arrays that are not in registers, and spills), generic loads and stores (whose address space the compiler does not know) and
fused multiply-adds. tests/kernels/cuda_limits.csv has what is allowed for each kernel and architecture; docs/cuda.md shows it, and
how often kernels use memory (tests/kernels/cuda_on_host/traffic.py).

    python tools/cuda_kernels.py            (prints what exceeds the limits, a few seconds)
    python tools/cuda_kernels.py --write    (takes what there is for the limits, and writes the page)

Needs cuobjdump and nvdisasm, of a CUDA toolkit or of pip's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "torch_manualgrad" / "lib" / "libmanualgrad_cuda.so"
LIMITS = ROOT / "tests" / "kernels" / "cuda_limits.csv"
TRAFFIC = ROOT / "tests" / "kernels" / "cuda_traffic.csv"
PAGE = ROOT / "docs" / "cuda.md"
TOOLS = ("cuobjdump", "nvdisasm")


class Costs(NamedTuple):
    """Of one kernel on one architecture. Disassembling takes longest, so only the oldest architecture has the last four."""

    registers: int
    stack: int
    local_loads: int | None = None
    local_stores: int | None = None
    generic: int | None = None
    fused: int | None = None


Kernel = tuple[str, int]  # name and architecture
Table = Mapping[Kernel, Costs]

# Operations of the disassembly that count. HFMA2 does not: it also sets registers to constants.
_OPERATION = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?(LDL|STL|LD|ST|FFMA|DFMA)\b(\S*)")
_FIELDS = {
    "LDL": "local_loads",
    "STL": "local_stores",
    "LD": "generic",
    "ST": "generic",
    "FFMA": "fused",
    "DFMA": "fused",
}


# -- the library ------------------------------------------------------------------------------------------------------


def tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit: on PATH, in CUDA_HOME, or where pip puts it."""
    folders = [
        os.environ["PATH"],
        *(f"{os.environ[key]}/bin" for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ),
    ]
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        folders += sorted(map(str, Path(folder).glob("*/bin")), reverse=True)
    return shutil.which(name, path=os.pathsep.join(folders))


def obstacle(library: Path = LIBRARY) -> str:
    """Why the kernels cannot be read; empty if they can."""
    if not library.exists():
        return f"{library.name} is not built: it needs nvcc and MANUALGRAD_CUDA=1"
    missing = [name for name in TOOLS if tool(name) is None]
    return f"no {' and no '.join(missing)}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm" if missing else ""


def output(name: str, *arguments: str, folder: str | None = None) -> str:
    path = tool(name)
    assert path is not None
    # cuobjdump calls the other one
    environment = dict(os.environ, PATH=os.pathsep.join([str(Path(path).parent), os.environ["PATH"]]))
    command = [path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment).stdout


def demangled(names: Iterable[str]) -> list[str]:
    """Kernels as their source calls them, with the arguments of templates, without namespaces and parameters."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout

    def short(name: str) -> str:
        name = name.replace("(anonymous namespace)::", "").replace("manualgrad::", "").removeprefix("void ")
        name = re.sub(r"\(\w+\)(?=\d)", "", name.replace(" >", ">"))  # (Power)3 is 3
        return name[: name.index("(")] if "(" in name else name

    return [short(line) for line in text.splitlines()]


def resources(library: Path) -> Iterator[tuple[str, int, int, int]]:
    """(mangled name, architecture, registers, bytes of stack) of each kernel."""
    architecture, name = 0, ""
    for line in output("cuobjdump", "-res-usage", str(library)).splitlines():
        if found := re.match(r"arch = sm_(\d+)", line):
            architecture = int(found[1])
        elif found := re.match(r"\s*Function (\S+):", line):
            name = found[1]
        elif found := re.match(r"\s*REG:(\d+) STACK:(\d+)", line):
            yield name, architecture, int(found[1]), int(found[2])


def operations(library: Path, architecture: int) -> dict[str, dict[str, int]]:
    """How often each kernel, by its mangled name, has operations that count."""
    found: dict[str, dict[str, int]] = {}

    def read(path: Path) -> None:
        for part in output("nvdisasm", "-c", "-ndf", str(path)).split("\n//----")[1:]:
            if name := re.match(r"-+ \.text\.(\S+) ", part):
                counts = dict.fromkeys(_FIELDS.values(), 0)
                for operation, kind in _OPERATION.findall(part):
                    counts[_FIELDS[operation]] += "STRONG" not in kind  # as a grid has that waits for itself
                found[name[1]] = counts

    with tempfile.TemporaryDirectory(prefix="cuda_kernels") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        output("cuobjdump", "-xelf", f".sm_{architecture}.", str(library.resolve()), folder=folder)
        list(pool.map(read, sorted(Path(folder).iterdir())))
    return found


def measured(library: Path = LIBRARY) -> dict[Kernel, Costs]:
    """The costs of each kernel. Where two files have one of the same name, the larger ones."""
    rows = list(resources(library))
    oldest = min(architecture for _, architecture, _, _ in rows)
    counted = operations(library, oldest)
    table: dict[Kernel, Costs] = {}
    for short, (name, architecture, registers, stack) in zip(demangled(row[0] for row in rows), rows, strict=True):
        costs = Costs(registers, stack, **(counted[name] if architecture == oldest else {}))
        table[short, architecture] = largest([costs, table.get((short, architecture), costs)])
    return table


def largest(of: Sequence[Costs]) -> Costs:
    return Costs(*(None if None in field else max(field) for field in zip(*of)))


# -- the limits -------------------------------------------------------------------------------------------------------


def allowed(costs: Costs) -> Costs:
    """Registers are given out eight at a time."""
    return costs._replace(registers=-(-costs.registers // 8) * 8)


def read_limits(path: Path = LIMITS) -> dict[Kernel, Costs]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return {
            (row["kernel"], int(row["sm"])): Costs(
                *(int(row[field]) if row[field] else None for field in Costs._fields)
            )
            for row in rows
        }


def write_limits(table: Table, path: Path = LIMITS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kernel", "sm", *Costs._fields])
        writer.writerows([name, architecture, *allowed(costs)] for (name, architecture), costs in sorted(table.items()))


def excesses(table: Table, limits: Table) -> list[str]:
    """What exceeds its limit, on the architectures that both have; kernels without a limit; limits of no kernel."""
    architectures = {architecture for _, architecture in limits}
    found = []
    for (name, architecture), costs in sorted(table.items()):
        if architecture not in architectures:
            continue
        limit = limits.get((name, architecture))
        if limit is None:
            found.append(f"{name}, sm_{architecture}: has no limits")
            continue
        found += [
            f"{name}, sm_{architecture}: {field} {cost}, allowed {most}"
            for field, cost, most in zip(Costs._fields, costs, limit)
            if cost is not None and most is not None and cost > most
        ]
    built = {architecture for _, architecture in table}
    gone = sorted(key for key in limits if key[1] in built and key not in table)
    return found + [f"{name}, sm_{architecture}: has limits, and is no kernel" for name, architecture in gone]


# -- the page ---------------------------------------------------------------------------------------------------------

HEAD = "| kernel | variants | registers | stack | local loads | local stores | generic | fused |"
_VARIANT = re.compile(r"\b(?:Complex<[\w:]+>|float|double|c10::Half|c10::BFloat16|false|true|\d+)(?:, )?")


def rows(limits: Table) -> list[str]:
    """The lines of the page's table: kernels that differ in dtypes, flags and numbers alone, with the largest costs on each architecture."""
    found: dict[str, dict[int, list[Costs]]] = defaultdict(lambda: defaultdict(list))
    for (name, architecture), costs in sorted(limits.items()):
        family = _VARIANT.sub("", name).replace("<>", "").replace(", >", ">")
        found[family][architecture].append(costs)
    lines = []
    for family, members in sorted(found.items()):
        of_each = zip(*(largest(costs) for _, costs in sorted(members.items())))
        cells = [" / ".join(dict.fromkeys(str(cost) for cost in field if cost is not None)) for field in of_each]
        lines.append(f"| `{family}` | {max(map(len, members.values()))} | {' | '.join(cells)} |")
    return lines


TRAFFIC_HEAD = "| operator | float32, n = 8 | n = 16 | n = 32 | float64, n = 8 | n = 16 | n = 32 |"


def traffic_rows(path: Path = TRAFFIC) -> list[str]:
    """The lines of the page's second table: wavefronts and sectors of a warp full of matrices."""
    found: dict[str, list[str]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: (row["dtype"], int(row["n"]))):
            if row["dtype"] in ("float32", "float64") and int(row["n"]) >= 8:
                found[row["operator"]].append(f"{row['wavefronts']}, {row['sectors']}")
    return [f"| `{operator}` | {' | '.join(cells)} |" for operator, cells in sorted(found.items())]


def with_table(page: str, head: str, lines: Iterable[str]) -> str:
    """The page with these lines in the table with this head."""
    before, _, after = page.partition(head + "\n")
    rule, _, rest = after.partition("\n")
    rest = re.sub(r"\A(\|.*\n)*", "", rest)
    return "\n".join([before + head, rule, *lines]) + "\n" + rest


def current(page: str) -> str:
    """The page with both tables as the files in tests/kernels have them."""
    return with_table(with_table(page, HEAD, rows(read_limits())), TRAFFIC_HEAD, traffic_rows())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if why := obstacle(given.library):
        print(why)
        return 2
    table = measured(given.library)
    if given.write:
        write_limits(table)
        PAGE.write_text(current(PAGE.read_text()))
        return 0
    found = excesses(table, read_limits())
    print(f"{len(table)} kernels", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
