"""The blocking faces, generated from `_async`; the driver is written by hand."""
