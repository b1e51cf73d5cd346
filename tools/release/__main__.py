"""Makes what is released: the wheel, the source distribution, and the kernels for other processors.

Run it:  python tools/release wheel              (`make wheel`; a quarter of an hour, and downloads of torch's releases)
         python tools/release check WHEEL        what a wheel promises, checked on the file
         python tools/release sdist              (`make sdist`)
         python tools/release try 2.15.0         (`make test-wheel TORCH=2.15.0`) the tests on the wheel, with that torch
         python tools/release aarch64            (`make aarch64`) the CPU kernels, compiled for aarch64

docs/installing.md has what became of it. Wheels and source distributions are in dist/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# The folder above instead of this one, whose wheel.py would be taken for the package that setuptools builds with.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("wheel")
    commands.add_parser("sdist")
    commands.add_parser("check").add_argument("wheel", type=Path)
    attempt = commands.add_parser("try")
    attempt.add_argument("torch", help="the release of torch, such as 2.15.0")
    attempt.add_argument("--env", type=Path, help="an environment that has this torch and the tests' needs already")
    attempt.add_argument("tests", nargs="*", help="files or folders of tests (default: all), options of pytest")
    commands.add_parser("aarch64")
    options, rest = parser.parse_known_args()
    # what a command does not need need not be installed
    if options.command == "wheel":
        from release.wheel import build

        build()
    elif options.command == "sdist":
        from release.sdist import build_source

        build_source()
    elif options.command == "check":
        from release.checks import check

        check(options.wheel)
    elif options.command == "try":
        from release.attempt import attempt_with

        attempt_with(options.torch, options.env, [*options.tests, *rest])
    else:
        from release.aarch64 import compile_kernels

        compile_kernels()


if __name__ == "__main__":
    main()
