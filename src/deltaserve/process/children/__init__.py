"""Starting, watching and ending child processes: pipes, signals, logs, private folders."""
