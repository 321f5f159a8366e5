"""Methods with heads on the last hidden state, or with look-ahead tokens."""

from specjax.methods.heads import blockwise
from specjax.methods.heads import hydra
from specjax.methods.heads import medusa
from specjax.methods.heads import pass_lookahead
from specjax.methods.heads import pass_objective
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(hydra.Hydra, medusa.Medusa, pass_lookahead.LookAhead,
        pass_lookahead.PaSS),
    strategies=(blockwise.blockwise, hydra.hydra, medusa.medusa,
        medusa.sampled_medusa, pass_lookahead.pass_lookahead),
    objectives=(blockwise.BlockwiseObjective, hydra.HydraObjective,
        medusa.MedusaObjective, medusa.MedusaJointObjective,
        pass_objective.PaSSObjective),
    methods=(pass_lookahead.PASS, pass_lookahead.UNO, blockwise.BLOCKWISE,
        medusa.MEDUSA, medusa.MEDUSA_2, hydra.HYDRA))
