"""Runs the suites of packages that build on PyTorch, on stock and with `mg.install()`: ``python clients.py FOLDER``.

Packages are taken that come from pip with their tests, in the wheel or in the source archive; others are run where a
checkout of theirs is given: ``--checkout kornia=FOLDER``. What passes on stock has to pass with the rules installed, except
for what pinned.md lists.
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
    """A package, where its tests are in its archive or checkout, and what it needs beside PyTorch.

    Attributes:
        version: the one that pip is asked for; empty where its archives hold no tests, so that a checkout is needed.
        path: the folder of a checkout from which the package is imported.
    """

    name: str
    version: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    wheel: bool = False
    path: str = "."


# fmt: off
_LINEAR_OPERATOR = ("jaxtyping", "wadler_lindig", "mpmath", "scipy")
_GPYTORCH = ("linear_operator==0.6.1", *_LINEAR_OPERATOR, "scikit-learn", "joblib", "threadpoolctl")
_METRIC_LEARNING = ("scikit-learn", "scipy", "joblib", "threadpoolctl", "narwhals", "tqdm")
_BOTORCH = ("gpytorch==1.15.2", *_GPYTORCH, "multipledispatch", "pyre-extensions", "typing-inspect", "mypy-extensions", "pyro-ppl", "pyro-api", "opt_einsum")
_BOTORCH_TESTS = ("acquisition/test_analytic.py", "acquisition/test_logei.py", "models/kernels", "models/test_gp_regression.py", "posteriors", "utils/probability")
CLIENTS = (
    Client("linear_operator", "0.6.1", ("test",), _LINEAR_OPERATOR),
    Client("gpytorch", "1.15.2", ("test",), _GPYTORCH),
    Client("tensorly", "0.10.0", ("tensorly",), ("scipy",), (("TENSORLY_BACKEND", "pytorch"),), wheel=True),
    Client("opt_einsum", "3.4.0", ("opt_einsum",), wheel=True),
    Client("einops", "0.8.2", ("einops/tests",), (), (("EINOPS_TEST_BACKENDS", "torch"),), wheel=True),
    Client("roma", "", ("test",), ("scipy",)),
    Client("geotorch", "", ("test",)),
    Client("pytorch-metric-learning", "", tuple(f"tests/{name}" for name in ("distances", "losses", "reducers", "regularizers")), _METRIC_LEARNING, (("TEST_DEVICE", "cpu"), ("TEST_DTYPES", "float32,float64")), path="src"),
    Client("botorch", "", tuple(f"test/{name}" for name in _BOTORCH_TESTS), _BOTORCH),
    Client("entmax", "", ("entmax",)),
    Client("nflows", "", ("tests",), ("torchtestcase", "umnn", "tqdm", "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "packaging", "pillow", "pyparsing", "python-dateutil", "six")),
    Client("pytorch-minimize", "", ("tests",), ("scipy",)),
    Client("normalizing-flows", "", ("normflows",), ("tqdm",)),
    Client("pypose", "", tuple(f"tests/{name}" for name in ("basics", "function/test_spline.py", "lietensor", "module/test_loss.py", "optim/test_solver.py", "optim/test_optimizer.py", "sparse"))),
    Client("kornia", "", ("tests/geometry", "tests/losses"), ("kornia_rs", "packaging")),
)
# fmt: on


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def fetch(client: Client, folder: Path, checkout: Path | None) -> tuple[Path, Path]:
    """Install a client beside the environment: the folder that its tests stand in, and the one to import it from."""
    site = folder / client.name / "site"
    wanted = list(client.needs) if checkout else [f"{client.name}=={client.version}", *client.needs]
    if wanted and not site.exists():
        pip("install", "--no-deps", "--target", str(site), *wanted)
    if checkout:
        return checkout, checkout / client.path
    if client.wheel:
        return site, site
    source = folder / client.name / "source"
    if not source.exists():
        archives = folder / client.name / "archives"
        pip(
            "download", "--no-deps", "--no-binary", client.name, "-d", str(archives), f"{client.name}=={client.version}"
        )
        with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
    return next(source.iterdir()), site


def run(client: Client, source: Path, path: Path, mode: str, folder: Path, *options: str) -> dict[str, str]:
    """Test -> passed, failed or skipped."""
    found = folder / client.name / f"{MODES[mode] or 'plain'}.xml".replace("*", "all")
    found.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **dict(client.environment),
        "PYTHONPATH": os.pathsep.join(map(str, (path, folder / client.name / "site", ROOT, HERE))),
        "MANUALGRAD_INSTALLED": MODES[mode],
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "installed", "-p", "no:cacheprovider", f"--junitxml={found}"]
    subprocess.run(
        [*command, "--import-mode=importlib", "-o", "addopts=", *client.tests, *options],
        env=environment, cwd=source, stdout=subprocess.DEVNULL, check=False,
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
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=FOLDER", help="sources of a client")
    given, options = parser.parse_known_args()  # the rest is handed to pytest
    folder = given.folder.resolve()
    checkouts = {name: Path(at).resolve() for name, _, at in (text.partition("=") for text in given.checkout)}
    pinned = pinned_tests()
    status = 0
    for client in CLIENTS:
        if given.only and client.name not in given.only:
            continue
        checkout = checkouts.get(client.name)
        if not client.version and checkout is None:
            print(f"{client.name}: no checkout is given")
            continue
        source, path = fetch(client, folder, checkout)
        stock: dict[str, str] = {}
        for mode in MODES:
            outcomes = run(client, source, path, mode, folder, *options)
            stock = stock or outcomes
            passed = sum(o == "passed" for o in outcomes.values())
            failed = sum(o in ("failure", "error") for o in outcomes.values())
            print(
                f"{' '.join((client.name, client.version)).strip()}, {mode}: {passed} passed, {failed} failed",
                flush=True,
            )
            for test, outcome in stock.items():
                if outcome == "passed" and outcomes.get(test) != "passed":
                    declared = test in pinned
                    status |= not declared
                    print(f"  {test}: {outcomes.get(test, 'missing')}{', declared' * declared}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
