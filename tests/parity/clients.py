"""Runs the suites of packages that build on PyTorch, on stock and with `mg.install()`: ``python clients.py FOLDER``.

Packages are taken that come from pip with their tests, in the wheel or in the source archive. What passes on stock has to
pass with the rules installed, except for what pinned.md lists.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from cells import pinned_tests

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODES = {"stock": "none", "install()": "", 'install("*")': "*"}


@dataclass(frozen=True)
class Client:
    """A package at a version, where its tests are in its archive, and what it needs beside PyTorch."""

    name: str
    version: str
    tests: str
    needs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    wheel: bool = False


CLIENTS = (
    Client("linear_operator", "0.6.1", "test", ("jaxtyping", "wadler_lindig", "mpmath", "scipy")),
    Client("gpytorch", "1.15.2", "test", ("linear_operator==0.6.1", "jaxtyping", "wadler_lindig", "scikit-learn", "scipy", "joblib", "threadpoolctl")),
    Client("tensorly", "0.10.0", "tensorly", ("scipy",), (("TENSORLY_BACKEND", "pytorch"),), wheel=True),
    Client("opt_einsum", "3.4.0", "opt_einsum", wheel=True),
    Client("einops", "0.8.2", "einops/tests", (), (("EINOPS_TEST_BACKENDS", "torch"),), wheel=True),
)  # fmt: skip


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def fetch(client: Client, folder: Path) -> Path:
    """Install a client beside the environment, and give the folder of its tests."""
    site = folder / client.name / "site"
    if not site.exists():
        pip("install", "--no-deps", "--target", str(site), f"{client.name}=={client.version}", *client.needs)
    if client.wheel:
        return site / client.tests
    source = folder / client.name / "source"
    if not source.exists():
        archives = folder / client.name / "archives"
        pip(
            "download", "--no-deps", "--no-binary", client.name, "-d", str(archives), f"{client.name}=={client.version}"
        )
        with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
    return next(source.iterdir()) / client.tests


def run(client: Client, tests: Path, mode: str, folder: Path, *options: str) -> dict[str, str]:
    """Test -> passed, failed or skipped."""
    found = folder / client.name / f"{MODES[mode] or 'plain'}.xml".replace("*", "all")
    environment = {
        **os.environ,
        **dict(client.environment),
        "PYTHONPATH": os.pathsep.join([str(folder / client.name / "site"), str(ROOT), str(HERE)]),
        "MANUALGRAD_INSTALLED": MODES[mode],
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "installed", "-p", "no:cacheprovider", f"--junitxml={found}"]
    subprocess.run(
        [*command, "--import-mode=importlib", "-o", "addopts=", str(tests), *options],
        env=environment, cwd=tests.parent, stdout=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    outcomes = {}
    for case in ElementTree.parse(found).iter("testcase"):
        outcome = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where packages and results go")
    parser.add_argument("--only", action="append", choices=[c.name for c in CLIENTS])
    given, options = parser.parse_known_args()  # the rest is handed to pytest
    folder = given.folder.resolve()
    pinned = pinned_tests()
    status = 0
    for client in CLIENTS:
        if given.only and client.name not in given.only:
            continue
        tests = fetch(client, folder)
        stock: dict[str, str] = {}
        for mode in MODES:
            outcomes = run(client, tests, mode, folder, *options)
            stock = stock or outcomes
            passed = sum(o == "passed" for o in outcomes.values())
            failed = sum(o in ("failure", "error") for o in outcomes.values())
            print(f"{client.name} {client.version}, {mode}: {passed} passed, {failed} failed", flush=True)
            for test, outcome in stock.items():
                if outcome == "passed" and outcomes.get(test) != "passed":
                    declared = test in pinned
                    status |= not declared
                    print(f"  {test}: {outcomes.get(test, 'missing')}{', declared' * declared}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
