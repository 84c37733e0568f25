"""The gallery: a page for each example, from its docstring and its code."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from scripts.site.markdown import code, table

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = {  # of those that are read without a docstring
    "ten_lines": "Plan and train a GPT-2 in ten lines.\n\n    torchrun --nproc-per-node 4 "
    "examples/ten_lines.py"
}


def files() -> Iterator[tuple[str, str]]:
    """The list, and each example's page."""
    rows, names = [], []
    for file in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]):
        text = file.read_text(encoding="utf-8")
        first, page = _notebook(text) if file.suffix == ".ipynb" else _script(file.stem, text)
        rows.append([f"[{file.stem}]({file.stem}.md)", first])
        names.append(file.stem)
        head = f"# {file.stem}\n\n{first}\n\n`examples/{file.name}`\n"
        yield f"gallery/{file.stem}.md", f"{head}\n{page}"
    tree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    yield "generated/gallery.md", table(("example", "what it shows"), rows)
    yield "generated/gallery_tree.md", tree + "\n"


def _script(name: str, text: str) -> tuple[str, str]:
    """The first sentence of a script, then the rest of its docstring and its code. ValueError
    without a docstring."""
    doc = ast.get_docstring(ast.parse(text)) or PLAIN.get(name)
    if not doc:
        raise ValueError(f"examples/{name}.py has no docstring, with which its page begins")
    first, _, rest = doc.partition("\n\n")
    body = text.partition('"""\n\n')[2] if text.startswith('"""') else text
    return first.replace("\n", " "), f"{rest}\n\n{code(body, 'python')}"


def _notebook(text: str) -> tuple[str, str]:
    """The title of a notebook, then its cells."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    title, _, rest = cells[0][1].lstrip("# ").partition("\n")
    shown = [part if kind == "markdown" else code(part, "python") for kind, part in cells[1:]]
    return title, "\n\n".join([rest.strip(), *shown])
