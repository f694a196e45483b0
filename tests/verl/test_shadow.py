"""Shadow scoring on verl's batch, with a scorer whose log-probs are read off the rows."""

import dataclasses

import pytest
import torch

from experiments.schema import AlgorithmConfig, OldLogProb, RatioLevel
from experiments.verl_backend.agent_loops import ROLLOUT_FIELD
from experiments.verl_backend.settings import ShadowRules
from experiments.verl_backend.shadow import score_shadows
from strategies import Replace, SliceConcat
from tests.verl.kit import Reply, merging
from tests.verl.test_agent_loops import merged_output, processed, worker

ALGORITHM = AlgorithmConfig(
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=3.0,
    ratio_level=RatioLevel.token,
    old_log_prob=OldLogProb.bypass,
    importance_weight_cap=2.0,
)


def test_merge_errors_are_differences_to_the_exact_views_on_the_same_tokens():
    rule = merging(keeps_rows=True)
    w = worker()
    outputs = [merged_output([Reply(3, 0), Reply(4, 1, "stop")], rule), merged_output([Reply(7, 0, "stop")], rule)]
    batch = w._postprocess([processed(w, output) for output in outputs])
    batch.batch["advantages"] = torch.ones(2, 12)
    rollouts = [dataclasses.replace(r, rollout_id=str(i)) for i, r in enumerate(batch.non_tensor_batch[ROLLOUT_FIELD])]
    rows_before, mask_before = batch.batch["routed_experts"].clone(), batch.batch["response_mask"].clone()
    passes = []

    def log_probs(data) -> torch.Tensor:
        """Version 1 on the row of the prompt's last position costs every token 0.1 nats."""
        passes.append(len(data))
        newer = (data.batch["routed_experts"][:, 7, 0, 1] - 8).float()
        return (-1.0 - 0.1 * newer)[:, None].expand(-1, 12)

    rules = ShadowRules("slice_concat", 1, {"replace": Replace(), "slice_concat": SliceConcat()})
    metrics, lines = score_shadows(batch, rollouts, log_probs, rules, ALGORITHM, 1)
    # Four different views, two at a time: the first segment's exact one, two of all tokens, the uninterrupted rollout.
    assert passes == [2, 2]
    assert torch.equal(batch.batch["routed_experts"], rows_before)
    assert torch.equal(batch.batch["response_mask"], mask_before)
    # exact: tokens before the interruption on version 0's rows, those after it on version 1's
    assert metrics["merge/exact/abs"] == 0.0
    assert metrics["merge/replace/abs"] == pytest.approx(0.1 * 3 / 14, rel=1e-5)
    assert metrics["merge/slice_concat/abs"] == pytest.approx(0.1 * 4 / 14, rel=1e-5)
    assert metrics["merge/slice_concat/abs_by_segment/last"] == pytest.approx(0.1, rel=1e-5)
    assert metrics["gap/replace/abs"] == pytest.approx((7 * 0.1 + 7 * 0.0) / 14, rel=1e-5)
    assert [(line["rollout"], line["segment"], line["tokens"]) for line in lines] == [
        ("0", 0, 3),
        ("0", 1, 4),
        ("1", 0, 7),
    ]
    assert lines[1]["errors"]["slice_concat"][:2] == pytest.approx([0.4, 4])
