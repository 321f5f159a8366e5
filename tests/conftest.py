"""One backend for the whole suite: its tolerances are those of a CPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
