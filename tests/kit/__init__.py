"""Tools of the tests: stores that fail on demand, and filesystems of a kind."""
