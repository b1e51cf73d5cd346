"""Samples and probes of the rules, one file per family. Imported when the samples of a rule are first read."""

import importlib
import pkgutil

for _found in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_found.name)
