"""How the loops of the rans coder are compiled and where the machine code is kept.

Without numba they stay what they are, functions that Python could run, slowly; nothing calls them then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

try:
    import numba
except ImportError:
    # Not installed, or of a version that this NumPy or Python does not go with.
    numba = None

AVAILABLE = numba is not None and not numba.config.DISABLE_JIT
"""Whether the loops can be compiled."""

Function = Callable[..., Any]


def inner(function: Function) -> Function:
    """Compile a function that only compiled ones call."""
    if not AVAILABLE:
        return function
    # Nothing calls it from Python, so it needs no way in from there: that saves time to compile.
    made: Function = numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return made


def entry(function: Function) -> Function:
    """Compile a function at its first call, with all that it calls; keep the machine code for later processes.

    It runs without the GIL. NUMBA_CACHE_DIR says where the code is kept, if not beside the source or in the user's
    cache.
    """
    if not AVAILABLE:
        return function
    # Whether kept code is still good numba sees from the file of this function alone, not from those of the functions
    # that went into it; so the name under which it is kept names all of them.
    function.__qualname__ += f"_{digest_of_sources()}"
    try:
        made: Function = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # There is no folder to write to: every process compiles for itself.
        made = numba.njit(nogil=True)(function)
    return made


def source_paths() -> tuple[Path, ...]:
    """Return the files that the machine code is made from: the loops, and the constants that are compiled into them."""
    folder = Path(__file__).parent
    return (*sorted(folder.glob("rans_*loops.py")), folder / "rans_units.py", folder / "rans_directory.py")


@cache
def digest_of_sources() -> str:
    """Return what names a version of them."""
    digest = xxhash.xxh3_64()
    for path in source_paths():
        digest.update(path.read_bytes())
    return digest.hexdigest()
