"""The functions of the contract suite, among them the gate."""

from tests.contract.conftest import functions

__all__ = ["functions"]
