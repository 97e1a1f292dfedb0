"""A simulated engine that comes up only when others are there. Run as a script, with the engine's arguments.

Environment: ``DOORMAN_FOLDER``; ``DOORMAN_NAME``, made there as a file when this engine was started;
``DOORMAN_WAITS_FOR``, names (with commas between) that have to be there before it goes on. ``DOORMAN_LAST_WORDS`` is
what it prints when it is asked to end before that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

FOLDER = Path(os.environ["DOORMAN_FOLDER"])
AWAITED = [name for name in os.environ.get("DOORMAN_WAITS_FOR", "").split(",") if name]
NEVER = threading.Event()


def last_words(*_: object) -> None:
    print(os.environ.get("DOORMAN_LAST_WORDS", ""), flush=True)
    os._exit(1)


signal.signal(signal.SIGTERM, last_words)
(FOLDER / os.environ["DOORMAN_NAME"]).touch()
while not all((FOLDER / name).exists() for name in AWAITED):
    NEVER.wait(0.01)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.execv(sys.executable, (sys.executable, "-m", "pytest_kvbudget.mock", "serve", *sys.argv[1:]))
