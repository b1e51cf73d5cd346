"""A pytest plugin for runs in which the CUDA kernels, built for the host, are those of the CPU: leaves out what
is said of the CPU's own kernels alone, and of the rest, but for cases.py, all but about one in CUDA_ON_HOST_EVERY."""

from __future__ import annotations

import os
import zlib

import pytest
import torch

# the CPU's kernels, but not CUDA's, take real square matrices up to 256
LARGEST_FACTOR = 32
LARGEST_QR = 24  # of complex128
# about the CPU's threads, and of errors that a device cannot raise (cases.py has what it does instead)
OF_THE_CPU = (
    "test_threads_do_not_change_a_bit",
    "test_threads_do_not_matter",
    "test_bad_offsets",
    "test_a_count_that_does_not_fit",
)
# minutes, and no kernel or option that others do not have
LONG = ("test_neither_batch_nor_threads_count", "test_rules_look_at_each_matrix_by_itself")


def pytest_configure() -> None:
    import torch_manualgrad as mg

    for formula in mg.ops.values():
        if "cuda" not in getattr(formula, "kernels", ("cuda",)):
            formula.kernels = tuple(device for device in formula.kernels if device != "cpu")


def _of_the_cpu(item: pytest.Item) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if given.get("device") == "cuda" or item.originalname in OF_THE_CPU:
        return True
    if item.path.name not in ("test_factor_kernels.py", "test_qr_kernels.py"):
        return False
    in_cache = (
        item.originalname == "test_an_argument_of_the_wrong_shape_is_named" and given["name"] in item.module.IN_CACHE
    )
    of_qr = "qr" in item.originalname or given.get("name") == "linalg_qr_backward" or "qr" in item.path.name
    largest = LARGEST_QR if of_qr and given.get("dtype") == torch.complex128 else LARGEST_FACTOR
    return in_cache or max(given.get("n", 0), given.get("m", 0)) > largest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = int(os.environ.get("CUDA_ON_HOST_EVERY", "1"))

    def is_sampled(item: pytest.Item) -> bool:
        if every == 1 or item.path.name == "cases.py":
            return True
        return item.originalname not in LONG and zlib.crc32(item.name.encode()) % every == 0

    kept = [item for item in items if not _of_the_cpu(item) and is_sampled(item)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
