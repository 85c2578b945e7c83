"""Tests; a package so that those in one folder can use the graphs of another."""
