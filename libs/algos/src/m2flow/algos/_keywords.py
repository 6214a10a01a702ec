"""What an unknown keyword is answered with; Python's own message says what it got, and not what there is."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from m2flow.algos.errors import KeywordError

P = ParamSpec("P")
R = TypeVar("R")


def keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which now raises KeywordError with the nearest keyword for one that it does not have."""
    known = tuple(signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise KeywordError(_message(function.__name__, name, known))
        return function(*args, **kwargs)

    return checked


def _message(function: str, name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name, known, 1)
    remedy = f"did you mean {near[0]}?" if near else "leave it out"
    return f"{function}: got the keyword {name}, want one of {', '.join(known)}: {remedy}"
