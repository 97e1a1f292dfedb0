"""Holds leases until it is killed. Run as a script: names of one candidate, comma-separated."""

from __future__ import annotations

import signal
import sys

from pytest_kvbudget.device.leases import acquire

names = tuple(sys.argv[1].split(","))
lease = acquire([(names, names)], run="other-run", purpose="r9700: max_model_len=262144", timeout_s=20.0)
print("held", flush=True)
signal.pause()
