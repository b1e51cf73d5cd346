"""Write torch_manualgrad/core/limits.py: the sizes in csrc/linalg/limits.h, for Python.

    python -m tools.limits

`tests/kernels/test_kernel_limits.py` fails if the file is not current.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "csrc" / "linalg" / "limits.h"
PATH = ROOT / "torch_manualgrad" / "core" / "limits.py"

HEAD = '''"""Written by tools/limits.py: the sizes in csrc/linalg/limits.h, which says where they are from."""

LIMITS = {
'''


def module(header: str) -> str:
    """The text of the module, for the text of the header."""
    found = re.findall(r"^constexpr int64_t k(\w+) = (\d+);", header, re.MULTILINE)
    lines = [f'    "{re.sub("(?<!^)(?=[A-Z])", "_", name).lower()}": {size},\n' for name, size in found]
    return HEAD + "".join(lines) + "}\n"


if __name__ == "__main__":
    PATH.write_text(module(HEADER.read_text()))
