"""`deltaserve sim`: the fault simulator from the command line, in several processes."""
