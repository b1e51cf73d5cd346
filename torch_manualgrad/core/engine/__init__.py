"""What stands between a call and its derivative: the dispatcher's Autograd key, autograd functions and their nodes."""
