"""The tapes of a backend's layers, and after how many calls there are such."""

from hmt_deepspeed.activations.tape import Tape

RECORDED, CHECKED = 2, 3  # calls of a shape after which there is a tape, and it has been used


def tapes(backend):
    """Of the layers' calls, in order."""
    return [tape for found in backend._tapes._found.values() for tape in found.values()]


def usable(backend):
    return [t.can_replay and t.is_checked if isinstance(t, Tape) else t for t in tapes(backend)]
