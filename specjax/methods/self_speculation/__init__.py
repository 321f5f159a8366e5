"""Drafting with a part of the target's own layers or cache."""
