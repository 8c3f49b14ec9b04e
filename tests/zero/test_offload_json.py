"""The JSON that `hmt-plan --write` gives for states in host memory builds an engine that trains."""

from __future__ import annotations

from typing import Any

from harness import Ranks
from training import make_engine, tiny_llama, train_step


def trained() -> dict[str, Any]:
    from hmt_deepspeed.planner.advise import Request, advise
    from hmt_deepspeed.planner.deepspeed_json import deepspeed_json
    from hmt_deepspeed.planner.families import shape_of_config
    from hmt_deepspeed.planner.hardware import named_machine
    from hmt_deepspeed.planner.memory import OptimizerMode

    model = tiny_llama()
    request = Request(
        shape_of_config(model.config),
        named_machine("rtx4090", num_ssds=0),
        seq_length=16,
        micro_batch=12,
        modes=(OptimizerMode(method="adamw"),),
    )
    advice = advise(request)
    answer = next(a for a in advice.answers if a.problem.setup.overlap == "forward")
    config = deepspeed_json(request, answer)
    config["bf16"] = {"enabled": False}
    engine = make_engine(config, model)
    losses = [train_step(engine, 0) for _ in range(3)]
    return {
        "losses": losses,
        "overlap": engine.optimizer.settings.host.overlap,
        "host": engine.optimizer.metrics()["optimizer_host_bytes"],
        "stage": engine.optimizer.settings.stage,
    }


def test_written_for_states_in_host_memory(ranks: Ranks) -> None:
    (found,) = ranks.run(trained, 1)
    assert found["losses"][-1] < found["losses"][0]
    assert (found["stage"], found["overlap"]) == (3, "forward")
    assert found["host"] > 0
