"""Formulas of the documents' tables, read as they are written: `$2(n-1)S/n$`."""

import math
import re
from collections.abc import Callable, Mapping

TOKENS = re.compile(r"\\[A-Za-z]+(?:_\w)?|[A-Za-z](?:_\w)?|\d+(?:\.\d+)?|[-+/()^,]")
CALLED: Mapping[str, Callable[..., float]] = {
    "max": max, "sqrt": math.sqrt, "sin": math.sin,
    "binom": lambda n, k: float(math.comb(int(n), int(k))),
}  # fmt: skip
FUNCTIONS = {rf"\{name}": name for name in CALLED}


def formulas(cell: str) -> list[str]:
    """Formulas of a cell."""
    return re.findall(r"\$([^$]+)\$", cell)


def tabled(page: str, heading: str) -> dict[str, list[str]]:
    """Rows of the one table under a heading of a page: their further cells, by the first one."""
    _, found, section = page.partition(f"\n## {heading}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert found and lines, f"no table under {heading!r}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows[2:]}


def value(formula: str, symbols: Mapping[str, float]) -> float:
    """A formula's value: neighbours are multiplied, / goes from left to right. Symbols are letters,
    maybe with a small one, or `\\Psi`. Raises ValueError for anything but these, numbers, + - / ^,
    brackets, `\\max(a, b)`, `\\sin(a)`, `\\sqrt{a}` and `\\binom{a}{b}`."""
    formula = formula.replace("}{", ",").replace("{", "(").replace("}", ")")
    tokens = TOKENS.findall(formula)
    if "".join(tokens) != formula.replace(" ", ""):
        raise ValueError(f"formula {formula!r}: {formula.replace(' ', '')} has more than {tokens}")
    written, before = "", ""
    for token in tokens:
        if before and before not in (*"+-/(^,", *FUNCTIONS) and token not in (*"+-/)^,",):
            written += "*"
        written += FUNCTIONS.get(token) or _number(token, symbols)
        before = token
    return float(eval(written, {"__builtins__": {}, **CALLED}))


def _number(token: str, symbols: Mapping[str, float]) -> str:
    """A symbol's value, or a number or mark as Python has it."""
    name = token.lstrip("\\")
    return repr(float(symbols[name])) if name[:1].isalpha() else token.replace("^", "**")
