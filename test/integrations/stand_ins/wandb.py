"""Replaces the package that Axolotl imports and by default does not use."""
