"""The gallery: a page for each example, from its docstring and its code."""

from __future__ import annotations

import ast
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
    for file in sorted(EXAMPLES.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(text)) or PLAIN.get(file.stem)
        if not doc:
            raise ValueError(f"{file} has no docstring, with which its page begins")
        title, _, rest = doc.partition("\n\n")
        title = title.replace("\n", " ")
        rows.append([f"[{file.stem}]({file.stem}.md)", title])
        names.append(file.stem)
        page = [f"# {file.stem}\n", f"{title}\n", f"{rest}\n", f"`examples/{file.name}`:\n"]
        body = text.partition('"""\n\n')[2] if text.startswith('"""') else text
        yield f"gallery/{file.stem}.md", "\n".join([*page, code(body, "python")])
    tree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    yield "generated/gallery.md", table(("example", "what it shows"), rows)
    yield "generated/gallery_tree.md", tree + "\n"
