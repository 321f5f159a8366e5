"""Published drafters: read into heads of a target, and written from them.

A layout is a record of `layouts.py`: where its files are known by, which table
of `tables.py` names its tensors, which function of `readings.py` makes of its
configuration what this library has, and which one of `writings.py` does the
reverse, for the layouts that servers read.
"""

from specjax.methods.published.export import export_drafter
from specjax.methods.published.export import layouts_for
from specjax.methods.published.export import WRITTEN
from specjax.methods.published.layouts import LAYOUTS
from specjax.methods.published.load import drafter_layout
from specjax.methods.published.load import load_drafter

__all__ = ["LAYOUTS", "WRITTEN", "drafter_layout", "export_drafter",
           "layouts_for", "load_drafter"]
