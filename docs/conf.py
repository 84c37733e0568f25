"""Settings of Sphinx. `python -m scripts.build_docs` builds the site, generated pages included."""

project = "Meshwright"
author = "The Meshwright authors"
copyright = author
html_title = "Meshwright"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

extensions = ["myst_parser", "sphinx_design", "sphinx.ext.mathjax"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["generated/**", "**/_*.md"]
nitpicky = False
suppress_warnings = ["misc.highlighting_failure"]

myst_enable_extensions = [
    "amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath", "fieldlist",
]  # fmt: skip
myst_heading_anchors = 4
python_maximum_signature_line_length = 80
