"""F6: the front's sockets and timers: FrontCore driven by an event loop, offered to the HTTP server as its Engine."""
