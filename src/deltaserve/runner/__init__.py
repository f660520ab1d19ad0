"""F5: the torch Executor: a StepPlan becomes tensors, logits become tokens."""
