"""Settings of the documentation, which `make docs` builds."""

import legato

project = "legato"
author = "the legato authors"
copyright = "the legato authors"
release = version = legato.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"legato {release}"
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]  # $x$ and $$x$$ are mathematics

# Docstrings are prose: a name in backticks is code, and an indented block is kept as it is.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80


def _as_prose(app, what, name, obj, options, lines):
    """Add what our docstrings leave out: `::` before an indented block, and a blank line before a list."""
    found, literal = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("    ") and not before.strip() and not literal:
            found += ["::", ""]
            literal = True
        elif line.strip() and not line.startswith(" "):
            literal = False
        if line.startswith("- ") and before.strip() and not before.startswith(("- ", "  ")):
            found.append("")
        found.append(line)
    lines[:] = found


def setup(app):
    app.connect("autodoc-process-docstring", _as_prose)
