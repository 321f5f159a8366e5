"""Drafting with heads on the last hidden state: Medusa, Hydra, PaSS, blockwise."""
