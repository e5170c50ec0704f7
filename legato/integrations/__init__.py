"""Integrations with frameworks, each of which attaches legato once the framework has prepared everything."""
