"""DeepSpeed 0.19.8's first write logs a warning inside ``std::call_once``: a second thread that comes to it
meanwhile waits with the GIL held, and the process hangs for good. ``AsyncIO`` makes its first write alone."""

import subprocess
import sys

from ssd_io import async_io

CHILD = """
import logging, sys, threading, time
import torch
from deepspeed.utils import logger
from ssd_io import async_io

class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.2)  # gives up the GIL, as any log file does

logger.addHandler(Slow())
io, memory = async_io(), torch.zeros(4096, dtype=torch.uint8)
paths = [f"{sys.argv[1]}/{index}" for index in range(2)]
for path in paths:
    open(path, "wb").write(bytes(4096))
threads = [threading.Thread(target=io.write, args=(path, memory)) for path in paths]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_two_threads_come_to_the_first_write(tmp_path):
    async_io()  # or skip
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
