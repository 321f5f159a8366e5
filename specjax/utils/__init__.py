"""Helpers that do not depend on decoding.

`fields` checks configurations, `files` writes files atomically, `fingerprints`
hashes settings and data, and `processes` coordinates several processes.
"""
