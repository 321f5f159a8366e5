"""Published drafters: read into heads of a target, and written from them.

A layout is a record of `layouts.py`: where its files are known by, which table
of `tables.py` names its tensors, which function of `readings.py` makes of its
configuration what this library has, and which one of `writings.py` does the
reverse, for the layouts that servers read.
"""

from specjax.models.published.drafters.export import export_drafter
from specjax.models.published.drafters.export import layouts_for
from specjax.models.published.drafters.export import WRITTEN
from specjax.models.published.drafters.layouts import LAYOUTS
from specjax.models.published.drafters.load import drafter_layout
from specjax.models.published.drafters.load import load_drafter

__all__ = ["LAYOUTS", "WRITTEN", "drafter_layout", "export_drafter",
           "layouts_for", "load_drafter"]
