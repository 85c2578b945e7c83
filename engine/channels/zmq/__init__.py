"""Rows to Workers on other hosts: their owner picks them and sends one frame for each buffer."""
