"""A process's folder is gone when the process is, however it ended."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.memory.own_folder import OwnFolder

CHILD = """
import os, sys, time
from hmt_deepspeed.memory.own_folder import OwnFolder
folder = OwnFolder(sys.argv[1])
open(folder.path + "/1.bin", "w").close()
print(folder.path, flush=True)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit()  # runs the exit handlers of the parent's objects
    os.wait()
    assert os.path.exists(folder.path)
elif sys.argv[2] == "stay":
    time.sleep(60)
"""


def child(base, how):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(base), how], stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_a_killed_process_is_cleaned_up_after_and_a_living_one_is_not(tmp_path):
    process, path = child(tmp_path, "stay")
    assert list(path.glob("*.bin"))
    neighbour = OwnFolder(str(tmp_path))
    assert list(path.glob("*.bin"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(path.glob("*.bin"))  # nobody could
    (tmp_path / "not ours").mkdir()
    (tmp_path / "hmt-swap-a-file").write_text("not ours either")
    OwnFolder(str(tmp_path)).close()
    assert not path.exists()
    assert Path(neighbour.path).exists()
    assert (tmp_path / "not ours").exists()
    assert (tmp_path / "hmt-swap-a-file").exists()


@pytest.mark.parametrize("how", ["leave", "fork"])
def test_a_process_cleans_up_at_exit(tmp_path, how):
    process, path = child(tmp_path, how)
    assert process.wait() == 0
    assert path.parent == tmp_path
    assert not path.exists()


def test_close_is_idempotent(tmp_path):
    folder = OwnFolder(str(tmp_path))
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    folder.close()
    folder.close()
    assert not os.path.exists(folder.path)


def test_a_base_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot make a folder for swap files in .*file"):
        OwnFolder(str(tmp_path / "file"))
