"""Development tools: what made the files under models/. Nothing here is installed or imported by the server."""
