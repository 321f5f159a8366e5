"""Experiment scripts.

Run a script by its path, or as a module: `python -m experiments.generate`.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
