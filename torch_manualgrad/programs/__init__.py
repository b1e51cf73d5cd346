"""Functions of tensors with rules for their derivatives, as one operator: custom rules, checkpoints and solvers."""
