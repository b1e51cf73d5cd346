"""Custom ops: operators of the dispatcher whose implementations can be replaced."""
