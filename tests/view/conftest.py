"""The endpoint of tests/endpoint_fixtures.py."""

from endpoint_fixtures import serving  # noqa: F401
