"""From a call to its derivative: the kernel at the dispatcher's Autograd key, autograd functions, and their nodes."""
