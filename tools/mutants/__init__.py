"""Wrong derivatives, made by machine from right ones, and how many of them `mg.testing.check` and PyTorch's checks catch."""
