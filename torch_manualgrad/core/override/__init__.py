"""What is active: rules and replacements in the place of PyTorch's derivatives."""
