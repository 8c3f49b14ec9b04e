"""Real gloo ranks for tests, cheaply: a zygote imports everything once, every case is a fork of it.

Importing torch, DeepSpeed and transformers takes about ten seconds a process; a fork takes
milliseconds, and each case still gets fresh processes, which start, train and end on their own.

A case is a top-level function of a test module. :meth:`Ranks.run` calls it on every rank and returns
the ranks' results in order; a rank that raises or hangs fails the test by the case's name.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import forked

# Seconds a case may take. The slowest needs ten, on a loaded machine far more. Below pytest's own limit.
TIMEOUT = 540.0
# Seconds that the others have once a rank died, to notice and to say so; they need one, on a loaded machine more. Where
# a rank is killed on purpose nobody reads what the others say, and some of DeepSpeed's collectives never notice.
GRACE, GRACE_ON_PURPOSE = 30.0, 1.0


class CaseFailed(AssertionError):
    """A case raised or hung on some rank."""


class Ranks:
    """Client of the zygote: ``run(case, world, *args)`` returns one result per rank."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)  # with the folder of every collected test
        self._zygote = subprocess.Popen(
            [sys.executable, "-u", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def preload(self, *modules: str) -> None:
        """Import modules in the zygote, once for all cases that follow."""
        self._ask({"preload": modules})

    def command(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What ``python SCRIPT ARGUMENTS`` returns and prints, in a fork that is no rank of any group."""
        with tempfile.TemporaryDirectory() as folder:
            code = self._ask({"command": script, "arguments": arguments, "folder": folder})
            out, err = forked.output_of(folder)
        return subprocess.CompletedProcess([script, *arguments], code, out, err)

    def _ask(self, job: dict[str, Any]) -> Any:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(job) + "\n")
        self._zygote.stdin.flush()
        answer = self._zygote.stdout.readline()
        if not answer:
            raise CaseFailed("the zygote process is gone")
        return json.loads(answer)

    def run(self, case: Callable[..., Any], world: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Results of ``case(*args, **kwargs)`` on ranks 0 .. world - 1.

        Raises:
            CaseFailed: with the case's name and the end of every failed rank's output.
        """
        codes, results, logs = self._attempt(GRACE, case, world, args, kwargs)
        if any(codes):
            tails = "\n".join(
                f"--- rank {r}, exit {c}\n{logs[r][-4000:]}" for r, c in enumerate(codes)
            )
            raise CaseFailed(f"{case.__name__}{args}{kwargs} on {world} ranks failed:\n{tails}")
        return results

    def attempt(
        self, case: Callable[..., Any], world: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[Any], list[str]]:
        """Like :meth:`run`, for cases that are meant to die: exit codes, results, outputs by rank."""
        return self._attempt(GRACE_ON_PURPOSE, case, world, args, kwargs)

    def _attempt(
        self,
        grace: float,
        case: Callable[..., Any],
        world: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[list[int], list[Any], list[str]]:
        import torch

        with tempfile.TemporaryDirectory() as folder:
            torch.save((args, kwargs), f"{folder}/arguments.pt")
            job = {
                "folder": folder,
                "world": world,
                "module": case.__module__,
                "case": case.__qualname__,
                "timeout": TIMEOUT,
                "grace": grace,
            }
            codes = self._ask(job)
            results, logs = [], []
            for rank in range(world):
                path = f"{folder}/result{rank}.pt"
                found = os.path.exists(path)
                results.append(torch.load(path, weights_only=False) if found else None)
                with open(f"{folder}/rank{rank}.log", errors="replace") as file:
                    logs.append(file.read())
        return codes, results, logs

    def close(self) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(timeout=TIMEOUT)


# -- inside the zygote and its children --------------------------------------------------------------


def _reserved_port() -> socket.socket:
    """Bound, not listening: the job's store may listen there, and no other socket is given the port."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("", 0))
    return probe


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import deepspeed  # noqa: F401  what every case needs, imported once
    import pytest  # noqa: F401
    import torch
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
    from operators import load
    from training import tiny_llama

    import hmt_deepspeed
    from hmt_deepspeed.kernels.noise import normal_quantiles

    # An engine imports what it needs when it needs it: a tenth of a second on every rank.
    for module in pkgutil.walk_packages(hmt_deepspeed.__path__, "hmt_deepspeed."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in ("auto_ep_config", "auto_ep_layer"):  # in every engine
        importlib.import_module(f"deepspeed.module_inject.{name}")
    # DeepSpeed's engines with other optimizers, to know Muon, whose functions are compiled: torch's compiler takes each rank
    # two seconds and a half to import.
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    normal_quantiles(torch.device("cpu"))
    load()  # half a second each, in every case; they start no thread before a step
    tiny_llama()  # what the first model of a process is late with
    assert torch.get_num_threads() == 1  # a pool of threads would not survive the fork
    gc.collect()
    gc.freeze()  # a case collects its own objects, not a million of modules whose pages it would have to copy
    for line in sys.stdin:
        print(json.dumps(_run_job(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # an orderly end takes a second and finds what was frozen


def _run_job(job: dict[str, Any]) -> list[int] | int:
    if "command" in job:
        return forked.fork(job["command"], job["arguments"], job["folder"])
    for module in job.get("preload", ()):
        importlib.import_module(module)
    if "preload" in job:
        return []
    pids = []
    with _reserved_port() as probe:
        port = int(probe.getsockname()[1])
        for rank in range(job["world"]):
            pid = os.fork()
            if pid == 0:
                _child(job, rank, port)
            pids.append(pid)
        codes = _wait(pids, job["timeout"], job["grace"])
    return codes


def _wait(pids: list[int], timeout: float, grace: float) -> list[int]:
    """Exit codes; a rank alive after the timeout, or so many seconds after another died, is killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGUSR1)  # the stack of a rank that hangs, into its log
                    time.sleep(0.2)
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def _child(job: dict[str, Any], rank: int, port: int) -> None:
    """One rank: own output file, own process group, case, clean end. Never returns."""
    import faulthandler

    import torch
    import torch.distributed as dist

    log = os.open(f"{job['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world"]}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    code = 1
    try:
        import deepspeed

        case = getattr(importlib.import_module(job["module"]), job["case"])
        args, kwargs = torch.load(f"{job['folder']}/arguments.pt", weights_only=False)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        # Had it been there before, a collective that only DeepSpeed's inference calls had filled 69 MB of shared memory
        # a rank, which takes as long as a small case.
        os.environ["LOCAL_SIZE"] = str(job["world"])
        torch.manual_seed(1234)
        result = case(*args, **kwargs)
        torch.save(result, f"{job['folder']}/result{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
