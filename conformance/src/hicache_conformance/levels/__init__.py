"""The cases, a module a level."""
