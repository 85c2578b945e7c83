"""Rows and tensors from one Worker to another, under two contracts (contract.py).

    pull         inproc.py, shm/ (one host), zmq/ (between hosts), routed_channel.py (both)
    scheduled    tensors/, and beside it memories that several Workers map

block_requests.py describes a block for every transport; layout.py and frames.py take record batches
apart and put them together; multipart.py sends a block as frames; peers.py asks other Workers for
blocks.
"""
