"""Training of targets and drafters; import the modules of this package.

`loop` is the one training loop and `runs` keeps its directory, `objectives` are
the losses and `optimizers` what minimises them, `methods` has one record for
each way in which a target drafts for itself, `distillation` makes the data that
a target writes, `evaluation` measures, `calibration` fits confidence heads, and
`skip_search` looks for layers to leave out.

>>> from specjax import objectives
>>> from specjax.training import loop
"""
