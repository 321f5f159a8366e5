"""Drafters that read the target's features: EAGLE, MTP and assistants."""

from specjax.methods.features import assistant
from specjax.methods.features import eagle
from specjax.methods.features import eagle_objective
from specjax.methods.features import mtp
from specjax.methods.features import mtp_objective
from specjax.methods.features import peagle_objective
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(eagle.FeatureLayer, eagle.PEagle, mtp.FeatureModules,
              assistant.Assistant),
    strategies=(eagle.eagle, eagle.eagle_dynamic, eagle.eagle_sampled, mtp.mtp),
    objectives=(eagle_objective.Eagle1Objective,
        eagle_objective.Eagle3Objective, mtp_objective.MTPJointObjective,
        mtp_objective.MTPObjective, peagle_objective.PEagleObjective),
    methods=(eagle_objective.EAGLE_1, eagle_objective.EAGLE_3,
        peagle_objective.P_EAGLE, mtp_objective.MTP,
        mtp_objective.PARALLEL_LAYERS))
