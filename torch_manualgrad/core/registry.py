"""Registries: tables by name, without duplicates. The error for an unknown name suggests the nearest ones."""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeVar

__all__ = ["Registry", "defined", "defined_ops"]

T = TypeVar("T")

_versions = itertools.count()


class Registry(Mapping[str, T], Generic[T]):
    """A mapping, read-only to users, whose entries are attributes too.

    Args:
        what: the kind of its entries, for messages.
        fill: called before entries are read; it may add entries.
        beside: another registry with the same set of names: no name is in both.
        instead: advice for the error for a taken name.

    Attributes:
        absent: name -> reason, for entries that this torch does not support.

    Raises:
        KeyError, AttributeError: no entry has that name; the message names the nearest.
    """

    def __init__(
        self,
        what: str,
        fill: Callable[[], None] = lambda: None,
        beside: Registry[Any] | None = None,
        instead: str = "",
    ) -> None:
        self._what, self._instead = what, f"; {instead}" if instead else ""
        self._fill = fill
        self._entries: dict[str, T] = {}
        self._version = next(_versions)
        self.absent: dict[str, str] = {}
        self._find: Callable[[Any], list[T]] | None = None
        self._all: list[Registry[Any]] = [self] if beside is None else beside._all  # those with one set of names
        if beside is not None:
            self._all.append(self)

    def add(self, name: str, entry: T) -> T:
        """Add ``entry``. Raises ValueError if the name is taken."""
        self._is_new(name)
        self._entries[name] = entry
        self._version = next(_versions)
        return entry

    def remove(self, name: str) -> T:
        """Remove the entry, and return it."""
        found = self[name]
        del self._entries[name]
        self._version = next(_versions)
        return found

    def without(self, name: str, reason: str) -> None:
        """Record that ``name`` cannot be added here. Raises ValueError if the name is taken."""
        self._is_new(name)
        self.absent[name] = reason

    def find_by(self, find: Callable[[Any], list[T]]) -> None:
        """Set the function that resolves names without an entry. It raises a KeyError if it finds nothing."""
        self._find = find

    def find(self, name: Any) -> list[T]:
        """The entries that a name selects: for rules, the same as in `override`.

        Args:
            name: for rules, the name of an operator with or without its overload, or of a function of torch; or such a
                function or operator itself, or "*".

        Returns:
            The entries, at least one.

        Raises:
            KeyError: there are none; the message names the nearest.
        """
        return [self[name]] if self._find is None else self._find(name)

    def __repr__(self) -> str:
        names = list(map(repr, itertools.islice(self, 3)))
        return f"<registry ({self._what}, {len(self)}): {', '.join([*names, '...'] if len(self) > 3 else names)}>"

    def _is_new(self, name: str) -> None:
        for other in self._all:
            if name in other._entries or name in other.absent:
                raise ValueError(f"{other._what} {name!r} exists already; a duplicate name is an error{other._instead}")

    @property
    def version(self) -> int:
        """A number that changes with the entries and is unique among registries: a key for caches of results."""
        self._fill()
        return self._version

    def missing(self, name: object) -> str:
        """The message for an unknown name."""
        if str(name) in self.absent:
            return self.absent[str(name)]
        if self._find is not None:
            with contextlib.suppress(KeyError, TypeError):
                names = ", ".join(str(getattr(entry, "name", entry)) for entry in self._find(name))
                return (
                    f"there is no {self._what} {name!r}; `find({name!r})` returns the {self._what}s that `override` takes for "
                    f"this name: {names}"
                )
        near = difflib.get_close_matches(str(name), self._entries, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"there is no {self._what} {name!r}{hint}"

    def entered(self) -> list[T]:
        """The entries so far, without loading other packages: for use while this package is imported."""
        return list(self._entries.values())

    def __getitem__(self, name: str) -> T:
        self._fill()
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(self.missing(name)) from None

    def __contains__(self, name: object) -> bool:  # Mapping's own would look for names that are near
        self._fill()
        return name in self._entries

    def __getattr__(self, name: str) -> T:
        if name.startswith("_"):
            raise AttributeError(name)
        self._fill()
        try:
            return self._entries[name]
        except KeyError:
            raise AttributeError(self.missing(name)) from None

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return iter(self._entries)

    # Mapping's own methods look each entry up by name.
    def values(self) -> ValuesView[T]:
        self._fill()
        return self._entries.values()

    def items(self) -> ItemsView[str, T]:
        self._fill()
        return self._entries.items()

    def __len__(self) -> int:
        self._fill()
        return len(self._entries)

    def _ipython_key_completions_(self) -> list[str]:
        """The names that a notebook offers after ``mg.rules["``."""
        return list(self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]


defined_ops: dict[str, Any] = {}  # name -> `CustomOp`, for all of ours


def defined(name: str) -> Any:
    """Our custom op of that name, or None."""
    return defined_ops.get(name)
