"""Checkpoints: sets of fragments of logical tensors, with an index. They belong to a run, not to a layout."""

from .format.communicator import SOLO, Communicator, GroupCommunicator, Solo, StoreCommunicator
from .format.errors import CheckpointError
from .format.fragment import MASTER, WEIGHT, Fragment, FragmentSpec
from .format.manifest import Meta
from .read.reader import Checkpoint, open_checkpoint
from .save.writer import save, write_tensors

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
