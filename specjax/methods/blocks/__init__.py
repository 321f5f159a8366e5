"""Methods that draft a block of tokens in one pass: DFlash and relatives."""

from specjax.methods.blocks import parallel_drafter
from specjax.methods.blocks import parallel_objective
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(parallel_drafter.Parallel,),
    strategies=(parallel_drafter.ddtree, parallel_drafter.parallel),
    objectives=(parallel_objective.ParallelObjective,),
    methods=(parallel_objective.PARALLEL,))
