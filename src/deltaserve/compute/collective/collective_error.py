"""What ends an exchange between ranks; without torch, for whoever only has to hear of it."""


class CollectiveError(RuntimeError):
    """A rank did not take part in time, or is gone. The ranks are out of step for good: the worker ends."""
