"""The front's process: the control plane of `control.front` on sockets and timers, under the HTTP server."""
