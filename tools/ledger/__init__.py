"""PyTorch's issues about derivatives that this package answers, each with a program that is run."""
