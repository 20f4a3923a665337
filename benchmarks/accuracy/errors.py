"""What can be wrong with a run, told to the user without a traceback."""

from __future__ import annotations

from hsa_compile.errors import HsaError


class AccuracyError(HsaError, ValueError):
    """An option, a text or a file of results that cannot be used; the message says what is valid."""
