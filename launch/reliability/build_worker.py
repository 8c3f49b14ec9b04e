"""A process that builds engines of random JSONs one after another and says what became of each.

python -m reliability.build_worker FIRST LAST NVME_PATH     (started by random_configs)
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import sys
import traceback
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import hmt_deepspeed
from benchmarks.setting import free_port, join_ranks
from reliability.engines import raised_by_us, small_model, train_step
from reliability.json_configs import random_config

STEPS = 2
SECONDS_A_CONFIG = 60.0  # one that takes longer hangs: the process says where, and ends


def outcome(config: dict[str, Any]) -> tuple[str, str]:
    """("trained", losses), ("refused", our message) or ("failed", what it ended with)."""
    engine = None
    try:
        model = small_model(layers=1)
        engine, *_ = hmt_deepspeed.initialize(
            model=model, config=config, model_parameters=list(model.parameters())
        )
        losses = [train_step(engine, step) for step in range(STEPS)]
        ok = all(map(math.isfinite, losses))
        return ("trained" if ok else "failed"), str(losses)
    except ValueError as error:
        if raised_by_us(error):
            return "refused", str(error)
        return "failed", traceback.format_exc()
    except Exception:
        return "failed", traceback.format_exc()
    finally:
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.destroy()


def main() -> None:
    first, last, nvme_path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    faulthandler.dump_traceback_later(SECONDS_A_CONFIG, exit=True)
    torch.set_num_threads(1)
    get_accelerator().is_fp16_supported = lambda: True
    join_ranks(0, 1, free_port())
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for seed in range(first, last):
        faulthandler.dump_traceback_later(SECONDS_A_CONFIG, exit=True)
        kind, text = outcome(random_config(seed, nvme_path))
        print(json.dumps({"seed": seed, "outcome": kind, "text": text}), file=answers, flush=True)


if __name__ == "__main__":
    main()
