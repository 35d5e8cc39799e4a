"""Stands in for the package that Axolotl imports and, unless asked to, does not use."""
