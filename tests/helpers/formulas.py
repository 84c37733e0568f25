"""Formulas of the documents' tables, read as they are written: `$2(n-1)S/n$`."""

import re
from collections.abc import Mapping

TOKENS = re.compile(r"\\[A-Za-z]+(?:_\w)?|[A-Za-z](?:_\w)?|\d+(?:\.\d+)?|[-+/()^]")


def formulas(cell: str) -> list[str]:
    """Formulas of a cell."""
    return re.findall(r"\$([^$]+)\$", cell)


def value(formula: str, symbols: Mapping[str, float]) -> float:
    """A formula's value: neighbours are multiplied, / goes from left to right. Symbols are letters,
    maybe with a small one, or `\\Psi`. Raises ValueError for anything but these, numbers, + - / ^
    and brackets."""
    tokens = TOKENS.findall(formula)
    if "".join(tokens) != formula.replace(" ", ""):
        raise ValueError(f"formula {formula!r}: {formula.replace(' ', '')} has more than {tokens}")
    written, before = "", ""
    for token in tokens:
        if before and before not in tuple("+-/(^") and token not in tuple("+-/)^"):
            written += "*"
        number = repr(float(symbols[token.lstrip("\\")])) if _is_symbol(token) else token
        written += number.replace("^", "**")
        before = token
    return float(eval(written, {"__builtins__": {}}))


def _is_symbol(token: str) -> bool:
    return token.lstrip("\\")[0].isalpha()
