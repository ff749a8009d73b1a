"""Sizes as Kubernetes writes them: `512Mi`, `1.5`, `250m`."""

from decimal import Decimal, InvalidOperation

_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}


def parse_quantity(text: object) -> float | None:
    """Return the number; None for what is no quantity."""
    word = str(text).strip()
    number = word.rstrip("kmKMGTi")
    scale = _SUFFIXES.get(word[len(number) :])
    try:
        return float(Decimal(number) * scale) if scale is not None else None
    except InvalidOperation:
        return None


def parse_mebibytes(text: object) -> int | None:
    """Return a size in MiB, rounded down; None for what is no quantity."""
    value = parse_quantity(text)
    return None if value is None else int(value) >> 20
