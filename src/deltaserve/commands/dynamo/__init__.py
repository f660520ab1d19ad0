"""A server as a worker of NVIDIA Dynamo."""
