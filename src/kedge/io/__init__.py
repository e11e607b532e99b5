"""Files: the format of saved detectors, and networks as plain data."""
