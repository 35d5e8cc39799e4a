"""Runnable recipes over all of the package."""
