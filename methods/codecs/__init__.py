"""Codecs: the formats of cached rows, a family a file."""
