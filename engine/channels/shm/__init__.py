"""Rows to Workers of the same host: they stay in the producer's slabs, and readers map them."""
