"""Sphinx's configuration: pages in MyST Markdown, the reference from docstrings, tables from the registries.

`make site` builds it, with warnings as errors. Nothing is fetched, at build time or by the pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import docstrings  # noqa: E402
import reference  # noqa: E402
import tables  # noqa: E402

import normlab  # noqa: E402

project = "normlab"
author = "The normlab authors"
copyright = author
version = release = normlab.__version__

extensions = [
    "myst_parser",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "substitution"]
myst_heading_anchors = 3
myst_substitutions = tables.substitutions()

# A wrong reference to a name of ours is an error; names of other packages have no page here to lead to.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!normlab).*"), *reference.UNDOCUMENTED]
default_role = "code"
smartquotes = False  # of "(..., d)", for one
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = False
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "normlab"
html_baseurl = tables.URLS.get("Documentation", "")
html_static_path = ["_static"]
html_css_files = ["normlab.css"]
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
# Pages of no section have no navigation of one.
html_sidebars = dict.fromkeys(
    ("index", "explorer", "notebooks/index", "measure", "train", "numbers", "statistics", "contributing"), []
)
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "normlab"},
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_prev_next": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [
        {"name": "Repository", "url": url, "icon": "fa-brands fa-github"}
        for name, url in tables.URLS.items()
        if name == "Repository"
    ],
}


def setup(app) -> None:
    app.connect("builder-inited", lambda app: reference.write_pages(Path(app.srcdir) / "reference" / "api"))
    app.connect("autodoc-process-docstring", docstrings.to_rst, priority=400)  # before napoleon
