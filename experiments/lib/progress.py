"""Prints progress on stderr, including the import of the libraries.

This file imports only the standard library, because it runs before jax is
imported.
"""

import os
import pathlib
import signal
import sys
import threading
from typing import Any

_SILENT = 1.0  # slower imports are reported (in seconds)
_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1]
_timer = None


def say(stage: str) -> None:
  """Prints the name of a stage that starts now, such as "compiling"."""
  print(f"{stage} ...", file=sys.stderr, flush=True)


def is_script() -> bool:
  """Returns True if the main program is an experiment script."""
  main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
  return pathlib.Path(main).resolve().parent == _EXPERIMENTS


def importing() -> None:
  """Reports slow imports, and makes Ctrl-C stop them with a one-line message.

  Importing jax takes seconds, and the error handling of `common.run` starts
  only afterwards.
  """
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
  global _timer
  _timer = threading.Timer(_SILENT, say, ["importing jax and specjax"])
  _timer.daemon = True
  if not any(arg.lstrip("-").startswith("help") for arg in sys.argv[1:]):
    _timer.start()


def imported() -> None:
  """Restores the handler of Ctrl-C and stops the timer of `importing`."""
  if _timer is not None:
    _timer.cancel()
  if signal.getsignal(signal.SIGINT) is _stop:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: Any):
  """Ends the program without an exception, because imports may catch it."""
  del frame
  os.write(2, b"\nstopped by Ctrl-C\n")
  os._exit(128 + number)
