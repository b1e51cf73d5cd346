"""Keys for compiled graphs that name the active derivatives, so that no graph is used under others.

A graph of torch.compile has the derivatives of its operators baked in, and PyTorch keys none of its caches on
registrations. There are three caches:

- ``OpOverload._dispatch_cache``: registrations at the alias key Autograd, as all of ours are, bypass it.
- Graphs in this process: Dynamo gets a guard on `state`, which names every active override and swap.
- AOTAutograd's cache on disk: ``torch.compiler.config.cache_key_tag`` carries a digest of the same, and of the code
  of every formula and custom op.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import secrets
import sys
from collections.abc import Callable, Sized
from pathlib import Path
from types import BuiltinFunctionType, CodeType
from typing import Any

import torch

from . import activation
from .internals import guard_compiled_graphs, is_dynamo_at_work
from .once import is_defining

__all__ = ["digest", "fingerprint", "is_filled", "note_file", "put", "remember", "settle", "state"]

_PACKAGE = __name__.partition(".")[0]
_exchanged: dict[str, tuple[str, str]] = {}  # operator -> its current derivative, and the fingerprint
_defined: dict[str, str] = {}  # formula or custom op -> fingerprint
_code = 0  # a digest of all their code, independent of order, so that an update takes constant time
_state: str | None = ""  # None: computed from `_exchanged` when it is read
_OURS = re.compile(r"(\|torch_manualgrad:[0-9a-f]{16})+$")
_process = secrets.token_hex(8)
_files: set[str] = set()  # of definitions whose code is not in `_code` yet
_guarded = False
_outdated = False  # there may be graphs without the guard


def _no_rules() -> tuple[str, str]:
    return "", ""


rules_here: Callable[[], tuple[str, str]] = _no_rules  # the rules active on this thread, and their code


def state() -> str:
    """The derivatives active on this thread beyond the definitions, as text; equal texts mean equal derivatives."""
    global _state
    found = _state
    if found is None:
        with activation.lock:
            found = _state = "; ".join(f"{key} {what}" for key, (what, _) in sorted(_exchanged.items()))
    return _joined(found, rules_here()[0])


@functools.lru_cache(maxsize=64)
def _joined(definitions: str, rules: str) -> str:
    return "; ".join(filter(None, (definitions, rules and f"rules {rules}")))


def put(key: str, what: str, code: str = "") -> None:
    """Record the derivative that is active at ``key`` beyond its definition; empty: none.

    Args:
        key: an operator, or another place where derivatives are replaced.
        what: names one derivative in this process.
        code: its `fingerprint`, which names it for other processes.
    """
    global _state
    with activation.lock:
        before = _exchanged.pop(key, None)
        after = (what, code) if what else None
        if after is not None:
            _exchanged[key] = after
        if after != before:
            _exchange(f"active {key}", before and before[1], after and after[1])
            _state = None
            settle()


def remember(key: str, function: Callable[..., Any] | None) -> None:
    """Record the code behind a definition, for the keys of caches on disk; graphs in memory are newer than it.

    Args:
        key: a formula or custom op, and a part of it.
        function: its code. For a function of this package, the whole file is recorded, at the end of the import.
    """
    if is_defining():
        note_file(function)
        return
    code = fingerprint(function)
    with activation.lock:
        _exchange(key, _defined.get(key), code)
        _defined[key] = code
        settle()


def note_file(function: Any) -> None:
    """Record the file of a function of this package; a number or an operator has none."""
    if (code := getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)) is not None:
        _files.add(code.co_filename)


def _exchange(key: str, before: str | None, after: str | None) -> None:
    global _code
    for code in (before, after):
        if code is not None:
            _code ^= int(digest(f"{key} {code}"), 16)


@activation.following
def settle() -> None:
    """Update the keys of the compiler's caches to the derivatives active on this thread."""
    _tag()
    _guard()


def _tag() -> None:
    """Put the digest into the public tag, after the user's own text.

    PyTorch's configuration is per thread: the tag is set again when Dynamo begins to compile.
    """
    while _files:
        path = _files.pop()
        _exchange(f"file {path.rpartition(_PACKAGE)[2]}", None, _file_digest(path))
    rules = rules_here()[1]
    config: Any = torch.compiler.config
    now = config.cache_key_tag
    tag = f"{_OURS.sub('', now)}|torch_manualgrad:{_code ^ int(rules or '0', 16):016x}"
    if tag != now:
        config.cache_key_tag = tag


def _guard() -> None:
    """Install the guard in Dynamo as soon as it is imported. Graphs that are older than the guard are dropped, once.

    If the guard cannot be installed (another version of Dynamo), each change drops all graphs. This is slower, but correct.
    """
    global _guarded, _outdated
    if "torch._dynamo" not in sys.modules:
        return
    if not _guarded:
        _guarded, _outdated = guard_compiled_graphs(state, _tag), True
    if _outdated and not is_dynamo_at_work():  # Dynamo may have imported a part of this package
        torch.compiler.reset()
        _outdated = False


def digest(data: bytes | str) -> str:
    """16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


@functools.cache
def _file_digest(path: str) -> str:
    try:
        return digest(Path(path).read_bytes())
    except OSError:  # typed at a prompt, or given by ``-c``: nobody knows what another process had there
        return f"{path} {_process}"


def fingerprint(function: Callable[..., Any] | None) -> str:
    """A digest of the code of ``function``: its file, its own code, its defaults, its closure and the globals that it reads.

    Code that it reaches in other files is not included. A value without a stable repr makes the digest unique to this
    process, which loses a cache hit but is never wrong.

    Args:
        function: any function, also a partial one; or None.

    Returns:
        The `digest`.
    """
    return digest(repr(_parts(function, set())))


def _parts(value: Any, seen: set[int]) -> Any:
    function = inspect.unwrap(value) if callable(value) else value
    function = getattr(function, "__func__", function)
    if isinstance(value, functools.partial):
        return (_parts(value.func, seen), repr(value.args), repr(value.keywords))
    if isinstance(value, BuiltinFunctionType):  # its repr has an address
        return value.__module__, value.__qualname__
    code = getattr(function, "__code__", None)
    if code is None:
        return _text(value)
    if id(function) in seen:
        return function.__qualname__
    seen.add(id(function))
    cells = [c.cell_contents for c in function.__closure__ or () if c is not None and is_filled(c)]
    known = function.__globals__
    read = [(n, known[n]) for n in sorted(_names(code)) if n in known]
    return (
        _file_digest(code.co_filename), function.__qualname__, code.co_firstlineno, _content(code),
        repr(function.__defaults__), repr(function.__kwdefaults__), [_parts(c, seen) for c in cells],
        [(n, _elsewhere(v, code.co_filename) or _parts(v, seen)) for n, v in read],
    )  # fmt: skip


def _text(value: Any) -> str:
    """The repr of a value; for what has a long one, or an incomplete one like a tensor, a text that no other value has."""
    try:
        if not isinstance(value, torch.Tensor) and (not isinstance(value, Sized) or len(value) < 1000):
            return repr(value)
    except Exception:  # of a class of the user's
        pass
    return f"{type(value).__qualname__} {secrets.token_hex(8)}"


def _elsewhere(value: Any, path: str) -> Any:
    """The file and the name of a function in another file than this one; None for anything else."""
    code = getattr(value, "__code__", None)
    if code is None or code.co_filename == path:
        return None
    return _file_digest(code.co_filename), value.__qualname__


def _content(code: CodeType) -> Any:
    """All that tells this code from that of another function on the same line."""
    constants = [_content(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return digest(code.co_code), code.co_names, code.co_varnames, constants


def _names(code: CodeType) -> set[str]:
    """Names of globals, and of attributes, that the code and the functions inside of it read."""
    return {*code.co_names}.union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def is_filled(cell: Any) -> bool:
    """Whether the cell of a closure has a value yet."""
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
