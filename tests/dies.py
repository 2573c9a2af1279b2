"""A test that ends its process as a library does: collected by name only, in `test_conftest.py`."""

import os


def test_dies():
    os.write(2, b"the reason is on standard error\n")
    os.abort()
