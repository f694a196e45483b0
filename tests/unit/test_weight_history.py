"""Old weights are kept exactly as long as a token that may still be trained on refers to them."""

import numpy as np
import torch

from experiments.buffer import Sample, SampleQueue
from experiments.rollout import OpenGroup, OpenRollout
from experiments.weight_history import WeightHistory
from strategies.types import EngineCall, Rollout
from tests.unit.test_rollout import rollouter_with


def call(*versions):
    n = len(versions)
    ids, log_probs = np.full(n, 1, np.int32), np.full(n, -1, np.float32)
    return EngineCall("r", 2, ids, log_probs, None, np.array(versions, np.int32), "abort")


def test_versions_that_nothing_refers_to_are_dropped():
    history = WeightHistory({})
    for version in range(4):
        history.publish(version, {"w": torch.zeros(8)})
    history.keep({3, 1, -1})
    assert history.versions == [1, 3]
    assert history.get(2) is None
    assert history.nbytes == 2 * 8 * 4
    assert WeightHistory(history.state_dict()).versions == [1, 3]


def test_waiting_rollouts_keep_the_versions_of_their_tokens():
    rollout = Rollout("r", np.array([5, 6, 1, 1], np.int32), 2, (call(4, 6),), 1, 1, 2)
    queue = SampleQueue([[Sample(rollout, 0, "d", 0.0, 4, 0)]])
    assert queue.versions_in_use() - {-1} == {4, 6}


def test_a_running_call_may_return_tokens_of_every_version_since_it_was_sent():
    finished = OpenRollout("a", 0, np.array([1], np.int32), 2, [call(2)], finished=True)
    running = OpenRollout("b", 0, np.array([1], np.int32), 3, [call(3)], version_sent=5)
    rollouter = rollouter_with([OpenGroup(0, [finished, running])])
    assert rollouter.versions_in_use(newest=7) == {2, 3, 5, 6, 7}
