"""Formulas of the documents' tables, read as they are written: `$2(n-1)S/n$`."""

import re
from collections.abc import Mapping

TOKENS = re.compile(r"\\[A-Za-z]+(?:_\w)?|[A-Za-z](?:_\w)?|\d+(?:\.\d+)?|[-+/()^,]")
FUNCTIONS = {r"\max": "max"}


def formulas(cell: str) -> list[str]:
    """Formulas of a cell."""
    return re.findall(r"\$([^$]+)\$", cell)


def value(formula: str, symbols: Mapping[str, float]) -> float:
    """A formula's value: neighbours are multiplied, / goes from left to right. Symbols are letters,
    maybe with a small one, or `\\Psi`. Raises ValueError for anything but these, numbers, + - / ^,
    brackets and `\\max(a, b)`."""
    tokens = TOKENS.findall(formula)
    if "".join(tokens) != formula.replace(" ", ""):
        raise ValueError(f"formula {formula!r}: {formula.replace(' ', '')} has more than {tokens}")
    written, before = "", ""
    for token in tokens:
        if before and before not in (*"+-/(^,", *FUNCTIONS) and token not in (*"+-/)^,",):
            written += "*"
        written += FUNCTIONS.get(token) or _number(token, symbols)
        before = token
    return float(eval(written, {"__builtins__": {}, "max": max}))


def _number(token: str, symbols: Mapping[str, float]) -> str:
    """A symbol's value, or a number or mark as Python has it."""
    name = token.lstrip("\\")
    return repr(float(symbols[name])) if name[:1].isalpha() else token.replace("^", "**")
