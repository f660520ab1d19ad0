"""The torch Executor: a StepPlan becomes tensors, logits become tokens."""
