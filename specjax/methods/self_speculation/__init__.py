"""Drafters that run part of the target: some of its layers, or its cache."""

from specjax.methods.records import Family
from specjax.methods.self_speculation import early_exit
from specjax.methods.self_speculation import hierarchy
from specjax.methods.self_speculation import kangaroo
from specjax.methods.self_speculation import layer_skip_objective
from specjax.methods.self_speculation import skip_search
from specjax.methods.self_speculation import skipping

FAMILY = Family(
    drafters=(early_exit.EarlyExit, hierarchy.Hierarchy, kangaroo.Kangaroo,
        skipping.Swift),
    strategies=(early_exit.early_exit, hierarchy.triforce, kangaroo.kangaroo,
        skip_search.draft_and_verify, skipping.swift),
    objectives=(kangaroo.KangarooObjective,
        layer_skip_objective.LayerSkipObjective),
    methods=(kangaroo.KANGAROO,))
