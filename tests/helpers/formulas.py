"""Formulas of the documents' tables, read as they are written: `$2(n-1)S/n$`."""

import re
from collections.abc import Mapping

NAMES = {r"\Psi": "Psi"}  # other symbols are a letter, maybe with a small one: `\Psi_e`
TOKENS = re.compile(r"\\[A-Za-z]+(?:_\w)?|[A-Za-z](?:_\w)?|\d+(?:\.\d+)?|[-+/()]")
OPERAND = re.compile(r"[\w.)]+$"), re.compile(r"[\w(]")


def formulas(cell: str) -> list[str]:
    """Formulas of a cell."""
    return re.findall(r"\$([^$]+)\$", cell)


def value(formula: str, symbols: Mapping[str, float]) -> float:
    """A formula's value: neighbours are multiplied, / goes from left to right. Raises ValueError
    for anything but symbols, numbers, + - / and brackets."""
    tokens = TOKENS.findall(formula)
    if "".join(tokens) != formula.replace(" ", ""):
        raise ValueError(f"formula {formula!r}: {formula.replace(' ', '')} has more than {tokens}")
    written, before = "", ""
    for token in tokens:
        if before and (before == ")" or before[0] not in "+-/(") and token[0] not in "+-/)":
            written += "*"
        written += token if not _is_symbol(token) else repr(float(symbols[token.lstrip("\\")]))
        before = token
    return float(eval(written, {"__builtins__": {}}))


def _is_symbol(token: str) -> bool:
    return token.lstrip("\\")[0].isalpha()
