"""A registry by name: no duplicates, and a misspelt name is answered with the nearest ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Read-only to its users: a mapping, whose entries are attributes too.

    Raises:
        KeyError, AttributeError: there is no entry of that name; the message names the nearest.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Enter ``entry``. Raises ValueError if the name is taken."""
        if name in self._entries:
            raise ValueError(f"{self._what} {name!r} exists already; a duplicate name is an error")
        self._entries[name] = entry
        return entry

    def missing(self, name: object) -> str:
        """The message for a name that is not here."""
        near = difflib.get_close_matches(str(name), self._entries, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"there is no {self._what} {name!r}{hint}"

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(self.missing(name)) from None

    def __getattr__(self, name: str) -> T:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._entries[name]
        except KeyError:
            raise AttributeError(self.missing(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]
