"""Integrations with frameworks, which attach legato after the framework has prepared model and optimizers."""
