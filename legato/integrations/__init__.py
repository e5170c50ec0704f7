"""Integrations with frameworks. Each attaches legato after the framework has prepared model and optimizers."""
