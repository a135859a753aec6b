"""The endpoints, documents and recipes of tests/endpoint_fixtures.py."""

from endpoint_fixtures import (  # noqa: F401
    documents,
    exact_copies_only,
    few,
    hostile,
    impatient,
    make_recipe,
    serving,
    short_pauses,
    the_key_is_left_nowhere,
)
