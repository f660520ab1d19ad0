"""How settings are given: the command line, YAML and the environment, and the flags of other servers."""
