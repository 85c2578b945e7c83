"""Tests; a package, so that one folder can use the graphs of another."""
