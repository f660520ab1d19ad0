"""Pure: decide what the next step computes. plan() -> frozen StepPlan; commit(StepResult)."""
