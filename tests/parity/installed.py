"""pytest plugin: the suite runs with rules installed, those that MANUALGRAD_INSTALLED names ("none": stock; "backend": with the
compiler's backend).

With MANUALGRAD_EVERY=n it runs about one test in n, the same ones every time: a test is chosen by a checksum of its name.
MANUALGRAD_OFFSET, from 0 to n - 1, chooses other ones.
"""

import os
import zlib


def pytest_configure(config):
    names = os.environ.get("MANUALGRAD_INSTALLED", "none")
    if "MANUALGRAD_COMPILED" in os.environ:
        from compiled_backend import add_names_of_other_versions

        add_names_of_other_versions()
    if names == "backend":
        from compiled_backend import replace

        replace()
    elif names != "none":
        import torch_manualgrad as mg

        mg.install(*names.split())


def pytest_collection_modifyitems(config, items):
    every = int(os.environ.get("MANUALGRAD_EVERY", "1"))
    offset = int(os.environ.get("MANUALGRAD_OFFSET", "0"))
    items[:] = [item for item in items if zlib.crc32(item.name.encode()) % every == offset]
