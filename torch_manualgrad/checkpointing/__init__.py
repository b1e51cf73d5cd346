"""Functions whose intermediate results the backward recomputes: less memory, in all modes and at every order."""

from .function import checkpoint
from .policies import Policy, checkpoint_name, offload, save_budget, save_names, save_products

__all__ = ["Policy", "checkpoint", "checkpoint_name", "offload", "save_budget", "save_names", "save_products"]
