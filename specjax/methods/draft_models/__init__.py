"""Drafting with a second, smaller language model: chains and trees."""
