"""The quickest of tests/machines, because it needs no packages."""

from tests.machines.cases import _empty_folder, test_read_only_disk  # noqa: F401
