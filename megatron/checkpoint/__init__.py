"""Checkpoints: sets of fragments of logical tensors, with an index. They belong to a run, not to a layout."""

from .communicator import SOLO, Communicator, GroupCommunicator, Solo, StoreCommunicator
from .errors import CheckpointError
from .fragment import MASTER, WEIGHT, Fragment, FragmentSpec
from .meta import Meta
from .reader import Checkpoint, open_checkpoint
from .writer import save, write_tensors

__all__ = [
    "MASTER",
    "SOLO",
    "WEIGHT",
    "Checkpoint",
    "CheckpointError",
    "Communicator",
    "Fragment",
    "FragmentSpec",
    "GroupCommunicator",
    "Meta",
    "Solo",
    "StoreCommunicator",
    "open_checkpoint",
    "save",
    "write_tensors",
]
