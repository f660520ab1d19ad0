"""Pure: the production control planes in virtual time, over simulated links, transport and executor."""
