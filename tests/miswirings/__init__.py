"""The same graph wired rightly and wrongly, for pyright to read; it is never run."""
