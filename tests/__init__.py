"""The tests, sorted by what they are about; shared code is imported as ``tests.<area>.<module>``."""
