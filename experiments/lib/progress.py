"""Progress lines on stderr, from the import of the libraries on.

This file imports the standard library alone: it runs before jax is imported.
"""

import os
import pathlib
import signal
import sys
import threading
from typing import Any

_SILENT = 1.0  # seconds of imports after which a line says so
_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1]
_timer = None


def say(stage: str) -> None:
  """Prints the stage that begins, such as "compiling", at once."""
  print(f"{stage} ...", file=sys.stderr, flush=True)


def importing() -> None:
  """Reports slow imports, and ends them by one line after Ctrl-C.

  Importing jax takes seconds, and `common.run` can catch nothing before it.
  Only a script of this directory is treated so, not a program that imports
  from it.
  """
  main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
  if pathlib.Path(main).resolve().parent != _EXPERIMENTS:
    return
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
  global _timer
  _timer = threading.Timer(_SILENT, say, ["importing jax and specjax"])
  _timer.daemon = True
  if not any(arg.lstrip("-").startswith("help") for arg in sys.argv[1:]):
    _timer.start()


def imported() -> None:
  """Ends what `importing` began."""
  if _timer is not None:
    _timer.cancel()
  if signal.getsignal(signal.SIGINT) is _stop:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: Any):
  """Ends the program: an import would swallow or garble an exception."""
  del frame
  os.write(2, b"\nstopped by Ctrl-C\n")
  os._exit(128 + number)
