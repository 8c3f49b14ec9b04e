"""The package's version: the one place that holds it, readable without importing the package."""

__version__ = "0.1.0"
