"""Runs in a browser: a report in one file, and a live server."""
