"""Suites: whole studies, from training to the table."""
