"""A context around the body of a function, a generator or a coroutine, active only while the body runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["decorated"]


def decorated(function: Any, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    """``function`` with its body inside ``context()``.

    A generator, a coroutine and an asynchronous generator enter it for each step, until they yield or wait.

    Args:
        function: the decorated function.
        context: called for each call, or each step; its result is entered and left around it.

    Returns:
        A function of the same kind.

    Raises:
        TypeError: a class, which has no body to run under the rules, or an object that cannot be called.
    """
    if inspect.isclass(function) or not callable(function):
        raise TypeError(
            f"a function is decorated, got {function!r}; of a class, decorate the methods, such as __init__ or forward"
        )
    inside: Callable[..., Any]
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            body = function(*args, **kwargs)
            step = body.__anext__()
            while True:
                try:
                    value = await _Steps(step.__await__(), context)
                except StopAsyncIteration:
                    return
                try:
                    sent = yield value
                except GeneratorExit:
                    await _Steps(body.aclose().__await__(), context)
                    raise
                except BaseException as error:
                    step = body.athrow(error)
                else:
                    step = body.asend(sent)

    elif inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(function(*args, **kwargs).__await__(), context)

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            return (yield from _Steps(function(*args, **kwargs), context))

    else:

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

    return inside


class _Steps(Generator[Any, Any, Any]):
    """A generator, or the awaitable of a coroutine, whose every step runs inside the context."""

    def __init__(self, body: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._body = body
        self._context = context

    def send(self, value: Any) -> Any:
        with self._context():
            return self._body.send(value)

    def throw(self, *error: Any) -> Any:
        with self._context():
            return self._body.throw(*error)

    def close(self) -> None:
        with self._context():
            self._body.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self
