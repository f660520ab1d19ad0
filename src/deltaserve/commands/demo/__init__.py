"""`deltaserve demo`: prefill and decode apart on a small model, decode's cache off and on."""
