"""Drafting a whole block of tokens in one pass: DFlash and DSpark."""
