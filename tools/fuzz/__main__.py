"""Random programs, whose derivatives in every mode are compared with finite differences.

Run it:  python tools/fuzz                     (`make fuzz`: 200 programs of a new seed)
         python tools/fuzz --minutes 60        (ARGS='--minutes 60')
         python tools/fuzz --seed 7 --only 31  (one program again)
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path
from random import SystemRandom

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fuzz.generate import generate
from fuzz.page import summary
from fuzz.run import Finding, Tally, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, help="how many (default: 200, or as many as the minutes allow)")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, help="of the run (default: a new one)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--only", type=int, help="the program of this number alone, under every override")
    parser.add_argument("--out", type=Path, help="a file for the findings, each a program that can be run")
    parser.add_argument("--unreached", action="store_true", help="name the entries of the pool that were not reached")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed = SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    count = options.programs or (None if options.minutes else 200)
    numbers = itertools.count(options.first) if count is None else range(options.first, options.first + count)
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")

    def report(tally: Tally, finding: Finding | None) -> None:
        if finding is not None:
            text = f"{'-' * 100}\n{finding.text}"
            print(text, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(text)
        elif tally.programs % 200 == 0:
            print(f"== {tally.programs} programs, {tally.seconds:.0f} s, {dict(tally.verdicts)}", flush=True)

    if options.only is not None:
        print(generate(seed, options.only).script)
        tally = run(seed, [options.only], all_configurations=True, report=report)
    else:
        tally = run(seed, numbers, until=until, report=report)
    print(summary(tally, unreached=options.unreached))
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
