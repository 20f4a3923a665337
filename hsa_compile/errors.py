"""Errors that the package raises on purpose, and the words they are made of.

A message names the option or field, the value given, what is valid, and the nearest valid spelling.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn


class HsaError(Exception):
    """Base of every error that this package raises on purpose."""


class PolicyError(HsaError, ValueError):
    """A policy, or a file of one, that cannot be used as written."""


class OptionError(HsaError, ValueError):
    """An option of ``torch.compile(..., backend="hsa")`` that is unknown or has a bad value."""


class CalibrationError(HsaError, ValueError):
    """What ``hsa_compile.calibrate`` was given cannot be calibrated with."""


class RewriteError(HsaError, RuntimeError):
    """An attention site was left as it was although ``strict`` is on."""


class CacheError(HsaError, RuntimeError):
    """A KV cache was used in a way that would give a wrong result."""


class HostMemoryError(HsaError, MemoryError):
    """Host memory for a KV cache that cannot be had; nothing was changed, and nothing is kept of it."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid spelling that ``name`` was most likely meant to be, or None where nothing is close.

    Case is ignored, and the end of a dotted name stands for the whole: ``"cudagraphs"`` finds
    ``"triton.cudagraphs"``. Earlier entries of ``valid`` win ties.
    """
    spelling: dict[str, str] = {}
    for candidate in valid:
        spelling.setdefault(candidate.lower(), candidate)
    wanted = name.lower()
    if wanted in spelling:
        return spelling[wanted]
    if wanted:
        for lowered, candidate in spelling.items():
            if lowered.endswith(f".{wanted}"):
                return candidate
    close = difflib.get_close_matches(wanted, spelling, n=1)
    return spelling[close[0]] if close else None


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the end of a message, or ``""`` where nothing is close."""
    guess = nearest(name, valid) if isinstance(name, str) else None
    return "" if guess is None else f"; did you mean {guess!r}?"


def listed(values: Iterable[object]) -> str:
    """``"'a', 'b', 'c'"``: the valid values of a message."""
    return ", ".join(repr(value) for value in values)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put ``where`` before the message of a :class:`PolicyError` raised inside."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from error.__cause__


def refuse(name: str, value: object, valid: str) -> NoReturn:
    """Raise a :class:`PolicyError` for the value of a field; ``valid`` may end with a hint."""
    raise PolicyError(f"{name} {value!r} is not valid; valid: {valid}")


def check_choice(name: str, value: object, valid: Sequence[str]) -> None:
    """Raise a :class:`PolicyError` unless ``value`` is one of the strings ``valid``."""
    if not isinstance(value, str) or value not in valid:
        refuse(name, value, listed(valid) + did_you_mean(value, valid))
