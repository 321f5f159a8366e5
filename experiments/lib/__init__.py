"""Modules that the experiment scripts share."""

from lib import progress

progress.importing()
