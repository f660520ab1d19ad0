"""Transport by NIXL over UCX: RDMA, TCP or shared memory."""
