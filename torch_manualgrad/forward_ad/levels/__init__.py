"""Forward mode in levels of any depth: dual tensors of dual tensors."""
