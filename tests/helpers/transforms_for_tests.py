"""Nestings of transforms: forward and reverse mode in every order."""

import itertools

from torch.func import jacfwd, jacrev

NESTINGS = [c for k in (1, 2, 3) for c in itertools.product((jacrev, jacfwd), repeat=k)]


def nested(transforms, f):
    for transform in transforms:
        f = transform(f)
    return f


def name_of(transforms):
    return "-".join(t.__name__ for t in transforms)
