"""Overrides: rules and replacements that act in place of PyTorch's derivatives."""
