"""Calls formulas and public functions with arguments that do not fit.

Run it:  python tools/hostile                        (`make hostile`; a new seed, which is printed)
         python tools/hostile --calls 100000 --seed 7
         python tools/hostile --seed 7 --number 123  (shows one call and what it raises; may crash)

A call must end in a result or in a TypeError, ValueError or RuntimeError that names an argument. It must not end the process,
and its result must not depend on what memory held before.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000, help="how many (default: 20000)")
    parser.add_argument("--seed", type=int, help="of the calls (default: a new one)")
    parser.add_argument("--start", type=int, default=0, help="number of the first call")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="valid calls from one in so many rules (default: 1, all)")
    parser.add_argument("--number", type=int, help="run this one call, in this process")
    parser.add_argument(
        "--examples", type=int, default=3, help="findings to print, for each target and kind (default: 3)"
    )
    options = parser.parse_args()
    _guard()

    import torch_manualgrad as mg
    from hostile.calls import call_number
    from hostile.process import run
    from hostile.targets import targets

    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    chosen = [t for t in targets(list(mg.rules)[:: options.every]) if options.only in t.name]
    print(f"seed {seed}, {len(chosen)} targets", flush=True)
    if options.number is not None:
        call = call_number(chosen, seed, options.number)
        print(call, flush=True)
        try:
            print(call.run())
        except Exception:
            traceback.print_exc()
        return 0
    start = time.perf_counter()
    count: collections.Counter[str] = collections.Counter()
    shown: collections.Counter[tuple[str, str]] = collections.Counter()
    for found in run(chosen, seed, range(options.start, options.start + options.calls)):
        count[found.kind] += 1
        key = (found.kind, found.call.partition("(")[0])
        shown[key] += 1
        if shown[key] <= options.examples:
            print(f"{found.kind} {found.number}: {found.call}\n    {found.text[:600]}", flush=True)
    print(f"{options.calls} calls in {time.perf_counter() - start:.0f} s: {dict(count) or 'nothing found'}")
    return bool(count)


def _guard() -> None:
    """Go on with the allocator of guard.c."""
    library = ROOT / "build" / "hostile" / "guard.so"
    source = Path(__file__).with_name("guard.c")
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    if str(library) not in os.environ.get("LD_PRELOAD", ""):
        os.environ |= {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
