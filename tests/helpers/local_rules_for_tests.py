"""Rules that tests make for themselves."""

import torch_manualgrad as mg


def local(name, **about):
    """A rule that is in no table."""
    return mg.rule(name, register=False, **about)
