"""What frameworks need beside `legato.distribute`: each attaches legato once the framework has prepared everything."""
