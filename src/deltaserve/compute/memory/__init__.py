"""A rank's memory: arenas of pages and states, page tables, staging copies, workspaces."""
