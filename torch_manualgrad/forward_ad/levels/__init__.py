"""Forward mode in levels to any depth: dual tensors of dual tensors."""
