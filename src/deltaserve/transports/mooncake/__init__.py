"""By Mooncake's transfer engine, in a process of its own."""
