"""F6: one worker process (loop, step and transfer threads) and the supervisor that keeps processes running."""
