"""How much memory something would need, said before it is allocated."""

import ctypes
import os

from anyformer.errors import AnyformerError


def available_bytes() -> int | None:
    """Physical memory that can be had now (on Linux with what the page cache can give back), or None where unknown."""
    try:
        with open("/proc/meminfo") as table:
            for line in table:
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees: a loop that frees and takes the same large blocks each step then does not ask the system for
    fresh, zeroed pages each time. Returns whether the C library knows how (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    return bool(mallopt(mmap, 2**30)) and bool(mallopt(trim, 2**31 - 1))


def human_bytes(count: int) -> str:
    """``1536`` -> ``1.5 KiB``; sizes beyond any machine in powers of ten."""
    if count >= 2**80:
        return f"{approximate(count)} bytes"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def approximate(count: int) -> str:
    """An integer in a few characters: exact below a million, else ``1.2e+48``, of any size."""
    if abs(count) < 10**6:
        return str(count)
    shift = max(0, count.bit_length() - 1000)
    exponent = 0
    if shift:  # too large for a float: move the decimal point first
        digits = int(shift * 0.3010299956639812)
        count, exponent = count // 10**digits, digits
    mantissa, _, power = f"{float(count):.1e}".partition("e")
    return f"{mantissa}e+{int(power) + exponent}"


def require_memory(count: int, what: str) -> None:
    """Raise :class:`AnyformerError` where ``count`` bytes do not fit the free memory, saying how much is needed."""
    free = available_bytes()
    if count >= 2**62 or (free is not None and count > free):
        have = "" if free is None else f", {human_bytes(free)} are free"
        raise AnyformerError(
            f"{what} needs {human_bytes(count)} of memory{have}; choose a smaller class or another backbone (stored-program has linear width)"
        )
