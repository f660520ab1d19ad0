"""Pure: who is on the other end of a link: boot, compatibility, heartbeat."""
