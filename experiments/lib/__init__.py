"""Modules that the experiment scripts share."""

import sys

from lib import flag_names
from lib import progress

if progress.is_script():
  flag_names.check(sys.argv[1:])
  progress.importing()
