"""How many tokens a call may ask for, and how a rollout ends; pure, so that client and conformance check agree."""

from __future__ import annotations


def call_budget(
    *,
    input_len: int,
    generated: int,
    response_cap: int | None,
    context_limit: int | None,
    length_limit: int | None = None,
) -> int:
    """Returns the largest number of tokens that the next call may generate; 0: send none, it ends as `length`.

    min(response_cap - generated, context_limit - input_len, length_limit - input_len), at least 0.

    Args:
        input_len: tokens that the call would feed.
        generated: tokens that earlier calls generated.
        response_cap: most generated tokens of a rollout; None: no cap.
        context_limit: most tokens that the engine holds; None: no limit.
        length_limit: most tokens of the whole rollout, environment tokens included; None: no limit.

    Raises:
        ValueError: no limit at all is given.
    """
    limits = [
        limit - used
        for limit, used in ((response_cap, generated), (context_limit, input_len), (length_limit, input_len))
        if limit is not None
    ]
    if not limits:
        raise ValueError("call_budget: response_cap, context_limit or length_limit expected, all are None")
    return max(0, min(limits))


def rollout_finish(finish: str, budget: int) -> str:
    """Returns the finish of a rollout whose last call ended with `finish`: an abort with no budget left is `length`."""
    return "length" if finish == "abort" and budget == 0 else finish
