"""Training of targets and drafters.

Import the modules of this package. `loop` trains with any objective of
`specjax.objectives`, and `runs` manages the directory of a run. `optimizers`
contains the optimisers, `distillation` generates training data with a target,
`evaluation` measures heads and models, and `calibration` fits confidence heads.
`specjax.methods` describes each trained drafting method.

>>> from specjax import objectives
>>> from specjax.training import loop
"""
