"""Decoders and other generators that studies compare."""
