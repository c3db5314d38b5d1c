"""An objective's weights of labels reach the batch, and so do the data's. Other names are refused."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.data.plan import Targets
from megatron.data.sample import Sample
from megatron.objectives.contract import Objective
from megatron.objectives.named import objective_of
from tests.data.make import configuration, write_documents

EOD = 0


class EvenPlaces(Objective):
    """Labels at even places of their document weigh 0.5, others 0."""

    weighs = needs_documents = True

    def weights(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        place, found = 0, []
        for begin in begins:
            place = 0 if begin else place + 1
            found.append(0.5 if place % 2 == 0 else 0.0)
        return np.array(found[1:])


class Wrong(Objective):
    weighs = True
    answer: list[float] = []

    def weights(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        return np.array(self.answer)


def loader(tmp_path, split="train", **data):
    """One sample of all tokens of a file with documents of 5, 2 and 7, in the file's order."""
    write_documents(tmp_path / "text", [[5, 6, 7, 8, EOD], [9, EOD], [4, 4, 4, 4, 4, 4, EOD]])
    source = [{"path": str(tmp_path / "text")}]
    config = configuration(
        {"train": source, "validation": {"held": source}, "order": "sequential", "mask_loss_at_eod": True, **data},
        run={"dir": str(tmp_path / "run")},
        training={"steps": 1, "sequence_length": 13, "global_batch_size": 1, "micro_batch_size": 1},
        objective={"type": f"{__name__}:EvenPlaces"},
        tokenizer={"type": "none", "eod_id": EOD},
    )
    return build_loader(config, data_rank=0, data_ranks=1, split=split)


def test_weights_reach_the_batch(tmp_path):
    batch = loader(tmp_path).step(0)
    #        label    6  7    8  end  9    end 4    4  4    4  4    4  end
    #        place    1  2    3  4    0    1   0    1  2    3  4    5  6
    assert batch.labels.flatten().tolist() == [6, 7, 8, EOD, 9, EOD, 4, 4, 4, 4, 4, 4, EOD]
    assert batch.loss_mask.flatten().tolist() == [0, 0.5, 0, 0, 0.5, 0, 0.5, 0, 0.5, 0, 0.5, 0, 0]
    assert batch.documents is None and batch.positions is None  # attention still goes across documents


def test_documents_may_be_apart_as_well(tmp_path):
    batch = loader(tmp_path, reset_attention_at_eod=True).step(0)
    assert batch.documents.flatten().tolist() == [0] * 5 + [1] * 2 + [2] * 6
    assert batch.loss_mask.sum() == 2.5


def test_validation_has_the_weights_of_the_data_alone(tmp_path):
    batch = loader(tmp_path, "validation").step(0)
    assert batch.loss_mask.flatten().tolist() == [float(label != EOD) for label in batch.labels.flatten().tolist()]


@pytest.mark.parametrize("answer", [[1.0], [1.0, -1.0, 1.0], [1.0, float("nan"), 1.0], []])
def test_weights_that_cannot_be(answer):
    objective = Wrong()
    objective.answer = answer
    with pytest.raises(DataError, match="3 labels must have a finite weight of at least 0: Wrong gives an array"):
        Targets(objective).of(Sample(np.arange(4)))


def test_what_is_no_objective_is_refused(tmp_path):
    assert type(objective_of(configuration({"synthetic": "copy"}))) is Objective
    with pytest.raises(UserError, match="must be a subclass of megatron.objectives.contract.Objective"):
        objective_of(configuration({"synthetic": "copy"}, objective={"type": "fractions:Fraction"}))
