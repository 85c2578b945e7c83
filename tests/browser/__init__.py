"""Tests of the page of `dataflow watch` in Debian's Chromium."""
