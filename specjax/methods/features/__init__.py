"""Drafting with a layer on the target's features: EAGLE and MTP."""
