"""The commands that use a server or look at one: bench, chat, demo, doctor, simulate, verify."""
