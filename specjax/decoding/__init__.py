"""The decoding loop: prefill, rounds, growth of buffers, placement on a mesh.

`decoder.Decoder` is the public object, and `rounds.Round` is one draft, verify
and commit. `rounds_by_length` compiles one round per draft length, among which
a `controller` chooses by `costs`. `constraining` applies constraints to the
rows of a round.
"""
