"""DeepSpeed's own "activation_checkpointing" section, read strictly: DeepSpeed drops what it does not know."""

from __future__ import annotations

from pydantic import Field, ValidationError

from hmt_deepspeed.config.fields import PositiveInt, StrictModel
from hmt_deepspeed.config.problems import field_problems

__all__ = ["ActivationCheckpointing"]

SECTION = "activation_checkpointing"


class ActivationCheckpointing(StrictModel):
    """What is done with the inputs of checkpointed layers; the defaults are DeepSpeed's."""

    partition_activations: bool = Field(
        default=False, description="Each rank of a model-parallel group holds its part of them."
    )
    cpu_checkpointing: bool = Field(default=False, description="Hold them in pinned host memory.")
    contiguous_memory_optimization: bool = Field(
        default=False, description="Hold them in memory that is allocated once."
    )
    number_checkpoints: PositiveInt | None = Field(
        default=None, description="Checkpoints held at once, for that memory."
    )
    synchronize_checkpoint_boundary: bool = Field(
        default=False, description="Wait for the device where a checkpoint begins and ends."
    )
    profile: bool = Field(
        default=False, description="Time the forward and the backward of checkpoints."
    )

    @classmethod
    def from_section(cls, section: object) -> ActivationCheckpointing:
        """Validate the parsed section; None, where there is none, gives the defaults.

        Raises:
            ValueError: with a line for every problem: the full key, the value given, what is legal and what
                to do.
        """
        if section is None:
            return cls()
        if not isinstance(section, dict):
            raise ValueError(
                f"{SECTION} is {section!r}, legal is an object. Remove it or write {{}}."
            )
        try:
            found = cls.model_validate(section)
        except ValidationError as error:
            problems = field_problems(error, cls, SECTION)
            raise ValueError(
                "\n".join(f"{key}: {text}" for key, text in problems.items())
            ) from None
        found.check()
        return found

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            ValueError: contiguous memory of unknown size.
        """
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            raise ValueError(
                f"{SECTION}.number_checkpoints is None, legal with contiguous_memory_optimization is an "
                "integer >= 1. Set it to the number of checkpoints held at once, which is the number of "
                "checkpointed layers unless several forwards come before a backward."
            )
