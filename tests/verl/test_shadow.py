"""Shadow scoring on verl's batch, with a scorer whose log-probs are read off the rows."""

import pytest
import torch

from experiments.verl_backend.shadow import score_shadows
from strategies import Exact, Replace, SliceConcat
from tests.verl.kit import Reply, merging
from tests.verl.test_agent_loops import merged_output, processed, worker

CAP = 2.0


def test_merge_errors_are_differences_to_the_exact_views_on_the_same_tokens():
    rule = merging(shadow={"exact": Exact(), "replace": Replace(), "slice_concat": SliceConcat()})
    w = worker()
    outputs = [
        merged_output([Reply(3, 0), Reply(4, 1, "stop")], rule),
        merged_output([Reply(7, 0, "stop")], rule),
    ]
    batch = w._postprocess([processed(w, output) for output in outputs])
    rows_before, mask_before = batch.batch["routed_experts"].clone(), batch.batch["response_mask"].clone()
    passes = []

    def log_probs(data) -> torch.Tensor:
        """Version 1 on the row of the prompt's last position costs every token 0.1 nats."""
        passes.append(data)
        newer = (data.batch["routed_experts"][:, 7, 0, 1] - 8).float()
        return (-1.0 - 0.1 * newer)[:, None].expand(-1, 12)

    metrics = score_shadows(batch, batch.non_tensor_batch["routemerge_shadow"], log_probs, CAP)
    assert len(passes) == 2 + 1 + 1  # exact needs a pass per view
    assert torch.equal(batch.batch["routed_experts"], rows_before)
    assert torch.equal(batch.batch["response_mask"], mask_before)
    # exact: tokens before the interruption on version 0's rows, those after it on version 1's
    assert metrics["merge/exact/abs"] == 0.0
    assert metrics["merge/replace/abs"] == pytest.approx(0.1 * 3 / 14, rel=1e-5)
    assert metrics["merge/slice_concat/abs"] == pytest.approx(0.1 * 4 / 14, rel=1e-5)
    assert metrics["gap/replace/abs"] == pytest.approx((7 * 0.1 + 7 * 0.0) / 14, rel=1e-5)
