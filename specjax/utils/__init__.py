"""Helpers that know nothing of decoding: fields, files, processes, rows."""
