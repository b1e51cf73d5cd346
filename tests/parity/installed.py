"""pytest plugin: the suite runs with rules installed, those that MANUALGRAD_INSTALLED names ("none": stock)."""

import os


def pytest_configure(config):
    names = os.environ.get("MANUALGRAD_INSTALLED", "none")
    if names != "none":
        import torch_manualgrad as mg

        mg.install(*names.split())
