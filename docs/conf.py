"""The site of these pages: `scripts/docs` builds it."""

import sys
from pathlib import Path

import trainer_cli

sys.path.insert(0, str(Path(__file__).parent))

project = "trainer-cli"
version = release = trainer_cli.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
myst_heading_anchors = 3
html_theme = "pydata_sphinx_theme"
html_title = project
# All pages in the sidebar, under the headings of the index, instead of the first five in the top bar.
html_sidebars = {"**": ["menu.html"]}
templates_path = ["_templates"]
html_theme_options = {
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "show_prev_next": False,
    "secondary_sidebar_items": [],
}
html_show_sourcelink = False
html_static_path = ["_static"]
html_js_files, html_css_files = ["copy.js"], ["site.css"]
html_show_copyright = False

# The menu lists the headings of a page, not its classes.
toc_object_entries = False
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
