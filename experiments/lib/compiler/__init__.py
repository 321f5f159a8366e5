"""Analysis of compiled XLA programs and their memory traffic."""
