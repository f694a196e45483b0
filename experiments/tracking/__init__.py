"""Where a run's numbers go: files in the run directory, W&B, a progress bar."""

from experiments.tracking.tracker import Tracker

__all__ = ["Tracker"]
