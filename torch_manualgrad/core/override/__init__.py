"""Overrides: rules and replacements that act instead of PyTorch's derivatives."""
