"""An HTTP client of OpenAI-compatible servers, for all commands that ask one."""
