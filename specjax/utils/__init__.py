"""Helpers without dependencies on decoding: fields, files, processes, rows."""
