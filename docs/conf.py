"""Configuration of the documentation site: `make -C docs html`."""

import pathlib
import sys

_DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(_DOCS), str(_DOCS.parent)]

import specjax  # noqa: E402

project = "specjax"
author = "The specjax authors"
copyright = "The specjax authors, Apache-2.0"
version = release = specjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "site_extension",
]
exclude_patterns = ["_build", "README.md"]
default_role = "code"
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["dollarmath"]
# Attributes of components have equal names, so links to them are ambiguous.
suppress_warnings = ["ref.python"]

myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are shown with their stored outputs

html_theme = "furo"
html_title = "specjax"
html_show_sphinx = False
html_show_copyright = False
