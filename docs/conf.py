"""The settings of the site that `make docs` builds of these pages."""

import logging
from importlib.metadata import version as version_of

for name in ("torchao", "torch.utils._pytree", "bitsandbytes"):  # which tell what they could not load
    logging.getLogger(name).setLevel(logging.ERROR)

project = "seqtile"
author = "The seqtile authors"
copyright = "The seqtile authors, Apache-2.0"
version = release = version_of("seqtile")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = []

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_rtype = False
default_role = "code"  # a name in single backticks, as docstrings have them
nitpick_ignore_regex = [("py:.*", r"(?!seqtile\.).*")]  # names of other packages

html_theme = "furo"
html_title = f"seqtile {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
