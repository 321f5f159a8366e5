"""Drafting with heads on the last hidden state, or look-ahead tokens."""
