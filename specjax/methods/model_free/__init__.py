"""Drafting without a model: from the text itself, or from a datastore."""
