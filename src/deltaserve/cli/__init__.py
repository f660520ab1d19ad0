"""The command line: flags, YAML and environment into one frozen Settings; one file per command."""
