"""Training of targets and drafters; import the modules of this package.

`loop` trains with any objective of `specjax.objectives`, and `runs` manages the
directory of a run. `optimizers` has the optimisers, `distillation` makes data
that a target writes, `evaluation` measures heads and models, and `calibration`
fits confidence heads. `specjax.methods` has the records of trained methods.

>>> from specjax import objectives
>>> from specjax.training import loop
"""
