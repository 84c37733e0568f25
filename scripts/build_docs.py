"""The documents as a site: what is made from code and records, then Sphinx, warnings as errors.

    python -m scripts.build_docs [--output FOLDER]

`docs/` is copied to FOLDER/source (`build/docs`), with the pages that are generated there alone:
the API from docstrings, the command line from its parsers, schemas, the catalog, the gallery, and
tables of accuracy and measurements from `scripts/recording/results`. FOLDER/html is the site. Exits
with 1 where Sphinx warns or an internal link is broken.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.site import (
    api,
    command_line,
    figures,
    gallery,
    hardware,
    links,
    rules,
    schemas,
    software,
)

ROOT = Path(__file__).resolve().parents[1]
DOCS, BUILT = ROOT / "docs", ROOT / "build" / "docs"


def generated() -> Iterator[tuple[str, str]]:
    """Each generated file, by its path in the documents, and its text."""
    for name, text in api.pages():
        yield f"reference/api/{name}.md", text
    yield "reference/command_line.md", command_line.text()
    yield from schemas.files()
    yield from rules.files()
    yield from hardware.files()
    yield from software.files()
    yield from gallery.files()
    yield from figures.files()


def stage(source: Path) -> None:
    """Make the folder that Sphinx reads anew."""
    if source.exists():
        shutil.rmtree(source)
    shutil.copytree(DOCS, source)
    for name, text in generated():
        file = source / name
        if file.exists():
            raise ValueError(f"docs/{name} is generated: remove it from the repository")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def build(folder: Path) -> list[str]:
    """Make the site; what is wrong with it."""
    source, site = folder / "source", folder / "html"
    stage(source)
    if site.exists():
        shutil.rmtree(site)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html"]
    command += ["-d", str(folder / "doctrees"), str(source), str(site)]
    done = subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        return [done.stderr]
    return list(links.broken(site))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=BUILT, help="folder to build in")
    folder = parser.parse_args().output
    if faults := build(folder):
        raise SystemExit("\n".join(faults))
    print(f"{folder / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
