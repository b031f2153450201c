"""A daemon thread that asks a store while Python shuts down."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from partitioner.runtime.process.interruptible import ThreadStore

store = ThreadStore(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)))

def ask():
    while True:
        store.check(["a"])

threading.Thread(target=ask, daemon=True).start()
time.sleep(0.05)
atexit.register(store.end)
raise ValueError("the error of the script")
"""
"""Without the end, torch aborts the process: "terminate called without an active exception"."""


@pytest.mark.slow
def test_a_process_ends_with_its_own_error() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stderr.endswith("ValueError: the error of the script\n")
    assert ended.returncode == 1
