"""Transport by Mooncake's transfer engine, which runs in a process of its own."""
