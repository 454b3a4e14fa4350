"""Checkpoints from HF's format to the learner's and back, and the comparison of two, on machines without a GPU."""
